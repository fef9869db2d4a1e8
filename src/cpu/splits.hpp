// Key splits: what each leaves in the workspace, and putting it together.
#pragma once

#include <cstdint>

#include "core/backend.hpp"
#include "cpu/row_state.hpp"

namespace abacist::cpu {

/// Of split s and row r, counted over [total_q][h_q]:
struct SplitResults {
  float* o;          ///< [splits][rows][d_v], not yet divided by the sum
  RowState* states;  ///< [splits][rows]
  std::int64_t splits;
  std::int64_t rows;
};

/// O and LSE of the first `tokens` query positions from all splits, in the order of the keys.
/// With m the largest maximum, w_s = exp2(m_s - m): O = sum w_s O_s / sum w_s sum_s
/// (FlashAttention's merge of key blocks). Sinks join here.
void merge_splits(const core::ForwardCall& call, const SplitResults& results, std::int64_t tokens,
                  int threads);

}  // namespace abacist::cpu
