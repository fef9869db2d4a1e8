// The error bounds, in one place (docs/contract.md, "Accuracy").
//
// u is the unit roundoff: 2^-24 (f32), 2^-11 (f16), 2^-8 (bf16). ref is the float64 oracle's
// tensor, and E the largest error of the plain version (support/plain.hpp) against the same oracle.
//
//   f16, bf16   |x - ref| <= 2 E + 2 u max|ref|
//     E is what the type itself costs on this very data; twice it leaves room for another order of
//     the same roundings (P rounded before instead of after the division by its sum), the second
//     term for rows on which the plain version happens to be exact.
//
//   f32         |x - ref| <= 2 E + 2 u (sqrt(n) + S) max|ref|
//     n is the number of terms behind an element: d_qk + s_k for O and dQ, d_qk + d_v + group s_q
//     for dK and dV; rounding errors of a sum of n terms grow like u sqrt(n). S is the largest sum
//     of |scale q_e k_e| + |bias| over all visible pairs: a score carries an absolute error of
//     about u S, which the softmax passes on as a relative one.
//
//   dQ, dK      2 u G more, G = |scale| max p_ij (sum |dO_e v_e| + sum |dO_e o_e|) times max|k| or
//   max|q|
//     dP - D can cancel to nothing (a row that sees one key), the rounding errors of its parts do
//     not.
//
//   dBias       2 u G more, G = max p (sum |dO_e v_e| + sum |dO_e o_e|) times sqrt(n) (f32: times
//               1 + S) for a sum of n pairs, for the same reason.
//
//   dSink       2 u G more, G = max p_sink (sum |dO_e o_e| + |dLSE|) times sqrt(rows) (f32: times
//               1 + S): rows of either sign cancel, their rounding errors do not.
//
//   yardstick   f32: E <= 16 u ((sqrt(n) + S) max|ref| + G / p)
//     Otherwise oracle and plain version disagree by more than rounding: one of them is wrong, and
//     a bound made of their difference would let anything pass.
//
//   LSE         |x - ref| <= u32 (4 + sqrt(d_qk)) (S + |ref|) + 2^-126, row by row
//     S as above, but of the row's own keys: LSE is a mean of the scores plus a logarithm, so its
//     error is a mean of theirs, that of one score where a key takes it all (an attention sink):
//     d_qk products added to partial sums of size up to S. Storing it costs u32 |ref|.
//
//   mean        |mean(x - ref)| <= 2 |plain's| + 6 rms(plain) / sqrt(rows)
//                                  + 4 u32 ((1 + S / sqrt(rows)) max|ref| + G)
//   growth      the same of (x - ref) sign(ref); neither where rows of the inputs repeat. Rows of
//               the plain result that are equal to the last bit count once.
//     Unbiased roundings average out over rows (the errors within one row share P and are
//     correlated; with huge scores one near-tie, off by u32 S, outweighs the rest). A bias does
//     not: a truncating store is off by u/2 towards zero on average and fails this first.
#pragma once

#include <string>
#include <vector>

#include "support/case.hpp"
#include "support/plain.hpp"

namespace abacist::testing {

inline constexpr double kFloatRoundoff = 0x1p-24;

constexpr double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return 0x1p-8;
    case DType::f16:
      return 0x1p-11;
    case DType::f64:
      return 0x1p-53;
    case DType::f32:
    case DType::i32:
    case DType::u8:
      break;
  }
  return kFloatRoundoff;
}

/// What a case must give: computed once, compared with every backend and instruction set.
struct Expected {
  Expected(const Instance& instance, bool with_gradients);

  Results oracle;
  Gradients oracle_gradients;
  Plain plain;
};

/// Compares as the bounds above say; each violation is a test failure that names the worst index,
/// both values and the ratio to the bound. Rows with LSE = -inf must be exactly 0.
void check_forward(const Instance& instance, const Results& actual, const Expected& expected,
                   const std::string& who);
void check_backward(const Instance& instance, const Gradients& actual, const Expected& expected,
                    const std::string& who);

/// Runs forward and backward on every instruction set of this machine and checks both.
void check_on_every_target(const Instance& instance);

/// One array against another, element by element, |actual - reference| <= bound. NaN and infinities
/// of the reference must be met exactly.
void check_within(const std::string& name, const TensorSpec& spec,
                  const std::vector<double>& actual, const std::vector<double>& reference,
                  const std::vector<double>& bound, const std::string& who);
void check_within(const std::string& name, const TensorSpec& spec,
                  const std::vector<double>& actual, const std::vector<double>& reference,
                  double bound, const std::string& who);

}  // namespace abacist::testing
