// Edge cases of dropout; numbers are rows of tests/edge_cases.md.
#include <gtest/gtest.h>

#include <cmath>

#include "core/dropout.hpp"
#include "support/bounds.hpp"
#include "support/case.hpp"
#include "support/environment.hpp"

namespace abacist::testing {
namespace {

Case dropout_case(double p) {
  Case c;
  c.b = 2;
  c.h_k = 2;
  c.group = 3;
  c.s_q = 50;
  c.s_k = 131;
  c.d_lse = true;
  c.options.dropout = {.p = p, .seed = 0x123456789abcdef0u};
  return c;
}

// Masks differed between the passes, and heads shared them.
TEST(Edge, Row35_EveryTypeMaskAndPass) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const double p : {0.3, 0.99}) {
      Case c = dropout_case(p);
      c.dtype = c.o_dtype = c.grad_dtype = dtype;
      check_on_every_target(Instance(c));
      c.options.mask.window = {37, 2};  // blocks that start at keys of any remainder
      c.options.score.softcap = 3.0;
      c.sinks = true;
      c.bias = {.present = true, .b = false};
      check_on_every_target(Instance(c));
    }
  }
}

/// Uniform scores and V = 1 for one key at a time would show M; here O = (M P / (1 - p)) I.
TEST(Edge, Row35_TheDroppedPairsAreThoseOfTheRule) {
  Case c = dropout_case(0.5);
  c.s_k = c.d_v = 67;
  c.options.score.scale = 0.0;
  c.d_lse = false;
  Instance x(c);
  x.v.for_each([&](const auto& i, std::int64_t) { x.v.set(i, i[1] == i[3] ? 1.0 : 0.0); });
  x.v.freeze();
  for_each_target([&](const std::string& target) {
    Results r = x.make_results(DType::f32);
    x.forward(r, {.backend = Backend::cpu});
    r.o.for_each([&](const auto& i, std::int64_t) {
      const core::DropoutRule rule = core::dropout_rule(c.options.dropout, c.h_q(), i[0], i[2]);
      ASSERT_EQ(r.o.at(i) != 0.0, rule.keeps(i[1], i[3])) << target;
    });
  });
}

TEST(Edge, Row35_VarlenSequencesDropWhatDenseOnesDo) {
  const Case c = dropout_case(0.4);
  const Instance dense(c);
  Case packed = c;
  packed.lens_q = {c.s_q, c.s_q};
  packed.lens_k = {c.s_k, c.s_k};
  Instance varlen(packed);
  varlen.q.fill(dense.q.values());
  varlen.k.fill(dense.k.values());
  varlen.v.fill(dense.v.values());
  varlen.d_o.fill(dense.d_o.values());
  const Results a = dense.reference_forward();
  const Results b = varlen.reference_forward();
  EXPECT_EQ(a.o.values(), b.o.values());
  check_on_every_target(varlen);
}

TEST(Edge, DropoutOfNothingAndOfAll) {
  const Instance none(dropout_case(0.0));
  Case plain_case = dropout_case(0.0);
  plain_case.options.dropout = {};
  const Instance plain(plain_case);
  const Instance all(dropout_case(1.0));
  check_on_every_target(all);
  for_each_target([&](const std::string& target) {
    const Both a = none.run_both();
    const Both b = plain.run_both();
    EXPECT_EQ(a.results.o.element_bytes(), b.results.o.element_bytes()) << target;
    EXPECT_EQ(a.gradients.dq.element_bytes(), b.gradients.dq.element_bytes()) << target;
    const Both c = all.run_both();
    for (const double value : c.results.o.values()) EXPECT_EQ(value, 0.0) << target;
    for (const double value : c.gradients.dv.values()) EXPECT_EQ(value, 0.0) << target;
    EXPECT_EQ(c.results.lse.element_bytes(), b.results.lse.element_bytes()) << target;
  });
}

TEST(Edge, DropoutLeavesLseAlone) {
  const Instance dropped(dropout_case(0.7));
  const Instance plain(dropout_case(0.0));
  for_each_target([&](const std::string&) {
    EXPECT_EQ(dropped.run_both().results.lse.element_bytes(),
              plain.run_both().results.lse.element_bytes());
  });
}

TEST(Edge, DropoutWhereKeysAreSplit) {
  Case c = dropout_case(0.3);
  c.s_q = 1;
  c.s_k = 6000;
  check_on_every_target(Instance(c));
}

}  // namespace
}  // namespace abacist::testing
