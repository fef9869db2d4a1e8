// Key splits: plans that cut the keys of few rows and put the results together.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/bounds.hpp"
#include "support/case.hpp"
#include "support/environment.hpp"

namespace abacist::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr PlanOptions kCpu{.backend = Backend::cpu};

std::int64_t splits_of(const Instance& x) {
  Results r = x.make_results(x.c.o_dtype);
  const auto planned = plan(make_problem(x.tensors(r), x.c.options), kCpu);
  return planned.ok() ? planned->info().splits : -1;
}

// One query over many keys is split; the same query among many is not. Both meet the same bounds.
TEST(Split, SplitAndUnsplitPlansMeetTheOracle) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const std::int64_t s_k : {511, 1024, 1025, 3000, 40'000}) {
      if (effort() == Effort::reduced && s_k != 511 && s_k != 1025) continue;
      Case c = typed({.h_k = 2, .group = 3, .s_q = 1, .s_k = s_k, .d_qk = 32, .d_v = 16}, dtype);
      c.alibi_rank = 1;
      check_on_every_target(Instance(c));
      c.s_q = 3;
      c.options.mask.window = {700, 0};  // whole splits see nothing
      check_on_every_target(Instance(c));
      c.options.mask = {.causal = true, .align = Align::top_left};
      check_on_every_target(Instance(c));
    }
  }
  EXPECT_GT(splits_of(Instance(Case{.s_q = 1, .s_k = 40'000})), 1);
  EXPECT_EQ(splits_of(Instance(Case{.b = 64, .h_k = 2, .s_q = 64, .s_k = 600})), 1);
}

TEST(Split, VarlenSequencesShorterThanTheSplits) {
  Case c{.h_k = 1, .group = 2, .d_qk = 16, .d_v = 16};
  c.lens_q = {1, 2, 1, 0, 1};
  c.lens_k = {20'000, 0, 3, 50, 700};
  c.slack_q = 1;
  c.slack_k = 1;
  check_on_every_target(Instance(c));
  const std::int64_t splits = splits_of(Instance(c));
  EXPECT_GT(splits, 1) << "this case is about splits";
}

/// One query against 3,000 keys whose values are 1 up to key 2,688 and 0 after: O is 0.896 if all
/// weigh alike. 2,688 is where splits of 672 keys end, of which the last has fewer keys.
Instance counting(Case::Pairs bias) {
  Case c{.group = 2, .s_q = 1, .s_k = 3000, .d_qk = 8, .d_v = 8, .bias = bias};
  Instance x(c);
  x.v.for_each([&](const auto& i, std::int64_t) { x.v.set(i, i[1] < 2688 ? 1.0 : 0.0); });
  x.v.freeze();
  EXPECT_GT(splits_of(x), 1);
  return x;
}

void expect_uniform(const Instance& x, double score) {
  for_each_target([&](const std::string& target) {
    Results r = x.make_results(DType::f32);
    x.forward(r, kCpu);
    for (std::int64_t head = 0; head < 2; ++head) {
      EXPECT_NEAR(r.o.at({0, 0, head, 3}), 0.896, 1e-5) << target << ", scores " << score;
      const double lse = score + std::log(3000.0);
      EXPECT_NEAR(r.lse.at({0, head, 0}), lse, 1e-6 * std::abs(lse)) << target;
    }
  });
}

// Splits left an LSE in float, in which log(672) and log(312) are the same beside 1e9: each split
// weighed as much as the others, O was 0.8.
TEST(Split, SharesOfTheSplitsSurviveLargeEqualScores) {
  for (const double score : {0.0, -1e4, 1e6, -1e6, 1e8, -1e9, -3.4e38, -3.402823466e38}) {
    Instance x = counting({.present = true});
    x.q.fill(0.0);
    x.bias.fill(score);
    expect_uniform(x, score);
    if (std::abs(score) > 1e8) continue;
    Instance without = counting({});
    without.c.options.score.scale = score;
    without.q.fill(0.5);
    without.k.fill(0.25);  // q.k = 1
    expect_uniform(without, score);
  }
}

// A split whose scores are all -inf has the sum 0, and made the row NaN.
TEST(Split, ASplitOfInfinitelyLowScoresWeighsNothing) {
  for (const std::int64_t s_q : {1, 3, 20}) {
    Case c{.s_q = s_q, .s_k = 3000, .d_qk = 8, .d_v = 8};
    Instance x(c);
    ASSERT_GT(splits_of(x), 1);
    x.q.fill(0.5);
    x.q.freeze();
    x.k.for_each([&](const auto& i, std::int64_t) {
      if (i[1] < 1500) x.k.set(i, -kInfinity);
    });
    x.k.freeze();
    const Results expected = x.reference_forward();
    for_each_target([&](const std::string& target) {
      Results r = x.make_results(DType::f32);
      x.forward(r, kCpu);
      for (std::int64_t i = 0; i < s_q; ++i) {
        EXPECT_NEAR(r.o.at({0, i, 0, 2}), expected.o.at({0, i, 0, 2}), 1e-5) << target;
        EXPECT_NEAR(r.lse.at({0, 0, i}), expected.lse.at({0, 0, i}), 1e-5) << target;
      }
    });
    x.k.fill(-kInfinity);  // all of them: 0 / 0
    for_each_target([&](const std::string& target) {
      Results r = x.make_results(DType::f32);
      x.forward(r, kCpu);
      EXPECT_TRUE(std::isnan(r.o.at({0, 0, 0, 0}))) << target;
      EXPECT_TRUE(std::isnan(r.lse.at({0, 0, 0}))) << target;
    });
  }
}

// Every feature that takes part after the keys: sinks, dropout, bias, rows without keys.
TEST(Split, FeaturesMeetTheOracleWhereKeysAreSplit) {
  for (const double p : {0.3, 0.0, 1.0}) {
    if (effort() == Effort::reduced && p != 0.3) continue;
    Case c{.b = 2, .h_k = 1, .group = 2, .s_q = 2, .s_k = 2100, .d_qk = 16, .d_v = 24};
    c.options.dropout = {.p = p, .seed = 17};
    c.sinks = true;
    check_on_every_target(Instance(c));
    c.bias = {.present = true, .b = false};
    c.visible = {.present = true, .h = false};
    check_on_every_target(Instance(c));
    c.key_lengths = {0, 1700};  // a sequence without keys
    Instance x(c);
    EXPECT_GT(splits_of(x), 1);
    check_on_every_target(x);
  }
}

}  // namespace
}  // namespace abacist::testing
