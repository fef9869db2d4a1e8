// The numbers behind dropout: Philox against its published answers, the packing of the counter.
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "core/dropout.hpp"

namespace abacist::core {
namespace {

TEST(Philox, PublishedAnswers) {
  // Random123, kat_vectors: philox4x32 10.
  EXPECT_EQ(Philox::words({0, 0, 0, 0}, 0),
            (Philox::Words{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  EXPECT_EQ(
      Philox::words({0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu}, 0xffffffffffffffffu),
      (Philox::Words{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
  EXPECT_EQ(
      Philox::words({0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, 0x299f31d0a4093822u),
      (Philox::Words{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}));
}

TEST(Dropout, CountersOfDifferentPairsDiffer) {
  std::set<Philox::Words> seen;
  const std::uint64_t values[] = {0, 1, 3, 0xffffffffu, 0x100000000u, 0x1ffffffffu, 0xff00000000u};
  for (const std::uint64_t i : values) {
    for (const std::uint64_t quad : {0ul, 1ul, 0xfffffffful, 0x100000000ul, 0x3f00000000ul}) {
      for (const std::uint64_t stream : values) {
        EXPECT_TRUE(seen.insert(DropoutRule::counter(stream, i, quad)).second)
            << i << " " << quad << " " << stream;
      }
    }
  }
}

TEST(Dropout, ThePackingIsThatOfTheContract) {
  const DropoutRule rule = dropout_rule({.p = 0.5, .seed = 77}, 6, 3, 4);
  EXPECT_EQ(rule.stream, 22u);
  EXPECT_EQ(rule.threshold, 0x80000000u);
  EXPECT_EQ(rule.scale, 2.0);
  const std::int64_t i = 0x1200000034;
  const std::int64_t j = 0x5600000079;
  const auto quad = static_cast<std::uint64_t>(j / 4);
  const Philox::Words words = Philox::words({0x34u, static_cast<std::uint32_t>(quad), 22u,
                                             0x12u | static_cast<std::uint32_t>(quad >> 32) << 8},
                                            77);
  EXPECT_EQ(rule.keeps(i, j), words[1] >= 0x80000000u);  // 0x79 % 4
}

TEST(Dropout, KeepsItsShare) {
  for (const double p : {0.0, 0.1, 0.5, 0.9, 1.0}) {
    const DropoutRule rule = dropout_rule({.p = p, .seed = 5}, 2, 1, 1);
    std::int64_t kept = 0;
    constexpr std::int64_t kSide = 400;
    for (std::int64_t i = 0; i < kSide; ++i) {
      for (std::int64_t j = 0; j < kSide; ++j) kept += rule.keeps(i, j) ? 1 : 0;
    }
    const double n = kSide * kSide;
    EXPECT_NEAR(static_cast<double>(kept), n * (1.0 - p), 4.0 * std::sqrt(n * p * (1.0 - p))) << p;
  }
}

}  // namespace
}  // namespace abacist::core
