// Properties that exact attention has whatever the tiles, splits and layouts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "support/bounds.hpp"
#include "support/case.hpp"
#include "support/environment.hpp"

namespace abacist::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr PlanOptions kCpu{.backend = Backend::cpu};

Results run_forward(const Instance& x) {
  Results r = x.make_results(x.c.o_dtype);
  x.forward(r, kCpu);
  r.o.freeze();
  r.lse.freeze();
  return r;
}

/// Keys (and values) `take` of x, in that order.
Instance with_keys(const Instance& x, const std::vector<std::int64_t>& take) {
  Instance y = x;
  y.c.s_k = static_cast<std::int64_t>(take.size());
  for (const bool of_v : {false, true}) {
    const Buffer& from = of_v ? x.v : x.k;
    Buffer& to = of_v ? y.v : y.k;
    to = Buffer(from.spec().dtype, {x.c.b, y.c.s_k, x.c.h_k, from.spec().shape[3]});
    to.for_each([&](const auto& i, std::int64_t) {
      to.set(i, from.at({i[0], take[static_cast<std::size_t>(i[1])], i[2], i[3]}));
    });
    to.freeze();
  }
  return y;
}

std::vector<std::int64_t> shuffled(std::vector<std::int64_t> values, Random& random) {
  for (std::size_t n = values.size(); n > 1; --n) {
    std::swap(
        values[n - 1],
        values[static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(n) - 1))]);
  }
  return values;
}

std::vector<std::int64_t> range(std::int64_t first, std::int64_t last) {
  std::vector<std::int64_t> values(static_cast<std::size_t>(last - first));
  std::iota(values.begin(), values.end(), first);
  return values;
}

/// Deals the keys to `parts` parts: contiguous blocks, or any key to any part (ragged,
/// overlapping).
std::vector<std::vector<std::int64_t>> deal(std::int64_t s_k, std::int64_t parts, bool ragged,
                                            Random& random) {
  std::vector<std::vector<std::int64_t>> all(static_cast<std::size_t>(parts));
  std::int64_t part = 0;
  for (std::int64_t key = 0; key < s_k; ++key) {
    if (ragged || random.chance(static_cast<double>(parts) / static_cast<double>(s_k))) {
      part = random.integer(0, parts - 1);
    }
    all[static_cast<std::size_t>(part)].push_back(key);
  }
  return all;
}

TEST(Merge, PartsOfTheKeysInAnyOrderMakeTheWhole) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const bool ragged : {false, true}) {
      for (const std::int64_t parts : {1, 2, 3, 7, 20}) {
        Case c{.b = 2, .h_k = 2, .group = 2, .s_q = 5, .s_k = 150, .d_qk = 24, .d_v = 16};
        c.dtype = dtype;  // partial results and the merged one in float32
        c.stream = static_cast<std::uint64_t>(parts);
        const Instance x(c);
        const Expected expected(x, false);
        Random random(c.stream + 77);
        std::vector<Results> results;
        for (const auto& keys : deal(c.s_k, parts, ragged, random)) {
          results.push_back(run_forward(with_keys(x, shuffled(keys, random))));
        }
        for (int round = 0; round < 3; ++round) {
          std::vector<Partial> partials;
          for (const std::int64_t n : shuffled(range(0, parts), random)) {
            const Results& r = results[static_cast<std::size_t>(n)];
            partials.push_back({r.o.in(), r.lse.in()});
          }
          Results merged = x.make_results(DType::f32, DType::f32, {.random = true});
          const Status status = merge(partials, merged.o.out(), merged.lse.out());
          ASSERT_TRUE(status.ok()) << to_string(status.error());
          EXPECT_EQ(merged.o.damage(true), "");
          EXPECT_EQ(merged.lse.damage(true), "");
          check_forward(x, merged, expected, "merged " + std::to_string(parts));
        }
      }
    }
  }
}

TEST(Merge, IsAssociativeUpToRounding) {
  const Case c{.h_k = 2, .s_q = 9, .s_k = 90};
  const Instance x(c);
  const Expected expected(x, false);
  const Results a = run_forward(with_keys(x, range(0, 20)));
  const Results b = run_forward(with_keys(x, range(20, 70)));
  const Results d = run_forward(with_keys(x, range(70, 90)));
  const auto pair = [&](const Results& first, const Results& second) {
    Results r = x.make_results(DType::f32);
    const Partial parts[] = {{first.o.in(), first.lse.in()}, {second.o.in(), second.lse.in()}};
    EXPECT_TRUE(merge(parts, r.o.out(), r.lse.out()).ok());
    return r;
  };
  check_forward(x, pair(pair(a, b), d), expected, "(a b) c");
  check_forward(x, pair(a, pair(b, d)), expected, "a (b c)");
}

