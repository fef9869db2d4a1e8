// Edge cases of magnitudes: large scores, half precision, long sums; numbers are rows of
// tests/edge_cases.md.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/bounds.hpp"
#include "support/case.hpp"
#include "support/environment.hpp"

namespace abacist::testing {
namespace {

Results run_forward(const Instance& x) {
  Results r = x.make_results(x.c.o_dtype);
  x.forward(r, {.backend = Backend::cpu});
  return r;
}

void check(const Instance& x) { check_on_every_target(x); }

/// d_qk = 1 and scale 1, so that the score of (i, j) is q_i k_j.
Case scalar_case(std::int64_t s_q, std::int64_t s_k) {
  Case c{.s_q = s_q, .s_k = s_k, .d_qk = 1, .d_v = 3};
  c.options.score.scale = 1.0;
  return c;
}

TEST(Edge, Row8_GradientOfLseAlone) {
  Case c{.h_k = 2, .group = 2, .s_q = 33, .s_k = 50};
  c.d_lse = true;
  Instance x(c);
  x.d_o.fill(0.0);
  check(x);
  Results r = run_forward(x);
  Gradients g = x.make_gradients(DType::f32);
  x.backward(r, g, {.backend = Backend::cpu});
  double size = 0.0;
  for (const double dq : g.dq.values()) size += std::fabs(dq);
  EXPECT_GT(size, 1.0);
  for (const double dv : g.dv.values()) EXPECT_EQ(dv, 0.0);
}

// Finite, however negative, hides nothing: scores near the end of float's range.
TEST(Edge, Row12_HugeFiniteScoresAreNotAMask) {
  for (const double score : {-1.6e38, -1e38, 1e38, 1.6e38}) {
    Instance x(scalar_case(3, 4));
    x.q.fill(score > 0 ? 1e19 : -1e19);
    x.k.fill(std::fabs(score) / 1e19);
    const Expected expected(x, false);
    for_each_target([&](const std::string& target) {
      const Results r = run_forward(x);
      for (std::int64_t i = 0; i < 3; ++i) {
        for (std::int64_t e = 0; e < 3; ++e) {
          EXPECT_NEAR(r.o.at({0, i, 0, e}), expected.oracle.o.at({0, i, 0, e}), 1e-6)
              << target << " score " << score;  // uniform weights
        }
        EXPECT_NEAR(r.lse.at({0, 0, i}) / score, 1.0, 1e-6) << target;
      }
    });
  }
}

TEST(Edge, Row12_OneVisibleKeyHasProbabilityExactlyOne) {
  for (const double score : {-1.6e38, -300.0, -0.1, 0.0, 3.3, 88.8, 1e5, 1.6e38}) {
    Instance x(scalar_case(1, 1));
    x.q.fill(score == 0.0 ? 0.0 : std::copysign(1.5, score));
    x.k.fill(std::fabs(score) / 1.5);
    for_each_target([&](const std::string& target) {
      EXPECT_EQ(run_forward(x).o.values(), x.v.values()) << target << " score " << score;
    });
  }
}

// P is at most 1, though a float LSE may be less than the score that it is made of.
TEST(Edge, Row39_GradientsOfHugeScoresStayBounded) {
  for (const double size : {1e3, 1e4, 3e7, 1e15}) {  // of q and k: scores of 1e6 ... 1e30
    Case c{.s_q = 40, .s_k = 50, .d_qk = 8, .d_v = 8};
    c.data.query_key_std = size;
    const Instance x(c);
    double most = 0.0;
    for (const double value : x.d_o.values()) most += std::fabs(value);
    for (const Backend backend : {Backend::cpu, Backend::reference}) {
      for_each_target([&](const std::string& target) {
        const Both both = x.run_both({.backend = backend});
        for (const double dv : both.gradients.dv.values()) {
          ASSERT_LE(std::fabs(dv), most) << target << " size " << size;  // false for NaN
        }
        for (const Buffer* gradient : {&both.gradients.dq, &both.gradients.dk}) {
          for (const double value : gradient->values()) {
            ASSERT_TRUE(std::isfinite(value)) << target << " size " << size;
          }
        }
      });
    }
  }
}

TEST(Edge, Row12_HugeAlibiOfOneVisibleKey) {
  Case c = scalar_case(3, 1);
  c.alibi_rank = 1;
  c.options.mask.align = Align::top_left;
  Instance x(c);
  x.q.fill(0.0);
  x.slopes.fill(8e37);  // distances 0, 1, 2
  for_each_target([&](const std::string& target) {
    const Results r = run_forward(x);
    for (std::int64_t i = 0; i < 3; ++i) {
      EXPECT_EQ(r.o.at({0, i, 0, 0}), x.v.at({0, 0, 0, 0})) << target << " row " << i;
      EXPECT_NEAR(r.lse.at({0, 0, i}), -8e37 * static_cast<double>(i), 1e31) << target;
    }
  });
}

TEST(Edge, Row20_DefaultScaleUsesTheTrueHeadDimension) {
  for (const std::int64_t d : {1, 60, 257, 512}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Case c{.s_q = 20, .s_k = 30, .d_qk = d, .d_v = d};
      c.dtype = c.o_dtype = c.grad_dtype = dtype;
      check(Instance(c));
    }
  }
}

TEST(Edge, Row20_HeadDimensionsPastTheLimitAreRefusedByName) {
  for (const bool of_v : {false, true}) {
    Case c;
    (of_v ? c.d_v : c.d_qk) = 513;
    const Instance x(c);
    Results r = x.make_results(DType::f32);
    const Status status = forward(x.tensors(r), c.options);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code, ErrorCode::unsupported);
    EXPECT_NE(status.error().message.find("513"), std::string::npos) << status.error().message;
    EXPECT_EQ(r.o.damage(false), "");
  }
}

