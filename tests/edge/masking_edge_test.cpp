// Edge cases of masks, empty rows and non-finite data; numbers are rows of tests/edge_cases.md.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "support/bounds.hpp"
#include "support/case.hpp"
#include "support/environment.hpp"

namespace abacist::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr DType kAllTypes[] = {DType::f32, DType::bf16, DType::f16};

Both run(const Instance& x) { return x.run_both(); }

void check(const Instance& x) { check_on_every_target(x); }
void check(const Case& c) { check(Instance(c)); }

TEST(Edge, Row1_BottomRightCausalLeavesTheFirstQueriesWithoutKeys) {
  for (const DType dtype : kAllTypes) {
    Case c = typed({.s_q = 5, .s_k = 2}, dtype);
    c.options.mask.causal = true;
    c.d_lse = true;
    const Instance x(c);
    check(x);
    for_each_target([&](const std::string&) {
      const Both r = run(x);
      for (std::int64_t i = 0; i < 5; ++i) {
        EXPECT_EQ(r.results.lse.at({0, 0, i}) == -kInfinity, i < 3) << i;
        EXPECT_EQ(r.results.o.at({0, i, 0, 0}) == 0.0, i < 3) << i;
        EXPECT_EQ(r.gradients.dq.at({0, i, 0, 0}) == 0.0, i < 3) << i;
      }
    });
  }
}

// Fully masked rows by every kind of mask, at tile edges too; no exp(-inf - -inf) may leak out.
TEST(Edge, Row2_RowsWithoutKeysUnderEveryMask) {
  for (const DType dtype : kAllTypes) {
    for (const std::int64_t s_q : {7, 64, 200}) {
      Case c = typed({.group = 2, .s_q = s_q, .s_k = 33}, dtype);
      c.options.mask.window = {3, 0};
      check(c);  // the first rows see nothing
      c.options.mask.align = Align::top_left;
      check(c);  // the last rows see nothing
      c.options.mask.window = {0, 2};
      check(c);
    }
  }
}

TEST(Edge, Row3_RowsWhoseFirstKeyTilesAreMasked) {
  Case c{.s_q = 600, .s_k = 600, .d_qk = 2, .d_v = 2};
  c.options.mask.window = {5, 4};
  check(c);
  c.options.mask.window = {10, 0};
  check(typed(c, DType::bf16));
}

TEST(Edge, Row4_NoKeysAtAll) {
  for (const DType dtype : kAllTypes) {
    const Instance x(typed({.b = 2, .group = 3, .s_q = 70, .s_k = 0}, dtype));
    for_each_target([&](const std::string&) {
      const Both r = run(x);
      for (const double lse : r.results.lse.values()) EXPECT_EQ(lse, -kInfinity);
      for (const double o : r.results.o.values()) EXPECT_EQ(o, 0.0);
      for (const double dq : r.gradients.dq.values()) EXPECT_EQ(dq, 0.0);
    });
  }
}

TEST(Edge, Row4_NoQueriesMeansZeroGradientsOfKeys) {
  for (const DType dtype : kAllTypes) {
    const Instance x(typed({.b = 2, .group = 3, .s_q = 0, .s_k = 70}, dtype));
    for_each_target([&](const std::string&) {
      const Both r = run(x);
      for (const double dk : r.gradients.dk.values()) EXPECT_EQ(dk, 0.0);
      for (const double dv : r.gradients.dv.values()) EXPECT_EQ(dv, 0.0);
    });
  }
}

TEST(Edge, Row6_LseIsANaturalLogarithm) {
  Instance x(Case{.s_q = 3, .s_k = 100});
  x.q.fill(0.0);
  for_each_target([&](const std::string&) {
    const Both r = run(x);
    for (const double lse : r.results.lse.values()) EXPECT_NEAR(lse, std::log(100.0), 1e-6);
  });
}

TEST(Edge, Row9_EquivalentWindowsAgreeBitForBit) {
  Case c{.s_q = 8, .s_k = 8};
  for_each_target([&](const std::string&) {
    c.options.mask = {.causal = true};
    const auto causal = run(Instance(c)).results.o.values();
    for (const std::int64_t left : {kUnbounded, std::int64_t{8}, std::int64_t{7}}) {
      c.options.mask = {.window = {left, 0}};
      EXPECT_EQ(run(Instance(c)).results.o.values(), causal) << left;
    }
  });
  c.options.mask = {.window = {0, 0}};
  check(c);
  Instance x(c);  // only the diagonal: O is V
  for_each_target([&](const std::string&) { EXPECT_EQ(run(x).results.o.values(), x.v.values()); });
}

