// Sizes of problems that are planned but could never run must not wrap around.
#pragma once

#include <cstdint>
#include <limits>

namespace abacist::reference {

constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();

/// For a, b >= 0.
constexpr std::int64_t saturating_mul(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? kLargest : product;
}

constexpr std::int64_t saturating_add(std::int64_t a, std::int64_t b) {
  std::int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? kLargest : sum;
}

}  // namespace abacist::reference
