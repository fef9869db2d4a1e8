// Edge cases of the additive bias and the boolean mask; numbers are rows of tests/edge_cases.md.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/bounds.hpp"
#include "support/case.hpp"
#include "support/environment.hpp"

namespace abacist::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kLowest = std::numeric_limits<float>::lowest();
constexpr DType kAllTypes[] = {DType::f32, DType::bf16, DType::f16};
constexpr Case::Pairs kWhole{.present = true};

Case pair_case() {
  Case c;
  c.b = 2;
  c.h_k = 2;
  c.group = 3;
  c.s_q = 50;
  c.s_k = 131;
  c.d_lse = true;
  return c;
}

// Rows whose first key tiles are masked gave NaN.
TEST(Edge, Row3_BandsHiddenByBiasAndByMask) {
  for (const bool by_bias : {true, false}) {
    Case c = pair_case();
    c.s_q = c.s_k = 600;
    c.d_qk = c.d_v = 2;
    (by_bias ? c.bias : c.visible) = {.present = true, .b = false, .h = false};
    Instance x(c);
    Buffer& pairs = by_bias ? x.bias : x.visible;
    pairs.for_each([&](const auto& i, std::int64_t) {
      const bool seen = std::abs(i[2] - i[3]) < 10;
      pairs.set(i, by_bias ? (seen ? 0.0 : -kInfinity) : (seen ? 1.0 : 0.0));
    });
    pairs.freeze();
    check_on_every_target(x);
  }
}

// A row of the lowest finite number is uniform: it is no mask.
TEST(Edge, Row12_TheLowestFiniteBiasHidesNothing) {
  Case c = pair_case();
  c.bias = kWhole;
  c.d_lse = false;
  Instance x(c);
  x.bias.fill(kLowest);
  for_each_target([&](const std::string& target) {
    Results r = x.make_results(DType::f32);
    x.forward(r, {.backend = Backend::cpu});
    for (std::int64_t e = 0; e < c.d_v; ++e) {
      double mean = 0.0;
      for (std::int64_t j = 0; j < c.s_k; ++j) mean += x.v.at({1, j, 1, e}) / 131.0;
      EXPECT_NEAR(r.o.at({1, 7, 4, e}), mean, 1e-6) << target;
    }
    EXPECT_EQ(r.lse.at({1, 4, 7}), kLowest) << target;
    const Both both = x.run_both();  // finite, whatever it is: a float LSE cannot hold its digits
    for (const double value : both.gradients.dq.values()) EXPECT_TRUE(std::isfinite(value));
  });
}

TEST(Edge, Row12_HugeAndOrdinaryBiasesInOneRow) {
  for (const double huge : {kLowest, -1e38, -1e30, -3e4}) {
    Case c = pair_case();
    c.bias = kWhole;
    Instance x(c);
    x.bias.for_each([&](const auto& i, std::int64_t) {
      if ((i[2] + i[3]) % 3 == 0) x.bias.set(i, huge);
    });
    x.bias.freeze();
    Results r = x.make_results(DType::f32);
    const Results oracle = x.reference_forward();
    for_each_target([&](const std::string& target) {
      x.forward(r, {.backend = Backend::cpu});
      r.o.for_each([&](const auto& i, std::int64_t) {
        ASSERT_NEAR(r.o.at(i), oracle.o.at(i), 1e-5) << target << " " << huge;
      });
    });
  }
}

TEST(Edge, BiasesMaskEveryTypeAndBroadcast) {
  for (const DType dtype : kAllTypes) {
    // The types differ in loading and storing alone.
    const int step = dtype == DType::f32 ? 1 : by_effort(7, 1, 1);
    for (int axes = 0; axes < 8; axes += step) {
      Case c = typed(pair_case(), dtype);
      const Case::Pairs whole{
          .present = true, .b = axes % 2 == 1, .h = axes / 2 % 2 == 1, .s = axes / 4 == 1};
      c.bias = whole;
      check_on_every_target(Instance(c));
      c.options.mask.causal = true;
      c.options.score.softcap = 2.0;
      c.visible = {.present = true, .b = !whole.b, .h = !whole.h, .s = !whole.s};
      check_on_every_target(Instance(c));
    }
  }
}

// Extents of 1 were read out of bounds.
TEST(Edge, Row24_AxesOfOne) {
  for (const std::int64_t s_k : {1, 3, 4, 5}) {
    Case c = pair_case();
    c.b = 1;
    c.s_q = 1;
    c.s_k = s_k;
    for (const bool all : {true, false}) {
      c.bias = c.visible = {.present = true, .b = all, .h = all, .s = all};
      check_on_every_target(Instance(c));
    }
  }
}

// Emptiness is decided by the masks: 0 and -inf (or the sink) exactly, zero gradients, whatever the
// hidden keys hold.
TEST(Edge, RowsHiddenWholeAreEmpty) {
  for (const DType dtype : kAllTypes) {
    for (const bool by_bias : {true, false}) {
      for (const bool sinks : {true, false}) {
        Case c = typed(pair_case(), dtype);
        c.sinks = sinks;
        (by_bias ? c.bias : c.visible) = kWhole;
        c.data.hidden = 0.0;
        Instance x(c);
        Buffer& pairs = by_bias ? x.bias : x.visible;
        pairs.for_each([&](const auto& i, std::int64_t) {
          if (i[2] % 5 == 1) pairs.set(i, by_bias ? -kInfinity : 0.0);
        });
        pairs.freeze();
        check_on_every_target(x);
        for_each_target([&](const std::string& target) {
          const Both r = x.run_both();
          for (std::int64_t i = 1; i < c.s_q; i += 5) {
            EXPECT_EQ(r.results.o.at({1, i, 4, 3}), 0.0) << target;
            EXPECT_EQ(r.results.lse.at({1, 4, i}), sinks ? x.sinks.at({4}) : -kInfinity) << target;
            EXPECT_EQ(r.gradients.dq.at({1, i, 4, 3}), 0.0) << target;
          }
        });
      }
    }
  }
}