TEST(Merge, VarlenResultsToo) {
  Case c{.h_k = 2, .group = 2, .d_qk = 8, .d_v = 8};
  c.lens_q = {5, 0, 17};
  c.lens_k = {40, 3, 30};
  Case first = c;
  first.lens_k = {40, 0, 11};
  Case second = c;
  second.lens_k = {0, 3, 19};
  const Instance x(c);
  Instance a(first);
  Instance b(second);
  const auto copy = [&](Buffer& to, const Buffer& from, const std::vector<std::int64_t>& rows) {
    to.for_each([&](const auto& i, std::int64_t) {
      to.set(i, from.at({rows[static_cast<std::size_t>(i[0])], i[1], i[2], 0}));
    });
    to.freeze();
  };
  const auto join = [](std::vector<std::int64_t> one, const std::vector<std::int64_t>& two) {
    one.insert(one.end(), two.begin(), two.end());
    return one;
  };
  const auto of_a = join(range(0, 40), range(43, 54));
  const auto of_b = join(range(40, 43), range(54, 73));
  for (Instance* y : {&a, &b}) {
    copy(y->k, x.k, y == &a ? of_a : of_b);
    copy(y->v, x.v, y == &a ? of_a : of_b);
    copy(y->q, x.q, range(0, 22));
  }
  const Results ra = run_forward(a);
  const Results rb = run_forward(b);
  Results merged = x.make_results(DType::f32);
  const Partial parts[] = {{ra.o.in(), ra.lse.in()}, {rb.o.in(), rb.lse.in()}};
  const Status status = merge(parts, merged.o.out(), merged.lse.out());
  ASSERT_TRUE(status.ok()) << to_string(status.error());
  check_forward(x, merged, Expected(x, false), "merged varlen");
}

// Edge case 5: (0, -inf) is neutral, twice it is itself, and the other part comes back bit for bit.
TEST(Merge, EmptyPartsAreNeutral) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Case c = typed({.h_k = 2, .s_q = 9, .s_k = 30}, dtype);
    const Instance x(c);
    Results full = run_forward(x);
    full.o.set({0, 0, 0, 0}, -0.0);
    full.o.freeze();
    Results empty = x.make_results(dtype);
    empty.lse.fill(-kInfinity);  // its O holds NaN: an empty part's O is never read
    Results zero = x.make_results(dtype);
    zero.lse.fill(-kInfinity);
    zero.o.fill(0.0);
    const Partial f{full.o.in(), full.lse.in()};
    const Partial e{empty.o.in(), empty.lse.in()};
    const Partial z{zero.o.in(), zero.lse.in()};
    for (const auto& parts : {std::vector{f, e}, {e, f}, {z, f, e}, {f}}) {
      Results merged = x.make_results(dtype);
      ASSERT_TRUE(merge(parts, merged.o.out(), merged.lse.out()).ok());
      EXPECT_EQ(merged.o.element_bytes(), full.o.element_bytes()) << to_string(dtype);
      EXPECT_EQ(merged.lse.element_bytes(), full.lse.element_bytes());
    }
    for (const auto& parts : {std::vector{z, z}, {e, e}, {z}, {}}) {
      Results merged = x.make_results(dtype);
      ASSERT_TRUE(merge(parts, merged.o.out(), merged.lse.out()).ok());
      for (const double o : merged.o.values()) EXPECT_EQ(o, 0.0);
      for (const double lse : merged.lse.values()) EXPECT_EQ(lse, -kInfinity);
    }
  }
}

TEST(Merge, NanStaysInItsRow) {
  const Case c{.s_q = 6, .s_k = 10};
  const Instance x(c);
  Results a = run_forward(x);
  const Results b = run_forward(x);
  for (std::int64_t e = 0; e < c.d_v; ++e) a.o.set({0, 2, 0, e}, std::nan(""));
  a.lse.set({0, 0, 2}, std::nan(""));
  Results merged = x.make_results(DType::f32);
  const Partial parts[] = {{a.o.in(), a.lse.in()}, {b.o.in(), b.lse.in()}};
  ASSERT_TRUE(merge(parts, merged.o.out(), merged.lse.out()).ok());
  for (std::int64_t i = 0; i < 6; ++i) {
    EXPECT_EQ(std::isnan(merged.o.at({0, i, 0, 0})), i == 2);
    EXPECT_EQ(std::isnan(merged.lse.at({0, 0, i})), i == 2);
  }
}

