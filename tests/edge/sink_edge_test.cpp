// Edge cases of sinks and key lengths; numbers are rows of tests/edge_cases.md.
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

Case sink_case() {
  Case c;
  c.b = 2;
  c.h_k = 2;
  c.group = 3;
  c.s_q = 37;
  c.s_k = 65;
  c.sinks = true;
  c.d_lse = true;
  return c;
}

// The gradient of a sink was rounded term by term, or missing.
TEST(Edge, Row43_SinksAndTheirGradients) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Case c = sink_case();
    c.dtype = c.o_dtype = c.grad_dtype = dtype;
    check_on_every_target(Instance(c));
    c.options.mask.causal = true;
    c.s_q = by_effort(100, 500, 4096);  // many terms, rows without keys
    check_on_every_target(Instance(c));
  }
}

TEST(Edge, Row43_SinksFarAboveAndBelowTheScores) {
  for (const double sink : {-200.0, 60.0, 1e4, -1e30}) {
    Instance x(sink_case());
    x.sinks.fill(sink);
    check_on_every_target(x);
  }
}

TEST(Edge, SinkOfMinusInfinityChangesNoBit) {
  Case c = sink_case();
  Instance with(c);
  with.sinks.fill(-kInfinity);
  c.sinks = false;
  const Instance without(c);
  for_each_target([&](const std::string&) {
    const Both a = with.run_both();
    const Both b = without.run_both();
    EXPECT_EQ(a.results.o.element_bytes(), b.results.o.element_bytes());
    EXPECT_EQ(a.results.lse.element_bytes(), b.results.lse.element_bytes());
    EXPECT_EQ(a.gradients.dk.element_bytes(), b.gradients.dk.element_bytes());
    for (const double gradient : a.gradients.d_sinks.values()) EXPECT_EQ(gradient, 0.0);
  });
}

TEST(Edge, RowsWithoutKeysHaveTheSinkAsLse) {
  Case c = sink_case();
  c.s_q = 65;
  c.s_k = 37;
  c.options.mask.causal = true;
  const Instance x(c);
  for_each_target([&](const std::string&) {
    const Both r = x.run_both();
    for (std::int64_t i = 0; i < 28; ++i) {
      EXPECT_EQ(r.results.lse.at({1, 4, i}), x.sinks.at({4}));
      EXPECT_EQ(r.results.o.at({1, i, 4, 5}), 0.0);
      EXPECT_EQ(r.gradients.dq.at({1, i, 4, 5}), 0.0);
    }
  });
}

TEST(Edge, NonFiniteSinksGiveNanRows) {
  for (const double sink : {kNan, kInfinity}) {
    Case c = sink_case();
    c.d_lse = false;
    Instance x(c);
    x.sinks.set({2}, sink);
    x.sinks.freeze();
    for_each_target([&](const std::string&) {
      Results r = x.make_results(DType::f32);
      x.forward(r, {.backend = Backend::cpu});
      for (std::int64_t h = 0; h < c.h_q(); ++h) {
        EXPECT_EQ(std::isnan(r.o.at({0, 5, h, 0})), h == 2) << sink;
        EXPECT_EQ(std::isnan(r.lse.at({0, h, 5})), h == 2) << sink;
      }
    });
  }
}

// A sink joins once, however the keys are split, inside (decode) and by the caller.
TEST(Edge, SinksJoinOnceWhereKeysAreSplit) {
  Case c = sink_case();
  c.b = 1;
  c.s_q = 1;
  c.s_k = 5000;
  const Instance x(c);
  Results probe = x.make_results(DType::f32);
  const auto planned = plan(make_problem(x.tensors(probe), c.options), {.backend = Backend::cpu});
  ASSERT_TRUE(planned.ok());
  ASSERT_GT(planned->info().splits, 1);
  check_on_every_target(x);
}

TEST(Merge, AddsTheSinkOnce) {
  Case c = sink_case();
  c.d_lse = false;
  const Instance x(c);
  const Expected expected(x, false);
  for_each_target([&](const std::string& target) {
    std::vector<Results> parts;
    std::vector<Partial> views;
    for (const std::int64_t first : {0, 20, 20, 64}) {  // the second is empty
      const std::int64_t last =
          first == 0 ? 20 : (first == 64 ? 65 : (parts.size() == 1 ? 20 : 64));
      Results part = x.make_results(DType::f32);
      ForwardTensors t = x.tensors(part);
      t.sinks = {};
      for (ConstTensor* keys : {&t.k, &t.v}) {
        keys->data = static_cast<const float*>(keys->data) + first * keys->stride[1];
        keys->shape[1] = last - first;
      }
      ASSERT_TRUE(forward(t, {}, {.backend = Backend::cpu}).ok());
      parts.push_back(std::move(part));
    }
    for (Results& part : parts) views.push_back({part.o.in(), part.lse.in()});
    Results merged = x.make_results(DType::f32);
    const Status s = merge(views, merged.o.out(), merged.lse.out(), x.sinks.in());
    ASSERT_TRUE(s.ok()) << to_string(s.error());
    check_forward(x, merged, expected, target);
  });
}

TEST(Merge, NoPartsButASink) {
  Buffer o(DType::f32, {1, 2, 3, 4});
  Buffer lse(DType::f32, {1, 3, 2});
  Buffer sinks(DType::f32, {3});
  sinks.fill({1.5, -kInfinity, -2.0});
  ASSERT_TRUE(merge({}, o.out(), lse.out(), sinks.in()).ok());
  for (const double value : o.values()) EXPECT_EQ(value, 0.0);
  EXPECT_EQ(lse.values(), (std::vector<double>{1.5, 1.5, -kInfinity, -kInfinity, -2.0, -2.0}));
}

TEST(Edge, KeysPastTheirLengthAreNeitherReadNorLeftUnwritten) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Case c;
    c.dtype = c.o_dtype = c.grad_dtype = dtype;
    c.b = 5;
    c.h_k = 2;
    c.group = 2;
    c.s_q = 30;
    c.s_k = 300;
    c.key_lengths = {300, 0, 1, 97, 256};  // NaN beyond
    c.options.mask.causal = true;
    const Instance x(c);
    check_on_every_target(x);
    for_each_target([&](const std::string&) {
      const Both r = x.run_both();
      r.gradients.dk.for_each([&](const auto& i, std::int64_t) {
        if (i[1] < c.len_k(i[0])) return;
        EXPECT_EQ(r.gradients.dk.at(i), 0.0);
        EXPECT_EQ(r.gradients.dv.at(i), 0.0);
      });
    });
  }
}

TEST(Edge, KeyLengthsOfADecodeStep) {
  Case c;
  c.b = 3;
  c.h_k = 2;
  c.group = 4;
  c.s_q = 1;
  c.s_k = 4096;
  c.key_lengths = {4096, 7, 1000};
  check_on_every_target(Instance(c));
  c.options.mask.window = {127, 0};
  check_on_every_target(Instance(c));
}

}  // namespace
}  // namespace abacist::testing
