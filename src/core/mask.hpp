// The interval rule: every mask of the family is one half-open interval of keys per query row. It
// is the single source of truth for the planner and for every kernel (the reference has its own).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "abacist/problem.hpp"

#if defined(__CUDACC__)
#define ABACIST_HOST_DEVICE __host__ __device__
#else
#define ABACIST_HOST_DEVICE
#endif

namespace abacist::core {

/// Keys [begin, end).
struct Interval {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  ABACIST_HOST_DEVICE constexpr bool empty() const { return begin >= end; }
  ABACIST_HOST_DEVICE constexpr std::int64_t size() const { return empty() ? 0 : end - begin; }
};

/// Window bounds past any length mean "unbounded"; so capped, 64-bit sums of bounds, shifts and
/// positions cannot overflow (lengths are below 2^60).
inline constexpr std::int64_t kFar = std::int64_t{1} << 61;

/// The mask of one sequence pair.
struct MaskRule {
  std::int64_t len_k = 0;
  std::int64_t shift = 0;     ///< position of query 0 among the keys
  std::int64_t left = kFar;   ///< in [0, kFar]
  std::int64_t right = kFar;  ///< in [0, kFar]; causal caps it at 0

  /// Keys that query i sees.
  ABACIST_HOST_DEVICE constexpr Interval visible(std::int64_t i) const {
    const std::int64_t position = i + shift;
    return {clamp(position - left), clamp(position + right + 1)};
  }

  /// The union over queries [first, last), which is an interval since both ends rise with i.
  ABACIST_HOST_DEVICE constexpr Interval visible_any(std::int64_t first, std::int64_t last) const {
    return {visible(first).begin, visible(last - 1).end};
  }

  /// Number of (query, key) pairs that see each other, over queries [0, len_q); closed form; stops
  /// at the largest 64-bit number.
  constexpr std::int64_t pairs(std::int64_t len_q) const {
    const Wide count =
        sum_of_clamped(len_q, shift + right + 1) - sum_of_clamped(len_q, shift - left);
    constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
    return count > Wide{kLargest} ? kLargest : static_cast<std::int64_t>(count);
  }

 private:
  ABACIST_HOST_DEVICE constexpr std::int64_t clamp(std::int64_t key) const {
    return key < 0 ? 0 : (key > len_k ? len_k : key);
  }

  using Wide = __int128;

  /// Sum over i in [0, n) of clamp(i + offset): 0 up to `rising`, then i + offset, len_k from
  /// `full` on.
  constexpr Wide sum_of_clamped(std::int64_t n, std::int64_t offset) const {
    const std::int64_t rising = std::clamp<std::int64_t>(-offset, 0, n);
    const std::int64_t full = std::clamp<std::int64_t>(len_k - offset, rising, n);
    const Wide count = full - rising;
    return count * (rising + offset) + count * (count - 1) / 2 + Wide{n - full} * len_k;
  }
};

/// The rule of a sequence pair with these lengths.
constexpr MaskRule mask_rule(const Mask& mask, std::int64_t len_q, std::int64_t len_k) {
  MaskRule rule;
  rule.len_k = len_k;
  rule.shift = mask.align == Align::bottom_right ? len_k - len_q : 0;
  rule.left = std::min(mask.window.left, kFar);
  rule.right = mask.causal ? 0 : std::min(mask.window.right, kFar);
  return rule;
}

}  // namespace abacist::core
