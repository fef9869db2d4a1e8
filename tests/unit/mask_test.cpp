// core::MaskRule, the kernels' interval rule, against pair-by-pair masks written from the contract.
#include "core/mask.hpp"

#include <gtest/gtest.h>

#include "support/random.hpp"

namespace abacist::core {
namespace {

using abacist::testing::Random;

bool sees(const Mask& mask, std::int64_t len_q, std::int64_t len_k, std::int64_t i,
          std::int64_t j) {
  const std::int64_t distance = j - i - (mask.align == Align::top_left ? 0 : len_k - len_q);
  return (!mask.causal || distance <= 0) &&
         (mask.window.left == kUnbounded || distance >= -mask.window.left) &&
         (mask.window.right == kUnbounded || distance <= mask.window.right);
}

Mask random_mask(Random& random) {
  const auto side = [&] {
    return random.pick({std::int64_t{0}, random.integer(0, 4), random.integer(0, 40), kUnbounded,
                        kUnbounded - 1, kFar, kFar + 1, std::int64_t{1} << 40});
  };
  return {random.chance(0.5),
          {side(), side()},
          random.chance(0.5) ? Align::bottom_right : Align::top_left};
}

TEST(MaskRule, EveryRowAgreesWithTheContract) {
  Random random(1);
  for (int round = 0; round < 20'000; ++round) {
    const std::int64_t len_q = random.integer(1, 20);
    const std::int64_t len_k = random.integer(0, 20);
    const Mask mask = random_mask(random);
    const MaskRule rule = mask_rule(mask, len_q, len_k);
    std::int64_t pairs = 0;
    for (std::int64_t i = 0; i < len_q; ++i) {
      const Interval keys = rule.visible(i);
      for (std::int64_t j = 0; j < len_k; ++j) {
        const bool visible = sees(mask, len_q, len_k, i, j);
        pairs += visible ? 1 : 0;
        ASSERT_EQ(keys.begin <= j && j < keys.end, visible)
            << "row " << i << " key " << j << " lengths " << len_q << "x" << len_k << " window "
            << mask.window.left << "/" << mask.window.right << " causal " << mask.causal;
      }
      ASSERT_GE(keys.begin, 0);
      ASSERT_LE(keys.end, len_k);
    }
    ASSERT_EQ(rule.pairs(len_q), pairs) << len_q << "x" << len_k << " window " << mask.window.left
                                        << "/" << mask.window.right << " causal " << mask.causal;
  }
}

TEST(MaskRule, UnionOfRowsHoldsEveryVisibleKeyAndBothEnds) {
  Random random(2);
  for (int round = 0; round < 20'000; ++round) {
    const std::int64_t len_q = random.integer(1, 20);
    const std::int64_t len_k = random.integer(0, 20);
    const MaskRule rule = mask_rule(random_mask(random), len_q, len_k);
    const std::int64_t first = random.integer(0, len_q - 1);
    const std::int64_t last = random.integer(first + 1, len_q);
    const Interval any = rule.visible_any(first, last);
    for (std::int64_t i = first; i < last; ++i) {
      const Interval keys = rule.visible(i);
      if (keys.empty()) continue;
      ASSERT_LE(any.begin, keys.begin);
      ASSERT_GE(any.end, keys.end);
    }
    // No larger than needed: its ends are ends of some row's interval (or it is empty).
    if (any.empty()) continue;
    ASSERT_EQ(any.begin, rule.visible(first).begin);
    ASSERT_EQ(any.end, rule.visible(last - 1).end);
  }
}

TEST(MaskRule, LengthsAndBoundsFarApartDoNotOverflow) {
  constexpr std::int64_t kLong = std::int64_t{1} << 40;
  for (const std::int64_t len_q : {std::int64_t{1}, std::int64_t{1000}, kLong}) {
    for (const std::int64_t len_k : {std::int64_t{0}, std::int64_t{1}, kLong}) {
      for (const std::int64_t side : {std::int64_t{0}, kLong, kFar, kUnbounded - 1, kUnbounded}) {
        for (const Align align : {Align::bottom_right, Align::top_left}) {
          const Mask mask{false, {side, side}, align};
          const MaskRule rule = mask_rule(mask, len_q, len_k);
          for (const std::int64_t i : {std::int64_t{0}, len_q - 1}) {
            const Interval keys = rule.visible(i);
            if (side >= kLong && len_k > 0) {
              // A window longer than both sequences is no window.
              EXPECT_EQ(keys.begin, 0);
              EXPECT_EQ(keys.end, len_k);
            }
            EXPECT_LE(keys.size(), len_k);
          }
        }
      }
    }
  }
}

TEST(MaskRule, PairsOfAMillionByAMillionAreExact) {
  constexpr std::int64_t n = 1'000'000;
  EXPECT_EQ(mask_rule({}, n, n).pairs(n), n * n);
  EXPECT_EQ(mask_rule({.causal = true}, n, n).pairs(n), n * (n + 1) / 2);
  EXPECT_EQ(mask_rule({.window = {0, 0}}, n, n).pairs(n), n);
  EXPECT_EQ(mask_rule({.window = {9, 0}}, n, n).pairs(n), 10 * n - 45);
}

}  // namespace
}  // namespace abacist::core
