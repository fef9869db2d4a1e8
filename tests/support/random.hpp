// Seeded randomness: the same data on every machine; ABACIST_TEST_SEED chooses another seed, and
// main() prints the seed in use when a test fails.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <numbers>
#include <span>

namespace abacist::testing {

/// The seed of this process: ABACIST_TEST_SEED, or a fixed one.
std::uint64_t base_seed();

/// SplitMix64, and what tests draw from it. A stream is a pure function of (base_seed(), stream).
class Random {
 public:
  explicit Random(std::uint64_t stream) : state_(base_seed() + stream * 0x9e3779b97f4a7c15u) {
    bits();
  }

  std::uint64_t bits() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  /// In [low, high].
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    const auto span = static_cast<std::uint64_t>(high - low) + 1;
    return low + static_cast<std::int64_t>(bits() % span);
  }
  /// In (0, 1).
  double uniform() { return (static_cast<double>(bits() >> 12) + 0.5) * 0x1p-52; }
  double normal() {
    return std::sqrt(-2.0 * std::log(uniform())) * std::cos(2.0 * std::numbers::pi * uniform());
  }
  bool chance(double probability) { return uniform() < probability; }
  template <class T>
  T pick(std::initializer_list<T> from) {
    return from.begin()[integer(0, static_cast<std::int64_t>(from.size()) - 1)];
  }
  template <class T>
  T pick(std::span<const T> from) {
    return from[static_cast<std::size_t>(integer(0, static_cast<std::int64_t>(from.size()) - 1))];
  }

 private:
  std::uint64_t state_;
};

}  // namespace abacist::testing
