// The oracle against hand computations and finite differences.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "abacist/abacist.hpp"
#include "reference/differences.hpp"
#include "support/case.hpp"

namespace abacist::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// One head, d_qk = 1, scale 1: the score of (i, j) is q_i k_j.
Case scalar_case(std::int64_t s_q, std::int64_t s_k) {
  Case c = float64_case();
  c.s_q = s_q;
  c.s_k = s_k;
  c.d_qk = 1;
  c.d_v = 1;
  c.options.score.scale = 1.0;
  return c;
}

Results run_reference(const Instance& x) { return x.reference_forward(); }

TEST(Reference, TwoKeysByHand) {
  Instance x(scalar_case(1, 2));
  x.q.fill(2.0);
  x.k.fill({0.5, -0.25});
  x.v.fill({3.0, -1.0});
  const Results r = run_reference(x);
  const double a = std::exp(1.0);
  const double b = std::exp(-0.5);
  EXPECT_NEAR(r.o.at({0, 0, 0, 0}), (3.0 * a - b) / (a + b), 1e-15);
  EXPECT_NEAR(r.lse.at({0, 0, 0}), std::log(a + b), 1e-15);
}

TEST(Reference, GradientsOfTwoKeysByHand) {
  Instance x(scalar_case(1, 2));
  x.q.fill(2.0);
  x.k.fill({0.5, -0.25});
  x.v.fill({3.0, -1.0});
  x.d_o.fill(1.5);
  const Gradients g = x.reference_backward(run_reference(x));
  const double p = 1.0 / (1.0 + std::exp(-1.5));  // probability of key 0
  const double ds = 1.5 * p * (1.0 - p) * (3.0 - -1.0);
  EXPECT_NEAR(g.dv.at({0, 0, 0, 0}), 1.5 * p, 1e-15);
  EXPECT_NEAR(g.dv.at({0, 1, 0, 0}), 1.5 * (1.0 - p), 1e-15);
  EXPECT_NEAR(g.dk.at({0, 0, 0, 0}), 2.0 * ds, 1e-14);
  EXPECT_NEAR(g.dk.at({0, 1, 0, 0}), -2.0 * ds, 1e-14);
  EXPECT_NEAR(g.dq.at({0, 0, 0, 0}), ds * (0.5 - -0.25), 1e-14);
}

TEST(Reference, OneVisibleKeyHasProbabilityExactlyOne) {
  for (const double score : {0.0, 1e300, -1e300, 3e-310}) {
    Instance x(scalar_case(1, 1));
    x.q.fill(score);
    x.k.fill(1.0);
    x.v.fill(0.1);
    const Results r = run_reference(x);
    EXPECT_EQ(r.o.at({0, 0, 0, 0}), 0.1);
    EXPECT_EQ(r.lse.at({0, 0, 0}), score);
  }
}

TEST(Reference, ScaleMayBeZeroOrNegative) {
  Case c = scalar_case(1, 3);
  c.options.score.scale = 0.0;
  Instance zero(c);
  zero.v.fill({1.0, 2.0, 6.0});
  EXPECT_NEAR(run_reference(zero).o.at({0, 0, 0, 0}), 3.0, 1e-15);
  EXPECT_NEAR(run_reference(zero).lse.at({0, 0, 0}), std::log(3.0), 1e-15);
  c.options.score.scale = -1e4;
  Instance negative(c);
  negative.q.fill(1.0);
  negative.k.fill({1.0, -1.0, 0.0});
  negative.v.fill({1.0, 2.0, 6.0});
  EXPECT_EQ(run_reference(negative).o.at({0, 0, 0, 0}), 2.0);  // the smallest product wins
}

TEST(Reference, DefaultScaleIsOneOverRootOfDqk) {
  Case c = float64_case();
  c.s_q = 1;
  c.s_k = 1;
  c.d_qk = 9;
  Instance x(c);
  x.q.fill(1.0);
  x.k.fill(2.0);
  EXPECT_NEAR(run_reference(x).lse.at({0, 0, 0}), 18.0 / 3.0, 1e-14);
}

