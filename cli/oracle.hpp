// The float64 oracle (backend "reference") over all rows or a sample of them.
#pragma once

#include <cstdint>
#include <vector>

#include "operands.hpp"
#include "progress.hpp"

namespace abacist::cli {

/// float64 tensors over the sampled rows: o [b, rows, h_q, d_v], lse [b, h_q, rows], dq; dk, dv
/// and the gradients of sinks and bias, only when the sample is all rows.
struct OracleResult {
  Operand o, lse;
  Gradients gradients;
};

/// `rows` ascending; all of them, or a sample. A sampled row is posed as a problem of its own over
/// the keys that it sees, which costs O(s_k) instead of O(s_q s_k); what counts positions (ALiBi,
/// dropout) or differs between sequences (key lengths) would be wrong there, so that a sample takes
/// none of it. Inputs without pages. `given` has d_o and d_lse; without d_o there is no backward
/// pass.
OracleResult run_oracle(const Inputs& inputs, const Options& options,
                        const std::vector<std::int64_t>& rows, const Gradients& given,
                        Progress* progress);

}  // namespace abacist::cli
