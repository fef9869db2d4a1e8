// Attention as a plain program of the same precision computes it: float32 scores and sums, P and dS
// rounded to the input type before the second product, results rounded to the output type. The
// error that it makes against the oracle is what the type costs on this very data, and the
// yardstick of the bounds in verify.cpp.
#pragma once

#include <cstdint>
#include <vector>

#include "abacist/problem.hpp"
#include "operands.hpp"
#include "progress.hpp"

namespace abacist::cli {

/// What is computed: some rows of every head.
struct PlainProblem {
  const Inputs& inputs;
  Options options{};
  DType o_dtype = DType::f32;
  std::vector<std::int64_t> rows;  ///< query rows, ascending
  /// d_o [b, s_q, h_q, d_v] and d_lse [b, h_q, s_q], over all rows; without d_o the gradients stay
  /// empty.
  const Gradients& given;
};

/// Row-major: o [b, rows, h_q, d_v], lse and score_size [b, h_q, rows], dq as o with d_qk, dk and
/// dv as k and v, d_sinks and d_bias as those (sums over the given rows only).
struct PlainResult {
  std::vector<double> o, lse, dq, dk, dv, d_sinks, d_bias;
  /// The largest sum of |scale q_e k_e| + |bias| (and |sink|) over the row's visible keys: errors
  /// of its scores are proportional to it.
  std::vector<double> score_size;
  /// As score_size, with gradients: the largest |scale| p (sum |dO_e v_e| + sum |dO_e o_e|), which
  /// is the size of dS before dP - D cancels.
  std::vector<double> ds_size;
  /// The same of terms of d_bias and d_sinks: the largest p (|dP| + |D|), where |D| is the sum of
  /// the sizes that D is made of.
  double d_bias_size = 0.0;
  double d_sink_size = 0.0;
};

/// Inputs without pages.
PlainResult compute_plain(const PlainProblem& problem, Progress* progress);

/// Keys [begin, end) that a query sees; written down from the contract, apart from the library's
/// rule.
struct KeyRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};
KeyRange visible_keys(const Mask& mask, std::int64_t s_q, std::int64_t len_k, std::int64_t row);

}  // namespace abacist::cli
