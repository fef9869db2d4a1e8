// Attention as a plain program of the same precision would compute it: the yardstick of the error
// bounds (support/bounds.hpp), and the magnitudes that the bounds need.
#pragma once

#include <vector>

#include "support/case.hpp"

namespace abacist::testing {

/// Every array in row-major order of its tensor's shape. Float32 scores and accumulation; P and dS
/// rounded to the input type before the second product; outputs rounded to the output type.
struct Plain {
  std::vector<double> o, lse;
  std::vector<double> dq, dk, dv;  ///< empty unless asked for
  /// Per row, as lse: the largest sum of |scale q_e k_e| (+ |bias|) over its visible keys, or its
  /// |sink|, plus the LSE's own size. What rounding errors of the scores are proportional to.
  std::vector<double> score_size;
  /// The largest |scale| p (sum |dO_e v_e| + sum |dO_e o_e|) of a visible pair: what dS is before
  /// dP - D cancels.
  double ds_size = 0.0;
  double ds_row_size = 0.0;     ///< the same without p, whose sum over a row is 1
  std::vector<double> d_sinks;  ///< [h_q]
  std::vector<double> d_bias;
  double d_bias_size = 0.0;  ///< the largest p (sum |dO_e v_e| + sum |dO_e o_e|) of a pair
  double d_sink_size = 0.0;  ///< the largest p_sink (sum |dO_e o_e| + |dLSE|) of a row
};

Plain compute_plain(const Instance& instance, bool with_gradients);

}  // namespace abacist::testing