TEST(Edge, Row10_LeftWindowWithRightZeroIsBoundedOnBothSides) {
  Case c{.s_q = 8, .s_k = 8};
  c.options.mask.window = {3, 0};
  check(c);
  c.s_q = c.s_k = 150;
  check(c);
}

TEST(Edge, Row11_SoftcapComesBeforeTheMask) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Case c = typed({.s_q = 4, .s_k = 4}, dtype);
    c.options.mask.causal = true;
    c.options.score.softcap = 1.0;
    Instance x(c);
    for (std::int64_t e = 0; e < c.d_v; ++e) x.v.set({0, 3, 0, e}, 1e4);
    x.v.freeze();
    for_each_target([&](const std::string& target) {
      const Both r = run(x);
      for (std::int64_t i = 0; i < 3; ++i) {
        EXPECT_LT(std::fabs(r.results.o.at({0, i, 0, 0})), 10.0) << target << ": row " << i;
      }
    });
    check(x);
  }
}

TEST(Edge, Row11_SoftcapInVarlenBackward) {
  Case c{.h_k = 2, .group = 2};
  c.lens_q = {3, 40, 0, 17};
  c.lens_k = {9, 40, 5, 2};
  c.options.score.softcap = 2.0;
  check(c);
  c.options.mask.causal = true;
  check(typed(c, DType::bf16));
}

TEST(Edge, Row13_AlibiIsAroundTheQuerysOwnPosition) {
  for (const int rank : {1, 2}) {
    Case c{.b = 2, .h_k = 2, .group = 4, .s_q = 3, .s_k = 5};
    c.alibi_rank = rank;
    check(c);
    c.s_q = 1;
    check(c);
    c.options.mask.causal = true;
    c.s_q = 130;
    c.s_k = 70;
    check(c);
    c.options.mask.align = Align::top_left;
    check(c);
  }
  Case many{.h_k = 16, .group = 3, .s_q = 10, .s_k = 10};  // 48 heads
  many.alibi_rank = 1;
  check(many);
}

TEST(Edge, Row47_CausalAndFullDifferInBothPasses) {
  const Case full{.s_q = 40, .s_k = 40};
  Case causal = full;
  causal.options.mask.causal = true;
  for_each_target([&](const std::string&) {
    const Both a = run(Instance(full));
    const Both b = run(Instance(causal));
    EXPECT_NE(a.results.o.values(), b.results.o.values());
    EXPECT_NE(a.gradients.dq.values(), b.gradients.dq.values());
    EXPECT_NE(a.gradients.dk.values(), b.gradients.dk.values());
    EXPECT_NE(a.gradients.dv.values(), b.gradients.dv.values());
  });
  check(full);
  check(causal);
}

/// NaN at one place; says which rows of O came out NaN: those that see it (or hold it).
void expect_nan_rows(const Instance& x, const std::function<bool(std::int64_t)>& nan_row,
                     const std::string& what) {
  for_each_target([&](const std::string& target) {
    Results r = x.make_results(x.c.o_dtype);
    x.forward(r, {.backend = Backend::cpu});
    for (std::int64_t i = 0; i < x.c.s_q; ++i) {
      for (std::int64_t e = 0; e < x.c.d_v; ++e) {
        ASSERT_EQ(std::isnan(r.o.at({0, i, 0, e})), nan_row(i))
            << target << ": " << what << ", row " << i << " of " << x.c.text();
      }
      ASSERT_EQ(std::isnan(r.lse.at({0, 0, i})), nan_row(i))
          << target << ": LSE, " << what << ", row " << i << " of " << x.c.text();
    }
  });
}

TEST(Edge, Row49_NanQueryRowGivesItsNanRowAlone) {
  for (const DType dtype : kAllTypes) {
    for (const bool causal : {false, true}) {
      for (const std::int64_t row : {0, 1, 31, 63, 64, 99}) {
        Case c = typed({.s_q = 100, .s_k = 150}, dtype);
        c.options.mask.causal = causal;
        Instance x(c);
        x.q.set({0, row, 0, 3}, kNan);
        x.q.freeze();
        expect_nan_rows(
            x, [&](std::int64_t i) { return i == row; }, "NaN query");
      }
    }
  }
}

