// The oracle's optional parts (sinks, key lengths) against hand computations and finite
// differences.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/dropout.hpp"
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

TEST(ReferencePairs, BiasAfterSoftcapThenMaskByHand) {
  Case c = float64_case();
  c.s_q = 1;
  c.s_k = 4;
  c.d_qk = c.d_v = 1;
  c.options.score.scale = 3.0;  // not of the bias
  c.options.score.softcap = 2.0;
  c.bias = c.visible = {.present = true};
  Instance x(c);
  x.q.fill(0.5);
  x.k.fill({1.0, -1.0, 9.0, 9.0});
  x.v.fill({1.0, 2.0, 1e9, 1e9});
  x.d_o.fill(1.0);
  x.bias.fill({0.25, 4.0, -kInfinity, 7.0});
  x.visible.fill({1.0, 255.0, 1.0, 0.0});
  const Results r = x.reference_forward();
  const double a = std::exp(2.0 * std::tanh(1.5 / 2.0) + 0.25);
  const double b = std::exp(2.0 * std::tanh(-1.5 / 2.0) + 4.0);
  EXPECT_NEAR(r.lse.at({0, 0, 0}), std::log(a + b), 1e-15);
  EXPECT_NEAR(r.o.at({0, 0, 0, 0}), (a + 2.0 * b) / (a + b), 1e-15);
  const Gradients g = x.reference_backward(r);
  const double p = a / (a + b);
  EXPECT_NEAR(g.d_bias.at({0, 0, 0, 0}), p * (1.0 - r.o.at({0, 0, 0, 0})), 1e-15);
  EXPECT_EQ(g.d_bias.at({0, 0, 0, 2}), 0.0);
  EXPECT_EQ(g.d_bias.at({0, 0, 0, 3}), 0.0);
}

TEST(ReferencePairs, EveryBroadcastIsTheExpandedTensor) {
  for (int axes = 0; axes < 8; ++axes) {
    Case c = float64_case();
    c.b = 2;
    c.h_k = 2;
    c.group = 2;
    c.s_q = 3;
    c.s_k = 5;
    c.bias = {.present = true, .b = axes % 2 == 1, .h = axes / 2 % 2 == 1, .s = axes / 4 == 1};
    c.visible = c.bias;
    const Instance x(c);
    c.bias = c.visible = {.present = true};
    Instance whole(c);
    const auto expand = [](Buffer& to, const Buffer& from) {
      const auto& shape = from.spec().shape;
      to.for_each([&](const auto& i, std::int64_t) {
        to.set(i, from.at({i[0] % shape[0], i[1] % shape[1], i[2] % shape[2], i[3]}));
      });
      to.freeze();
    };
    expand(whole.bias, x.bias);
    expand(whole.visible, x.visible);
    for (auto [to, from] :
         {std::pair{&whole.q, &x.q}, {&whole.k, &x.k}, {&whole.v, &x.v}, {&whole.d_o, &x.d_o}}) {
      to->fill(from->values());
    }
    const Results r = x.reference_forward();
    const Results s = whole.reference_forward();
    EXPECT_EQ(r.o.values(), s.o.values());
    const Gradients g = x.reference_backward(r);
    const Gradients h = whole.reference_backward(s);
    EXPECT_EQ(g.dq.values(), h.dq.values());
    g.d_bias.for_each([&](const auto& i, std::int64_t) {
      const auto& n = g.d_bias.spec().shape;
      double sum = 0.0;
      h.d_bias.for_each([&](const auto& k, std::int64_t) {
        if (k[0] % n[0] == i[0] && k[1] % n[1] == i[1] && k[2] % n[2] == i[2] && k[3] == i[3]) {
          sum += h.d_bias.at(k);
        }
      });
      EXPECT_NEAR(g.d_bias.at(i), sum, 1e-14);
    });
  }
}

TEST(ReferencePairs, Gradient) {
  Case c = small_case(14);
  c.b = 2;
  c.h_k = 1;
  c.group = 2;
  c.bias = {.present = true, .b = false};
  c.visible = {.present = true, .h = false};
  c.d_lse = true;
  c.sinks = true;
  c.options.score.softcap = 1.5;
  check_by_differences(c);
  c.bias = {.present = true, .h = false, .s = false};
  check_by_differences(c);
}

TEST(ReferencePairs, GradientVarlen) {
  Case c = small_case(15);
  c.lens_q = {2, 0, 3};
  c.lens_k = {3, 2, 1};
  c.bias = {.present = true, .b = false};
  c.options.mask.causal = true;
  check_by_differences(c);
}

TEST(ReferenceDropout, ScalesWhatItKeeps) {
  Case c = float64_case();
  c.options.dropout = {.p = 0.25, .seed = 3};
  const Instance x(c);
  c.options.dropout = {};
  Instance plain(c);
  const Results r = x.reference_forward();
  EXPECT_EQ(r.lse.values(), plain.reference_forward().lse.values());
  // By hand, with the probabilities of the plain run.
  for (std::int64_t i = 0; i < c.s_q; ++i) {
    double o = 0.0;
    for (std::int64_t j = 0; j < c.s_k; ++j) {
      double product = 0.0;
      for (std::int64_t e = 0; e < c.d_qk; ++e) {
        product += x.q.at({0, i, 0, e}) * x.k.at({0, j, 0, e});
      }
      const double p = std::exp(product / 4.0 - r.lse.at({0, 0, i}));
      if (core::dropout_rule({.p = 0.25, .seed = 3}, 1, 0, 0).keeps(i, j)) {
        o += p / 0.75 * x.v.at({0, j, 0, 2});
      }
    }
    EXPECT_NEAR(r.o.at({0, i, 0, 2}), o, 1e-14);
  }
}

TEST(ReferenceDropout, Gradient) {
  Case c = small_case(16);
  c.b = 2;
  c.group = 2;
  c.options.dropout = {.p = 0.4, .seed = 9};
  c.options.score.softcap = 2.0;
  c.bias = {.present = true, .h = false};
  c.sinks = true;
  c.d_lse = true;
  check_by_differences(c);
  c.options.dropout.p = 1.0;
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
