#include "picture/walk.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/mask.hpp"
#include "core/numeric.hpp"
#include "operands.hpp"

namespace abacist::cli {
namespace {

constexpr double kLowest = -std::numeric_limits<double>::infinity();

double dot(const Operand& q, const Operand& k, std::int64_t key) {
  double sum = 0.0;
  for (std::int64_t c = 0; c < q.spec.shape[3]; ++c) {
    sum += core::load_element(q.data, q.spec.dtype, c * q.spec.stride[3]) *
           core::load_element(k.data, k.spec.dtype, key * k.spec.stride[1] + c * k.spec.stride[3]);
  }
  return sum;
}

}  // namespace

Walk walk_row(const Operand& q, const Operand& k, const Problem& problem, std::int64_t row,
              double slope, std::int64_t block) {
  const Operands& x = problem.operands;
  const core::MaskRule rule = core::mask_rule(problem.options.mask, x.q.shape[1], x.k.shape[1]);
  const core::Interval visible = rule.visible(row);
  const Score& score = problem.options.score;
  const double scale = score.scale.value_or(1.0 / std::sqrt(static_cast<double>(x.q.shape[3])));
  Walk walk{row, visible.begin, {}, {}};
  double maximum = kLowest;
  double sum = 0.0;
  for (std::int64_t first = visible.begin; first < visible.end; first += block) {
    WalkStep step{first, std::min(first + block, visible.end)};
    step.lowest = -kLowest;
    step.highest = kLowest;
    for (std::int64_t key = step.first_key; key < step.last_key; ++key) {
      double s = scale * dot(q, k, key - visible.begin);
      if (score.softcap != 0.0) s = score.softcap * std::tanh(s / score.softcap);
      s -= slope * std::abs(static_cast<double>(row + rule.shift - key));
      walk.scores.push_back(s);
      step.lowest = std::min(step.lowest, s);
      step.highest = std::max(step.highest, s);
    }
    step.maximum = std::max(maximum, step.highest);
    step.correction = sum == 0.0 ? 1.0 : std::exp(maximum - step.maximum);
    sum *= step.correction;
    for (std::int64_t key = step.first_key; key < step.last_key; ++key) {
      sum += std::exp(walk.scores[static_cast<std::size_t>(key - visible.begin)] - step.maximum);
    }
    maximum = step.maximum;
    step.sum = sum;
    walk.steps.push_back(step);
  }
  return walk;
}

}  // namespace abacist::cli
