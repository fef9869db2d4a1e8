#include "api/overlap.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/figures.hpp"

namespace abacist::api {
namespace {

/// One axis in bytes: offsets `stride * [low, high]`, stride > 0.
struct Axis {
  std::int64_t stride;
  std::int64_t low;
  std::int64_t high;
};

/// Appends the axes of `spec` with more than one element; `sign` -1 negates the offsets.
void append_axes(const TensorSpec& spec, int sign, std::vector<Axis>& axes) {
  for (std::size_t i = 0; i < static_cast<std::size_t>(spec.rank); ++i) {
    const std::int64_t steps = spec.shape[i] - 1;
    if (steps <= 0 || spec.stride[i] == 0) continue;  // a stride that is not taken may be anything
    const std::int64_t stride = spec.stride[i] * size_of(spec.dtype);
    const bool positive = (stride > 0) == (sign > 0);
    const Axis axis{std::abs(stride), positive ? 0 : -steps, positive ? steps : 0};
    // Axes of equal stride act as one: slices of one array would else have as many ways to the same
    // offset as they have elements.
    const auto same = std::find_if(axes.begin(), axes.end(),
                                   [&](const Axis& other) { return other.stride == axis.stride; });
    if (same == axes.end()) {
      axes.push_back(axis);
    } else {
      same->low += axis.low;
      same->high += axis.high;
    }
  }
}

std::int64_t floor_div(std::int64_t a, std::int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

/// Is there an x with low_i <= x_i <= high_i and target_low <= sum stride_i x_i <= target_high?
/// Depth-first over axes by falling stride; the reach of what is left prunes all but a few values.
class Search {
 public:
  explicit Search(std::vector<Axis> axes) : axes_(std::move(axes)), reach_(axes_.size() + 1) {
    std::sort(axes_.begin(), axes_.end(),
              [](const Axis& a, const Axis& b) { return a.stride > b.stride; });
    for (std::size_t i = axes_.size(); i-- > 0;) {
      reach_[i].first = reach_[i + 1].first + axes_[i].stride * axes_[i].low;
      reach_[i].second = reach_[i + 1].second + axes_[i].stride * axes_[i].high;
    }
  }

  bool possible(std::int64_t target_low, std::int64_t target_high, std::size_t depth = 0) {
    const auto [least, most] = reach_[depth];
    if (target_high < least || target_low > most) return false;
    if (depth == axes_.size()) return true;
    if (--budget_ < 0) return true;
    const Axis& axis = axes_[depth];
    const auto [rest_least, rest_most] = reach_[depth + 1];
    const std::int64_t first =
        std::max(axis.low, -floor_div(-(target_low - rest_most), axis.stride));
    const std::int64_t last = std::min(axis.high, floor_div(target_high - rest_least, axis.stride));
    for (std::int64_t x = first; x <= last; ++x) {
      const std::int64_t step = x * axis.stride;
      if (possible(target_low - step, target_high - step, depth + 1)) return true;
      if (budget_ < 0) return true;
    }
    return false;
  }

 private:
  std::vector<Axis> axes_;
  std::vector<std::pair<std::int64_t, std::int64_t>> reach_;  // of the axes from an index on
  int budget_ = 10'000;
};

}  // namespace

bool may_overlap_itself(const TensorSpec& spec) {
  if (!core::has_elements(spec)) return false;
  std::vector<std::pair<std::int64_t, std::int64_t>> axes;  // |stride|, steps
  for (std::size_t i = 0; i < static_cast<std::size_t>(spec.rank); ++i) {
    if (spec.shape[i] > 1) axes.emplace_back(std::abs(spec.stride[i]), spec.shape[i] - 1);
  }
  std::sort(axes.begin(), axes.end());
  std::int64_t reach = 0;
  for (const auto& [stride, steps] : axes) {
    if (stride <= reach) return true;
    reach += stride * steps;
  }
  return false;
}

bool may_overlap(const ConstTensor& a, const ConstTensor& b) {
  if (!core::has_elements(a) || !core::has_elements(b)) return false;
  std::vector<Axis> axes;
  append_axes(a, +1, axes);
  append_axes(b, -1, axes);
  // a + x + i = b + y + j with bytes i, j of one element: x - y in [delta - (size_a - 1), delta +
  // size_b - 1].
  const auto delta = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(b.data) -
                                               reinterpret_cast<std::intptr_t>(a.data));
  return Search(std::move(axes))
      .possible(delta - (size_of(a.dtype) - 1), delta + (size_of(b.dtype) - 1));
}

}  // namespace abacist::api