// Lengths just below, at and above every tile size that the plans choose.
TEST(Tile, LengthsAroundTheTilesOfThePlan) {
  for (const auto& [d, group] : {std::pair<std::int64_t, std::int64_t>{64, 1}, {128, 3}, {8, 2}}) {
    Case c{.h_k = 1, .group = group, .s_q = 1000, .s_k = 1000, .d_qk = d, .d_v = d};
    std::int64_t rows = 0;
    std::int64_t keys = 0;
    {
      const Instance x(c);
      Results r = x.make_results(DType::f32);
      const auto planned = plan(make_problem(x.tensors(r), c.options), kCpu);
      ASSERT_TRUE(planned.ok());
      rows = std::max<std::int64_t>(planned->info().rows / group, 1);
      keys = planned->info().keys;
    }
    for (const std::int64_t s_q : {rows - 1, rows, rows + 1}) {
      for (const std::int64_t s_k : {keys - 1, keys, keys + 1, 2 * keys + 1}) {
        c.s_q = std::max<std::int64_t>(s_q, 1);
        c.s_k = s_k;
        for (const bool causal : {false, true}) {
          if (effort() == Effort::reduced && causal != (s_q == rows)) continue;
          c.options.mask.causal = causal;
          check_on_every_target(Instance(c));
        }
      }
    }
  }
}

TEST(Invariance, PermutationOfTheKeys) {
  Random random(8);
  const Case c{.b = 2, .h_k = 2, .group = 2, .s_q = 33, .s_k = 140};
  const Instance x(c);
  const Expected expected(x, true);
  const auto order = shuffled(range(0, c.s_k), random);
  const Instance y = with_keys(x, order);
  for_each_target([&](const std::string& target) {
    Both both = y.run_both();
    check_forward(x, both.results, expected, target);
    for (const bool of_v : {false, true}) {  // back into the old order
      Buffer& gradient = of_v ? both.gradients.dv : both.gradients.dk;
      Buffer restored(DType::f32, {2, c.s_k, 2, gradient.spec().shape[3]});
      gradient.for_each([&](const auto& i, std::int64_t) {
        restored.set({i[0], order[static_cast<std::size_t>(i[1])], i[2], i[3]}, gradient.at(i));
      });
      gradient = restored;
    }
    check_backward(x, both.gradients, expected, target);
  });
}

// A dimension in which q is 1 and k is c adds c to every score: O stays, LSE moves by c.
TEST(Invariance, AConstantAddedToAllScores) {
  for (const double shift : {-400.0, -3.0, 64.0, 1000.0}) {
    Case c{.s_q = 40, .s_k = 90, .d_qk = 9, .d_v = 8};
    c.options.score.scale = 1.0;
    Instance x(c);
    x.q.for_each([&](const auto& i, std::int64_t) {
      if (i[3] == 8) x.q.set(i, 1.0);
    });
    const auto set_shift = [&](Instance& y, double value) {
      y.k.for_each([&](const auto& i, std::int64_t) {
        if (i[3] == 8) y.k.set(i, value);
      });
      y.k.freeze();
      y.q.freeze();
    };
    set_shift(x, 0.0);
    Instance moved = x;
    set_shift(moved, shift);
    const Results oracle = x.reference_forward();
    const double bound = 0x1p-24 * 4.0 * (std::fabs(shift) + 100.0);
    for_each_target([&](const std::string& target) {
      const Results r = run_forward(moved);
      check_within("o after a shift", r.o.spec(), r.o.values(), oracle.o.values(), 4.0 * bound,
                   target);
      auto lse = oracle.lse.values();
      for (double& value : lse) value += shift;
      check_within("lse after a shift", r.lse.spec(), r.lse.values(), lse, bound, target);
    });
  }
}

TEST(Invariance, WindowsBeyondTheSequenceChangeNothing) {
  for (const bool causal : {false, true}) {
    Case c{.h_k = 2, .s_q = 70, .s_k = 90};
    c.options.mask.causal = causal;
    const Instance x(c);
    for_each_target([&](const std::string& target) {
      const Both none = x.run_both();
      for (const std::int64_t side :
           {std::int64_t{90}, std::int64_t{1} << 40, (std::int64_t{1} << 61) + 1, kUnbounded - 1}) {
        Instance y = x;
        y.c.options.mask.window = {side, side};
        const Both wide = y.run_both();
        EXPECT_EQ(wide.results.o.values(), none.results.o.values()) << target << " " << side;
        EXPECT_EQ(wide.gradients.dk.values(), none.gradients.dk.values()) << target << " " << side;
      }
    });
  }
}