TEST(Edge, Row49_NanQueryRowWithSoftcapOrAlibiOrNegativeScale) {
  for (int kind = 0; kind < 4; ++kind) {
    Case c{.s_q = 20, .s_k = 70};
    if (kind == 0) c.options.score.softcap = 5.0;
    if (kind == 1) c.alibi_rank = 1;
    if (kind == 2) c.options.score.scale = -0.5;
    if (kind == 3) c.options.score.scale = 0.0;
    Instance x(c);
    x.q.set({0, 7, 0, 0}, kNan);
    x.q.freeze();
    expect_nan_rows(
        x, [](std::int64_t i) { return i == 7; }, "NaN query");
  }
}

// A guard against NaN must not hide a real one: every row that sees a NaN key is NaN.
TEST(Edge, Row49_NanKeyReachesExactlyTheRowsThatSeeIt) {
  for (const DType dtype : kAllTypes) {
    for (const std::int64_t key : {0, 1, 63, 64, 100}) {
      Case c = typed({.s_q = 130, .s_k = 130}, dtype);
      Instance all(c);
      all.k.set({0, key, 0, 2}, kNan);
      all.k.freeze();
      expect_nan_rows(
          all, [](std::int64_t) { return true; }, "NaN key");
      c.options.mask.causal = true;
      Instance causal(c);
      causal.k.set({0, key, 0, 2}, kNan);
      causal.k.freeze();
      expect_nan_rows(
          causal, [&](std::int64_t i) { return i >= key; }, "NaN key");
    }
  }
}

TEST(Edge, Row49_NanGradientStaysInItsRow) {
  Case c{.s_q = 100, .s_k = 100};
  c.options.mask.causal = true;
  Instance x(c);
  x.d_o.set({0, 20, 0, 3}, kNan);
  x.d_o.freeze();
  for_each_target([&](const std::string&) {
    const Both r = run(x);
    for (std::int64_t i = 0; i < 100; ++i) {
      EXPECT_EQ(std::isnan(r.gradients.dq.at({0, i, 0, 0})), i == 20) << i;
      EXPECT_EQ(std::isnan(r.gradients.dk.at({0, i, 0, 0})), i <= 20) << i;
    }
  });
}

/// Data of other sequences, batch entries and heads holds NaN and infinities; nothing may show.
TEST(Edge, Row49_OtherSequencesNeverInfluenceAResult) {
  for (const DType dtype : kAllTypes) {
    Case c = typed({.h_k = 2, .group = 2, .d_qk = 20, .d_v = 12}, dtype);
    c.lens_q = {19, 33, 50};
    c.lens_k = {70, 31, 65};
    Instance clean(c);
    Instance dirty(c);
    for (Buffer* buffer : {&dirty.q, &dirty.k, &dirty.v, &dirty.d_o}) {
      const bool of_queries = buffer == &dirty.q || buffer == &dirty.d_o;
      const auto& lens = of_queries ? c.lens_q : c.lens_k;
      const std::int64_t first = lens[0];
      const std::int64_t last = first + lens[1];
      std::int64_t n = 0;
      buffer->for_each([&](const auto& i, std::int64_t) {
        if (i[0] < first || i[0] >= last) buffer->set(i, ++n % 2 != 0 ? kNan : -kInfinity);
      });
      buffer->freeze();
    }
    for_each_target([&](const std::string& target) {
      const Both a = run(clean);
      const Both b = run(dirty);
      const auto compare = [&](const Buffer& x, const Buffer& y, std::int64_t first,
                               std::int64_t last, const char* name) {
        x.for_each([&](const auto& i, std::int64_t) {
          if (i[0] < first || i[0] >= last) return;
          ASSERT_EQ(x.at(i), y.at(i)) << target << " " << name << " row " << i[0];
        });
      };
      compare(a.results.o, b.results.o, 19, 52, "o");
      compare(a.gradients.dq, b.gradients.dq, 19, 52, "dq");
      compare(a.gradients.dk, b.gradients.dk, 70, 101, "dk");
      compare(a.gradients.dv, b.gradients.dv, 70, 101, "dv");
    });
  }
}

}  // namespace
}  // namespace abacist::testing
