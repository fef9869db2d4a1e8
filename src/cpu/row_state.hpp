// What a query row carries between its keys and its result.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace abacist::cpu {

/// The sink that is none.
inline constexpr float kNoSink = -std::numeric_limits<float>::infinity();

/// The online softmax of one row over some of its keys: the largest score and the sum of
/// exp2(score - maximum), in base-2 units. `top` is the largest score in natural units, kept where
/// a bias may have no place among base-2 floats. Beside it stands O, not yet divided by the sum.
/// Key splits leave one of these a row, and not an LSE: at scores of 10^6 the logarithm of the sum
/// drowns in a float LSE, and with it how much each split weighs.
struct RowState {
  float maximum = -std::numeric_limits<float>::infinity();
  float sum = 0.0f;
  float top = -std::numeric_limits<float>::infinity();
  bool seen = false;  ///< some key is visible, even if its score is -inf
};

/// A row over all of its keys.
struct WholeRow {
  double maximum = -std::numeric_limits<double>::infinity();
  double sum = 0.0;
  float top = -std::numeric_limits<float>::infinity();
  bool seen = false;

  WholeRow() = default;
  explicit WholeRow(const RowState& x)
      : maximum(double{x.maximum}), sum(double{x.sum}), top(x.top), seen(x.seen) {}

  /// What sums and O of keys with this maximum are multiplied by. Scores of -inf alone have sum 0
  /// and weigh nothing beside others.
  double weight_of(double part) const {
    return part == -std::numeric_limits<double>::infinity() ? 0.0 : std::exp2(part - maximum);
  }

  /// The sink, a natural logit, joins maximum and sum; -inf is none. The largest of the row may be
  /// the sink, which then rescales what the keys gave: by the factor returned. NaN and +inf make
  /// the row NaN.
  double add_sink(float sink) {
    if (sink == kNoSink) return 1.0;
    const double base2 = double{sink} * std::numbers::log2e;
    const double largest = base2 <= maximum ? maximum : base2;
    const double factor = std::exp2(maximum - largest);
    sum = sum * factor + std::exp2(base2 - largest);
    maximum = largest;
    return factor;
  }

  /// LSE of a row that sees keys. All of its scores -inf: NaN, as 0 / 0 in O. `biased`: a maximum
  /// that had no place among base-2 floats is the lowest one, and `top` has it.
  float lse(bool biased) const {
    if (sum == 0.0) return std::numeric_limits<float>::quiet_NaN();
    if (biased && maximum == double{std::numeric_limits<float>::lowest()}) {
      return static_cast<float>(double{top} + std::log(sum));
    }
    return static_cast<float>((maximum + std::log2(sum)) * std::numbers::ln2);
  }
};

}  // namespace abacist::cpu
