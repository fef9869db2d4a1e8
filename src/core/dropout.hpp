// Which probabilities dropout sets to zero: a pure function of (seed, sequence, query head, i, j),
// the same on every backend, tile size and layout. The packing is part of the contract
// (docs/contract.md, "Dropout").
#pragma once

#include <array>
#include <cstdint>

#include "core/mask.hpp"

namespace abacist::core {

/// Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
struct Philox {
  static constexpr std::uint32_t kMultiply0 = 0xD2511F53u, kMultiply1 = 0xCD9E8D57u;
  static constexpr std::uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
  static constexpr int kRounds = 10;

  using Words = std::array<std::uint32_t, 4>;

  ABACIST_HOST_DEVICE static constexpr Words words(Words c, std::uint64_t seed) {
    auto k0 = static_cast<std::uint32_t>(seed);
    auto k1 = static_cast<std::uint32_t>(seed >> 32);
    for (int round = 0; round < kRounds; ++round) {
      const std::uint64_t p0 = std::uint64_t{kMultiply0} * c[0];
      const std::uint64_t p1 = std::uint64_t{kMultiply1} * c[2];
      c = {static_cast<std::uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<std::uint32_t>(p1),
           static_cast<std::uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<std::uint32_t>(p0)};
      k0 += kWeyl0;
      k1 += kWeyl1;
    }
    return c;
  }
};

/// Dropout of one head of one sequence.
struct DropoutRule {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;     ///< sequence * h_q + query head
  std::uint64_t threshold = 0;  ///< floor(p * 2^32), in [0, 2^32]
  double scale = 1.0;           ///< 1 / (1 - p); 0 if p is 1

  ABACIST_HOST_DEVICE constexpr bool active() const { return threshold > 0 || scale != 1.0; }

  /// The counter of the words that decide about keys 4 * quad ... 4 * quad + 3.
  ABACIST_HOST_DEVICE static constexpr Philox::Words counter(std::uint64_t head_stream,
                                                             std::uint64_t i, std::uint64_t quad) {
    return {static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(quad),
            static_cast<std::uint32_t>(head_stream), high_word(head_stream, i, quad)};
  }
  ABACIST_HOST_DEVICE static constexpr std::uint32_t high_word(std::uint64_t head_stream,
                                                               std::uint64_t i,
                                                               std::uint64_t quad) {
    return static_cast<std::uint32_t>((i >> 32 & 0xffu) | (quad >> 32 & 0x3fu) << 8 |
                                      head_stream >> 32 << 14);
  }

  /// Whether the probability of (i, j) survives.
  ABACIST_HOST_DEVICE constexpr bool keeps(std::int64_t i, std::int64_t j) const {
    const auto key = static_cast<std::uint64_t>(j);
    const auto c = counter(stream, static_cast<std::uint64_t>(i), key / 4);
    return Philox::words(c, seed)[key % 4] >= threshold;
  }
};

/// Precondition: p in [0, 1].
constexpr DropoutRule dropout_rule(const Dropout& dropout, std::int64_t h_q, std::int64_t sequence,
                                   std::int64_t head) {
  DropoutRule rule;
  rule.seed = dropout.seed;
  rule.stream = static_cast<std::uint64_t>(sequence) * static_cast<std::uint64_t>(h_q) +
                static_cast<std::uint64_t>(head);
  rule.threshold = static_cast<std::uint64_t>(dropout.p * 0x1p32);
  rule.scale = dropout.p < 1.0 ? 1.0 / (1.0 - dropout.p) : 0.0;
  return rule;
}

}  // namespace abacist::core
