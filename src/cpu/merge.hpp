// Merging of partial results, row by row.
#pragma once

#include <cstdint>
#include <span>

#include "abacist/attention.hpp"

namespace abacist::cpu {

/// `merge` without its checks, for the first `rows` of the batch * s_q (or total_q) rows. `sinks`
/// may be absent.
void merge_rows(std::span<const Partial> parts, const Tensor& o, const Tensor& lse,
                const ConstTensor& sinks, std::int64_t rows, int threads);

}  // namespace abacist::cpu