TEST(Invariance, AlignmentsAgreeOnSquareProblems) {
  Case c{.h_k = 2, .s_q = 70, .s_k = 70};
  c.options.mask = {.causal = true, .window = {20, 5}};
  for_each_target([&](const std::string& target) {
    c.options.mask.align = Align::bottom_right;
    const Both a = Instance(c).run_both();
    c.options.mask.align = Align::top_left;
    const Both b = Instance(c).run_both();
    EXPECT_EQ(a.results.o.values(), b.results.o.values()) << target;
    EXPECT_EQ(a.gradients.dq.values(), b.gradients.dq.values()) << target;
  });
}

TEST(Invariance, PowersOfTwoPassThroughExactly) {
  const Case c{.s_q = 50, .s_k = 90, .d_v = 8};
  const Instance x(c);
  Instance y = x;
  for (Buffer* buffer : {&y.v, &y.d_o}) {
    auto values = buffer->values();
    for (double& value : values) value *= buffer == &y.v ? 8.0 : 0.25;
    buffer->fill(values);
  }
  const auto scaled = [](std::vector<double> values, double factor) {
    for (double& value : values) value *= factor;
    return values;
  };
  for_each_target([&](const std::string& target) {
    const Both a = x.run_both();
    const Both b = y.run_both();
    EXPECT_EQ(b.results.o.values(), scaled(a.results.o.values(), 8.0)) << target;
    EXPECT_EQ(b.gradients.dv.values(), scaled(a.gradients.dv.values(), 0.25)) << target;
    EXPECT_EQ(b.gradients.dq.values(), scaled(a.gradients.dq.values(), 2.0)) << target;
  });
}

TEST(Invariance, GroupedHeadsEqualRepeatedKeys) {
  Case grouped{.h_k = 2, .group = 3, .s_q = 40, .s_k = 60, .d_qk = 16, .d_v = 16};
  const Instance x(grouped);
  Case repeated = grouped;
  repeated.h_k = 6;
  repeated.group = 1;
  Instance y(repeated);
  y.q.fill(x.q.values());
  y.d_o.fill(x.d_o.values());
  for (const bool of_v : {false, true}) {
    Buffer& to = of_v ? y.v : y.k;
    const Buffer& from = of_v ? x.v : x.k;
    to.for_each([&](const auto& i, std::int64_t) {
      to.set(i, from.at({i[0], i[1], i[2] / 3, i[3]}));
    });
    to.freeze();
  }
  const Expected expected(x, true);
  for_each_target([&](const std::string& target) {
    Both both = y.run_both();
    check_forward(x, both.results, expected, target);
    Gradients summed = x.make_gradients(DType::f32);
    summed.dq.fill(both.gradients.dq.values());
    for (const bool of_v : {false, true}) {
      Buffer& to = of_v ? summed.dv : summed.dk;
      const Buffer& from = of_v ? both.gradients.dv : both.gradients.dk;
      to.for_each([&](const auto& i, std::int64_t) {
        double sum = 0.0;
        for (std::int64_t g = 0; g < 3; ++g) sum += from.at({i[0], i[1], 3 * i[2] + g, i[3]});
        to.set(i, sum);
      });
    }
    check_backward(x, summed, expected, target);
  });
}

// Gradients of a block of keys with the LSE and O of the whole: what ring attention needs.
TEST(Invariance, GradientsByBlocksOfKeysMakeTheWhole) {
  const Case c{.h_k = 2, .s_q = 30, .s_k = 100, .d_qk = 16, .d_v = 16};
  const Instance x(c);
  const Expected expected(x, true);
  for_each_target([&](const std::string& target) {
    const Results whole = run_forward(x);
    Gradients total = x.make_gradients(DType::f32);
    total.dq.fill(0.0);
    for (const auto& keys : {range(0, 37), range(37, 100)}) {
      const Instance part = with_keys(x, keys);
      Gradients g = part.make_gradients(DType::f32);
      part.backward(whole, g, kCpu);
      total.dq.for_each(
          [&](const auto& i, std::int64_t) { total.dq.set(i, total.dq.at(i) + g.dq.at(i)); });
      for (const bool of_v : {false, true}) {
        Buffer& to = of_v ? total.dv : total.dk;
        const Buffer& from = of_v ? g.dv : g.dk;
        from.for_each([&](const auto& i, std::int64_t) {
          to.set({i[0], keys[static_cast<std::size_t>(i[1])], i[2], i[3]}, from.at(i));
        });
      }
    }
    check_backward(x, total, expected, target);
  });
}

}  // namespace
}  // namespace abacist::testing