TEST(Edge, Row38_HalfPrecisionSumsDoNotOverflow) {
  Case c{.s_q = 2, .s_k = 2};
  c.dtype = c.o_dtype = c.grad_dtype = DType::f16;
  Instance x(c);
  x.q.fill(0.0);
  x.k.fill(0.0);
  x.v.fill(60000.0);
  for_each_target([&](const std::string& target) {
    for (const double o : run_forward(x).o.values()) EXPECT_EQ(o, 60000.0) << target;
  });
}

TEST(Edge, Row39_BackwardAtScoresFarBelowZero) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Case c{.s_q = 40, .s_k = 70, .d_qk = 64, .d_v = 64};
    c.dtype = c.o_dtype = c.grad_dtype = dtype;
    Instance x(c);
    Random random(39);
    std::vector<double> u(64);
    double norm = 0.0;
    for (double& e : u) {
      e = random.normal();
      norm += e * e;
    }
    for (double& e : u) e /= std::sqrt(norm);
    x.k.for_each([&](const auto& i, std::int64_t) {
      x.k.set(i, x.k.at(i) + 2.0 * u[static_cast<std::size_t>(i[3])]);
    });
    x.q.for_each([&](const auto& i, std::int64_t) {
      if (i[1] % 7 == 3) {  // scores around -200 ... -490
        const double m = 800.0 + 30.0 * static_cast<double>(i[1]);
        x.q.set(i, -m * u[static_cast<std::size_t>(i[3])]);
      }
    });
    x.k.freeze();
    x.q.freeze();
    check(x);
  }
}

// exp of a very negative argument is 0, not the smallest float: 2^-126 times 1e37 would show.
TEST(Edge, Row44_VanishingWeightsVanish) {
  for (const double low : {-1e30, -1e4, -200.0}) {
    Instance x(scalar_case(2, 2));
    x.q.fill(1.0);
    x.k.fill({0.0, low});
    x.v.fill({1.0, 2.0, 3.0, 1e37, 1e37, 1e37});
    for_each_target([&](const std::string& target) {
      const Results r = run_forward(x);
      for (std::int64_t i = 0; i < 2; ++i) {
        EXPECT_EQ(r.o.at({0, i, 0, 0}), 1.0) << target << " low " << low;
        EXPECT_EQ(r.o.at({0, i, 0, 2}), 3.0) << target << " low " << low;
        EXPECT_EQ(r.lse.at({0, 0, i}), 0.0) << target;
      }
    });
  }
}

// Deviation and bias at growing lengths, V with a mean.
TEST(Edge, Row48_ErrorAndBiasUpToLengthsOf128K) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const std::int64_t s_k : {128, 4096, 131072}) {
      Case c{.s_q = by_effort<std::int64_t>(2, 12, 64), .s_k = s_k, .d_qk = 16, .d_v = 16};
      if (effort() == Effort::reduced) c.s_k = std::min<std::int64_t>(c.s_k, 20'000);
      c.dtype = c.o_dtype = c.grad_dtype = dtype;
      c.data.v_mean = 2.0;
      check(Instance(c));
    }
  }
}

TEST(Edge, LargeLogitsOfEitherSign) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const double scale : {30.0, -30.0}) {
      Case c{.s_q = 50, .s_k = 90, .d_qk = 32, .d_v = 8};
      c.dtype = c.o_dtype = c.grad_dtype = dtype;
      c.options.score.scale = scale;
      check(Instance(c));
    }
  }
}

TEST(Edge, RisingAndFallingLogitsMoveTheMaximumInEveryTile) {
  for (const bool falling : {false, true}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Case c{.s_q = 40, .s_k = 1000, .d_qk = 8, .d_v = 8};
      c.dtype = c.o_dtype = c.grad_dtype = dtype;
      c.alibi_rank = 1;
      if (falling) c.options.mask.align = Align::top_left;
      Instance x(c);
      x.slopes.fill(0.5);  // scores rise from about -500 to 0 at the query's own position, or fall
      check(x);
    }
  }
}

TEST(Edge, LargeValuesStayFinite) {
  Instance x(Case{.s_q = 4, .s_k = 100});
  x.v.fill(1e36);
  for_each_target([&](const std::string& target) {
    for (const double o : run_forward(x).o.values()) {
      EXPECT_NEAR(o / 1e36, 1.0, 1e-5) << target;
    }
  });
}

}  // namespace
}  // namespace abacist::testing
