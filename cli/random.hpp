// Random data that depends on nothing but the seed.
#pragma once

#include <cstdint>

#include "abacist/tensor.hpp"

namespace abacist::cli {

/// Fills `count` elements with standard normal numbers. Streams of one seed are independent.
void fill_normal(void* data, DType dtype, std::int64_t count, std::uint64_t seed,
                 std::uint64_t stream);

/// SplitMix64.
class RandomBits {
 public:
  using result_type = std::uint64_t;
  explicit RandomBits(std::uint64_t seed, std::uint64_t stream = 0)
      : state_(seed + stream * 0xd1342543de82ef95u) {
    (*this)();
  }
  static constexpr result_type min() { return 0; }
  static constexpr result_type max() { return ~result_type{0}; }
  result_type operator()() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

 private:
  std::uint64_t state_;
};

}  // namespace abacist::cli