/// The keys that each query sees, read off O with V = powers of two and uniform probabilities.
std::vector<std::vector<std::int64_t>> seen(std::int64_t s_q, std::int64_t s_k, const Mask& mask) {
  Case c = scalar_case(s_q, s_k);
  c.options.score.scale = 0.0;
  c.options.mask = mask;
  Instance x(c);
  std::int64_t next = 0;
  x.v.fill([&] { return std::ldexp(1.0, static_cast<int>(next++)); });
  const Results r = run_reference(x);
  std::vector<std::vector<std::int64_t>> rows;
  for (std::int64_t i = 0; i < s_q; ++i) {
    auto& row = rows.emplace_back();
    const double count = std::exp(r.lse.at({0, 0, i}));
    const auto bits = std::llround(r.o.at({0, i, 0, 0}) * (std::isfinite(count) ? count : 0.0));
    for (std::int64_t j = 0; j < s_k; ++j) {
      if ((bits >> j & 1) != 0) row.push_back(j);
    }
  }
  return rows;
}

using Rows = std::vector<std::vector<std::int64_t>>;

TEST(Reference, MasksByHand) {
  // Bottom-right: the last query sees the last key. Edge case 1.
  EXPECT_EQ(seen(5, 2, {.causal = true}), (Rows{{}, {}, {}, {0}, {0, 1}}));
  EXPECT_EQ(seen(2, 5, {.causal = true}), (Rows{{0, 1, 2, 3}, {0, 1, 2, 3, 4}}));
  EXPECT_EQ(seen(3, 2, {.causal = true, .align = Align::top_left}), (Rows{{0}, {0, 1}, {0, 1}}));
  EXPECT_EQ(seen(2, 3, {.causal = true, .align = Align::top_left}), (Rows{{0}, {0, 1}}));
  // Windows are inclusive on both sides, and both always apply. Edge cases 9 and 10.
  EXPECT_EQ(seen(4, 4, {.window = {0, 0}}), (Rows{{0}, {1}, {2}, {3}}));
  EXPECT_EQ(seen(4, 4, {.window = {1, 0}}), (Rows{{0}, {0, 1}, {1, 2}, {2, 3}}));
  EXPECT_EQ(seen(4, 4, {.window = {0, 2}}), (Rows{{0, 1, 2}, {1, 2, 3}, {2, 3}, {3}}));
  EXPECT_EQ(seen(4, 4, {.window = {kUnbounded, 0}}), (Rows{{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}}));
  EXPECT_EQ(seen(4, 4, {.causal = true, .window = {1, 2}}), (Rows{{0}, {0, 1}, {1, 2}, {2, 3}}));
  // Beyond the keys on either side: nothing.
  EXPECT_EQ(seen(4, 1, {.window = {0, 0}}), (Rows{{}, {}, {}, {0}}));
  EXPECT_EQ(seen(4, 1, {.window = {0, 0}, .align = Align::top_left}), (Rows{{0}, {}, {}, {}}));
  // Bounds just below "unbounded" are bounds that cover everything.
  EXPECT_EQ(seen(2, 2, {.window = {kUnbounded - 1, kUnbounded - 1}}), (Rows{{0, 1}, {0, 1}}));
}

TEST(Reference, RowsWithoutKeysAreZeroWithLseMinusInfinity) {
  Case c = float64_case();
  c.s_q = 5;
  c.s_k = 2;
  c.options.mask.causal = true;
  c.d_lse = true;
  const Instance x(c);
  const Results r = x.reference_forward();
  const Gradients g = x.reference_backward(r);
  for (std::int64_t i = 0; i < 5; ++i) {
    EXPECT_EQ(r.lse.at({0, 0, i}) == -kInfinity, i < 3);
    for (std::int64_t e = 0; e < c.d_v; ++e) EXPECT_EQ(r.o.at({0, i, 0, e}) == 0.0, i < 3);
    for (std::int64_t e = 0; e < c.d_qk && i < 3; ++e) EXPECT_EQ(g.dq.at({0, i, 0, e}), 0.0);
  }
}