TEST(Edge, KeysHiddenFromAllRowsGetZeroGradientsWhateverVHolds) {
  Case c = pair_case();
  c.visible = {.present = true, .h = false, .s = false};  // as padding is often given
  c.data.hidden = 0.0;
  Instance x(c);
  x.visible.set({1, 0, 0, 9}, 0.0);
  x.visible.freeze();
  for_each_target([&](const std::string& target) {
    const Both r = x.run_both();
    EXPECT_EQ(r.gradients.dk.at({1, 9, 1, 2}), 0.0) << target;
    EXPECT_EQ(r.gradients.dv.at({1, 9, 1, 2}), 0.0) << target;
    EXPECT_NE(r.gradients.dv.at({0, 9, 1, 2}), 0.0) << target;
  });
  // dP of a hidden pair is not finite: its dS is 0 all the same.
  for (std::int64_t e = 0; e < c.d_v; ++e) x.v.set({1, 9, 1, e}, kInfinity);
  x.v.freeze();
  Results forward = x.make_results(DType::f32);
  forward.o.fill(0.5);
  forward.lse.fill(5.0);
  for_each_target([&](const std::string& target) {
    Gradients g = x.make_gradients(DType::f32);
    x.backward(forward, g, {.backend = Backend::cpu});
    EXPECT_EQ(g.dk.at({1, 9, 1, 2}), 0.0) << target;
  });
}

TEST(Edge, NanAndInfinityInTheBiasGiveNanRows) {
  for (const double bad : {kNan, kInfinity}) {
    Case c = pair_case();
    c.bias = kWhole;
    c.data.hidden = 0.4;
    Instance x(c);
    x.bias.set({1, 4, 7, 100}, bad);
    x.bias.freeze();
    for_each_target([&](const std::string& target) {
      Results r = x.make_results(DType::f32);
      x.forward(r, {.backend = Backend::cpu});
      r.lse.for_each([&](const auto& i, std::int64_t) {
        const bool hit = i[0] == 1 && i[1] == 4 && i[2] == 7;
        EXPECT_EQ(std::isnan(r.lse.at(i)), hit) << target;
        EXPECT_EQ(std::isnan(r.o.at({i[0], i[2], i[1], 0})), hit) << target;
      });
    });
  }
}

// -inf hides a key as false does, so that NaN behind it stays there.
TEST(Edge, BiasOfMinusInfinityHidesNanScores) {
  Case c = pair_case();
  c.bias = {.present = true, .h = false, .s = false};
  c.d_lse = false;
  Instance x(c);
  for (std::int64_t e = 0; e < c.d_qk; ++e) x.k.set({0, 17, 0, e}, kNan);
  x.bias.set({0, 0, 0, 17}, -kInfinity);
  x.k.freeze();
  x.bias.freeze();
  for_each_target([&](const std::string& target) {
    Results r = x.make_results(DType::f32);
    x.forward(r, {.backend = Backend::cpu});
    for (const double value : r.o.values()) ASSERT_FALSE(std::isnan(value)) << target;
  });
}

TEST(Edge, ZeroBiasAndFullMaskChangeNothing) {
  Case c = pair_case();
  const Instance plain(c);
  c.bias = c.visible = kWhole;
  c.data.hidden = 0.0;
  c.data.bias_std = 0.0;
  const Instance x(c);
  const Expected expected(plain, true);
  for_each_target([&](const std::string& target) {
    const Both r = x.run_both();
    check_forward(plain, r.results, expected, target);
    check_backward(plain, r.gradients, expected, target);
  });
}

TEST(Edge, BiasGradientsAreWrittenWhereNobodyLooks) {
  Case c = pair_case();
  c.bias = {.present = true, .b = false, .h = false};
  c.options.mask.window = {5, 3};
  c.key_lengths = {131, 40};
  const Instance x(c);
  check_on_every_target(x);
  for_each_target([&](const std::string& target) {
    const Both r = x.run_both();
    // Row 0 stands at key 81 of the longer sequence and before the shorter one.
    EXPECT_EQ(r.gradients.d_bias.at({0, 0, 0, 130}), 0.0) << target;
    EXPECT_EQ(r.gradients.d_bias.at({0, 0, 49, 60}), 0.0) << target;
  });
}

TEST(Edge, BiasGradientOfVarlenSequences) {
  for (const bool whole_rows : {true, false}) {
    Case c;
    c.h_k = 2;
    c.group = 2;
    c.lens_q = {40, 0, 130, 7, 64};
    c.lens_k = {300, 9, 20, 0, 257};
    c.bias = {.present = true, .b = false, .h = false, .s = whole_rows};
    c.visible = {.present = true};
    c.options.mask.causal = true;
    check_on_every_target(Instance(c));
  }
}

}  // namespace
}  // namespace abacist::testing
