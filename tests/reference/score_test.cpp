// The oracle's optional parts (sinks, key lengths) against hand computations and finite
// differences.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "reference/differences.hpp"
#include "support/case.hpp"

namespace abacist::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(ReferenceSinks, TwoKeysByHand) {
  Case c = float64_case();
  c.s_q = 1;
  c.s_k = 2;
  c.d_qk = c.d_v = 1;
  c.options.score.scale = 0.5;
  c.options.score.softcap = 3.0;  // neither meets the sink
  c.sinks = true;
  Instance x(c);
  x.q.fill(2.0);
  x.k.fill({0.5, -0.25});
  x.v.fill({3.0, -1.0});
  x.d_o.fill(1.5);
  x.sinks.fill(0.7);
  const Results r = x.reference_forward();
  const double a = std::exp(3.0 * std::tanh(0.5 / 3.0));
  const double b = std::exp(3.0 * std::tanh(-0.25 / 3.0));
  const double sum = a + b + std::exp(0.7);
  EXPECT_NEAR(r.o.at({0, 0, 0, 0}), (3.0 * a - b) / sum, 1e-15);
  EXPECT_NEAR(r.lse.at({0, 0, 0}), std::log(sum), 1e-15);
  const Gradients g = x.reference_backward(r);
  EXPECT_NEAR(g.d_sinks.at({0}), -std::exp(0.7) / sum * 1.5 * (3.0 * a - b) / sum, 1e-15);
  EXPECT_NEAR(g.dv.at({0, 0, 0, 0}), 1.5 * a / sum, 1e-15);
}

TEST(ReferenceSinks, RowsWithoutKeysHaveTheSinkAsLse) {
  Case c = float64_case();
  c.s_q = 3;
  c.s_k = 1;
  c.options.mask.causal = true;
  c.sinks = true;
  c.d_lse = true;
  const Instance x(c);
  const Results r = x.reference_forward();
  for (std::int64_t i = 0; i < 2; ++i) {
    EXPECT_EQ(r.o.at({0, i, 0, 3}), 0.0);
    EXPECT_EQ(r.lse.at({0, 0, i}), x.sinks.at({0}));
  }
}

TEST(ReferenceSinks, MinusInfinityIsNone) {
  Case c = float64_case();
  Instance without(c);
  c.sinks = true;
  Instance with(c);
  with.sinks.fill(-kInfinity);
  const Results r = with.reference_forward();
  const Results s = without.reference_forward();
  EXPECT_EQ(r.o.values(), s.o.values());
  EXPECT_EQ(r.lse.values(), s.lse.values());
  EXPECT_EQ(with.reference_backward(r).d_sinks.at({0}), 0.0);
}

TEST(ReferenceSinks, Gradient) {
  Case c = small_case(11);
  c.b = 2;
  c.h_k = 2;
  c.group = 2;
  c.sinks = true;
  c.d_lse = true;
  check_by_differences(c);
  c.s_q = 6;  // rows without keys
  c.s_k = 4;
  c.options.mask.causal = true;
  c.options.score.softcap = 0.8;
  check_by_differences(c);
}

TEST(ReferenceSinks, GradientVarlen) {
  Case c = small_case(12);
  c.lens_q = {2, 0, 3};
  c.lens_k = {3, 2, 0};
  c.group = 2;
  c.sinks = true;
  c.d_lse = true;
  check_by_differences(c);
}

TEST(ReferenceKeyLengths, AreTheLengthsOfShorterTensors) {
  Case c = float64_case();
  c.b = 3;
  c.h_k = 2;
  c.group = 2;
  c.s_q = 3;
  c.s_k = 7;
  c.key_lengths = {7, 0, 2};
  c.options.mask.causal = true;  // bottom-right, by each sequence's own length
  const Instance x(c);           // keys past the lengths are NaN
  const Results r = x.reference_forward();
  const Gradients g = x.reference_backward(r);
  for (std::int64_t n = 0; n < c.b; ++n) {
    Case one = c;
    one.b = 1;
    one.s_k = c.key_lengths[static_cast<std::size_t>(n)];
    one.key_lengths.clear();
    Instance y(one);
    const auto copy = [n](Buffer& to, const Buffer& from) {
      to.for_each([&](const auto& i, std::int64_t) { to.set(i, from.at({n, i[1], i[2], i[3]})); });
      to.freeze();
    };
    copy(y.q, x.q);
    copy(y.k, x.k);
    copy(y.v, x.v);
    copy(y.d_o, x.d_o);
    const Results s = y.reference_forward();
    const Gradients h = y.reference_backward(s);
    const auto expect_same = [n](const Buffer& part, const Buffer& whole) {
      part.for_each([&](const auto& i, std::int64_t) {
        EXPECT_EQ(part.at(i), whole.at({n, i[1], i[2], i[3]}));
      });
    };
    expect_same(s.o, r.o);
    expect_same(s.lse, r.lse);
    expect_same(h.dq, g.dq);
    expect_same(h.dk, g.dk);
    expect_same(h.dv, g.dv);
    for (std::int64_t j = one.s_k; j < c.s_k; ++j) {
      EXPECT_EQ(g.dk.at({n, j, 1, 2}), 0.0);
      EXPECT_EQ(g.dv.at({n, j, 1, 2}), 0.0);
    }
  }
}

TEST(ReferenceKeyLengths, Gradient) {
  Case c = small_case(13);
  c.b = 3;
  c.key_lengths = {5, 2, 0};
  c.options.mask.causal = true;
  c.d_lse = true;
  check_by_differences(c);
}

}  // namespace
}  // namespace abacist::testing