TEST(Reference, SoftcapThenAlibiThenMask) {
  Case c = scalar_case(2, 3);
  c.options.score.softcap = 2.0;
  c.alibi_rank = 1;
  Instance x(c);
  x.q.fill(4.0);
  x.k.fill({1.0, -1.0, 0.25});
  x.v.fill({1.0, 0.0, 0.0});
  x.slopes.fill(0.5);
  const Results r = x.reference_forward();
  for (std::int64_t i = 0; i < 2; ++i) {  // shift is 1
    double sum = 0.0;
    double first = 0.0;
    const double products[] = {4.0, -4.0, 1.0};
    for (std::int64_t j = 0; j < 3; ++j) {
      const double bias = -0.5 * std::fabs(static_cast<double>(i + 1 - j));
      const double weight = std::exp(2.0 * std::tanh(products[j] / 2.0) + bias);
      sum += weight;
      if (j == 0) first = weight;
    }
    EXPECT_NEAR(r.lse.at({0, 0, i}), std::log(sum), 1e-14);
    EXPECT_NEAR(r.o.at({0, i, 0, 0}), first / sum, 1e-14);
  }
}

TEST(Reference, HeadsOfAGroupShareKeysAndSlopesArePerSequence) {
  Case c = float64_case();
  c.b = 2;
  c.h_k = 2;
  c.group = 3;
  c.alibi_rank = 2;
  const Instance x(c);
  const Results r = x.reference_forward();
  for (std::int64_t n = 0; n < c.b; ++n) {
    for (std::int64_t h = 0; h < c.h_q(); ++h) {
      Case one = c;
      one.b = 1;
      one.h_k = 1;
      one.group = 1;
      Instance y(one);
      const auto copy = [&](Buffer& to, const Buffer& from, std::int64_t head) {
        to.for_each([&](const auto& i, std::int64_t) {
          to.set(i, from.at({n, i[1], head, i[3]}));
        });
      };
      copy(y.q, x.q, h);
      copy(y.k, x.k, h / 3);
      copy(y.v, x.v, h / 3);
      y.slopes.set({0, 0}, x.slopes.at({n, h}));
      for (Buffer* buffer : {&y.q, &y.k, &y.v}) buffer->freeze();
      const Results s = y.reference_forward();
      for (std::int64_t i = 0; i < c.s_q; ++i) {
        EXPECT_EQ(s.lse.at({0, 0, i}), r.lse.at({n, h, i}));
        EXPECT_EQ(s.o.at({0, i, 0, 3}), r.o.at({n, i, h, 3}));
      }
    }
  }
}

TEST(Reference, NanQueryRowGivesNanRowAlone) {
  Case c = float64_case();
  Instance x(c);
  x.q.set({0, 3, 0, 5}, kNan);
  x.q.freeze();
  const Results r = x.reference_forward();
  for (std::int64_t i = 0; i < c.s_q; ++i) {
    EXPECT_EQ(std::isnan(r.o.at({0, i, 0, 0})), i == 3);
    EXPECT_EQ(std::isnan(r.lse.at({0, 0, i})), i == 3);
  }
}

TEST(Reference, MaskedKeysContributeNothingWhateverTheyHold) {
  Case c = float64_case();
  c.options.mask.causal = true;
  Instance x(c);
  const Results before = x.reference_forward();
  for (std::int64_t e = 0; e < c.d_v; ++e) {
    x.v.set({0, 15, 0, e}, kNan);
    x.k.set({0, 15, 0, e}, kInfinity);
  }
  x.k.freeze();
  x.v.freeze();
  const Results after = x.reference_forward();
  for (std::int64_t i = 0; i < c.s_q; ++i) {
    if (i == 15) continue;
    EXPECT_EQ(before.o.at({0, i, 0, 1}), after.o.at({0, i, 0, 1}));
  }
}

TEST(ReferenceGradient, Plain) { check_by_differences(small_case(1)); }

TEST(ReferenceGradient, OfLse) {
  Case c = small_case(2);
  c.d_lse = true;
  check_by_differences(c);
}

TEST(ReferenceGradient, GroupedHeadsAndBatch) {
  Case c = small_case(3);
  c.b = 2;
  c.h_k = 2;
  c.group = 2;
  c.d_lse = true;
  check_by_differences(c);
}

