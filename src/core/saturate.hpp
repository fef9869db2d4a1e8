// Sizes of problems that are planned but could never run must not wrap around.
#pragma once

#include <cstdint>
#include <limits>

namespace abacist::core {

/// A count >= 0 whose sums and products stop at the largest 64-bit number.
struct Count {
  std::int64_t value = 0;

  constexpr Count(std::int64_t v) : value(v) {}  // NOLINT(google-explicit-constructor)

  friend constexpr Count operator*(Count a, Count b) {
    std::int64_t product = 0;
    return __builtin_mul_overflow(a.value, b.value, &product) ? kLargest : product;
  }
  friend constexpr Count operator+(Count a, Count b) {
    std::int64_t sum = 0;
    return __builtin_add_overflow(a.value, b.value, &sum) ? kLargest : sum;
  }

  friend constexpr bool operator==(Count a, Count b) = default;
  static constexpr Count largest() { return kLargest; }

 private:
  static constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
};

}  // namespace abacist::core