TEST(ReferenceGradient, SoftcapAndAlibi) {
  Case c = small_case(4);
  c.options.score.softcap = 0.7;
  c.alibi_rank = 2;
  c.d_lse = true;
  check_by_differences(c);
}

TEST(ReferenceGradient, NegativeScaleCausalTopLeft) {
  Case c = small_case(5);
  c.options.score.scale = -0.8;
  c.options.mask = {.causal = true, .align = Align::top_left};
  check_by_differences(c);
}

TEST(ReferenceGradient, WindowWithEmptyRows) {
  Case c = small_case(6);
  c.s_q = 6;
  c.s_k = 3;
  c.d_lse = true;
  c.options.mask.window = {1, 0};
  check_by_differences(c);
}

TEST(ReferenceGradient, Varlen) {
  Case c = small_case(7);
  c.lens_q = {2, 0, 3};
  c.lens_k = {3, 2, 1};
  c.h_k = 1;
  c.group = 2;
  c.options.mask.causal = true;
  c.options.score.softcap = 3.0;
  c.alibi_rank = 2;
  c.d_lse = true;
  check_by_differences(c);
}

TEST(Reference, StridesDoNotMatter) {
  for (std::uint64_t stream = 0; stream < 20; ++stream) {
    Case c = small_case(stream);
    c.b = 2;
    c.h_k = 2;
    c.layout.random = true;
    const Instance strided(c);
    c.layout.random = false;
    Instance flat(c);
    flat.q.fill(strided.q.values());
    flat.k.fill(strided.k.values());
    flat.v.fill(strided.v.values());
    flat.d_o.fill(strided.d_o.values());
    Results r = strided.make_results(DType::f64, DType::f64, {.random = true});
    strided.forward(r, {.backend = Backend::reference});
    const Results s = flat.reference_forward();
    EXPECT_EQ(r.o.values(), s.o.values());
    Gradients g = strided.make_gradients(DType::f64, {.random = true});
    strided.backward(r, g, {.backend = Backend::reference});
    const Gradients h = flat.reference_backward(s);
    EXPECT_EQ(g.dq.values(), h.dq.values());
    EXPECT_EQ(g.dk.values(), h.dk.values());
    EXPECT_EQ(g.dv.values(), h.dv.values());
  }
}

TEST(Reference, LongSumsKeepTheirDigits) {
  // 200,000 equal scores: LSE is the logarithm of the count, O the mean of 0.1.
  Case c = scalar_case(1, 200'000);
  Instance x(c);
  x.q.fill(0.0);
  x.v.fill(0.1);
  const Results r = x.reference_forward();
  EXPECT_NEAR(r.lse.at({0, 0, 0}), std::log(200'000.0), 1e-14);
  EXPECT_NEAR(r.o.at({0, 0, 0, 0}), 0.1, 4e-15);
}

TEST(Reference, RunsOnlyWhenAskedFor) {
  const Case c = float64_case();
  const Instance x(c);
  Results r = x.make_results(DType::f64, DType::f64);
  const auto planned = plan(make_problem(x.tensors(r), c.options));
  ASSERT_FALSE(planned.ok());  // nobody else takes f64
  EXPECT_EQ(planned.error().code, ErrorCode::unsupported);
  EXPECT_NE(planned.error().message.find("reference: runs only when asked for"), std::string::npos)
      << planned.error().message;
}

TEST(Reference, ProgressReachesOneAndNeverFalls) {
  Case c = float64_case();
  c.b = 3;
  c.h_k = 2;
  c.s_q = 37;
  const Instance x(c);
  Results r = x.make_results(DType::f64);
  struct Seen {
    double last = 0.0;
    bool fell = false;
  } seen;
  const auto hook = [](double done, void* context) {
    auto& s = *static_cast<Seen*>(context);
    s.fell = s.fell || done < s.last;
    s.last = done;
  };
  ASSERT_TRUE(forward(x.tensors(r), c.options, {.backend = Backend::reference, .threads = 2},
                      {.progress = hook, .progress_context = &seen})
                  .ok());
  EXPECT_EQ(seen.last, 1.0);
  EXPECT_FALSE(seen.fell);
}

}  // namespace
}  // namespace abacist::testing
