// What plans say: figures against brute force, choices, forcing by the environment.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "abacist/abacist.hpp"
#include "support/case.hpp"
#include "support/environment.hpp"

namespace abacist::testing {
namespace {

std::int64_t count_pairs(const Case& c) {
  const Mask& mask = c.options.mask;
  const std::int64_t shift = mask.align == Align::top_left ? 0 : c.s_k - c.s_q;
  std::int64_t pairs = 0;
  for (std::int64_t i = 0; i < c.s_q; ++i) {
    for (std::int64_t j = 0; j < c.s_k; ++j) {
      const std::int64_t d = j - i - shift;
      const bool visible = (!mask.causal || d <= 0) &&
                           (mask.window.left == kUnbounded || -d <= mask.window.left) &&
                           (mask.window.right == kUnbounded || d <= mask.window.right);
      pairs += visible ? 1 : 0;
    }
  }
  return pairs * c.b * c.h_q();
}

Case random_case(Random& random) {
  Case c;
  c.b = random.integer(0, 3);
  c.h_k = random.integer(1, 2);
  c.group = random.integer(1, 3);
  c.s_q = random.integer(0, 70);
  c.s_k = random.integer(0, 70);
  c.d_qk = random.integer(1, 9);
  c.d_v = random.integer(1, 9);
  const auto side = [&] { return random.chance(0.5) ? kUnbounded : random.integer(0, 20); };
  c.options.mask = {random.chance(0.5),
                    {side(), side()},
                    random.chance(0.5) ? Align::bottom_right : Align::top_left};
  return c;
}

Result<Plan> plan_forward(const Case& c, const PlanOptions& options) {
  const Instance x(c);
  Results r = x.make_results(c.o_dtype);
  return plan(make_problem(x.tensors(r), x.c.options), options);
}

Result<Plan> plan_backward(const Case& c, const PlanOptions& options) {
  const Instance x(c);
  const Results r = x.make_results(c.o_dtype);
  Gradients g = x.make_gradients(c.grad_dtype);
  return plan(make_problem(x.tensors(r, g), x.c.options), options);
}

TEST(PlanFigures, PairsAndFlopsAgreeWithBruteForce) {
  Random random(5);
  for (int round = 0; round < 400; ++round) {
    const Case c = random_case(random);
    const std::int64_t pairs = count_pairs(c);
    for (const Backend backend : {Backend::cpu, Backend::reference}) {
      const auto f = plan_forward(c, {.backend = backend});
      ASSERT_TRUE(f.ok()) << to_string(f.error()) << c.text();
      EXPECT_TRUE(f->info().visible_pairs.exact);
      EXPECT_EQ(f->info().visible_pairs.value, pairs) << f->info().kernel << " " << c.text();
      EXPECT_EQ(f->info().flops.value, pairs * 2 * (c.d_qk + c.d_v));
      const auto b = plan_backward(c, {.backend = backend});
      ASSERT_TRUE(b.ok()) << to_string(b.error()) << c.text();
      EXPECT_EQ(b->info().visible_pairs.value, pairs) << b->info().kernel << " " << c.text();
      EXPECT_EQ(b->info().flops.value, pairs * 2 * (3 * c.d_qk + 2 * c.d_v));
    }
  }
}

TEST(PlanFigures, VarlenFiguresAreUpperBoundsAndSaySo) {
  Case c;
  c.lens_q = {5, 17, 0, 9};
  c.lens_k = {7, 11, 3, 0};
  std::int64_t pairs = 0;
  for (std::size_t n = 0; n < c.lens_q.size(); ++n) pairs += c.lens_q[n] * c.lens_k[n];
  for (const Backend backend : {Backend::cpu, Backend::reference}) {
    const auto planned = plan_forward(c, {.backend = backend});
    ASSERT_TRUE(planned.ok());
    EXPECT_FALSE(planned->info().visible_pairs.exact);
    EXPECT_FALSE(planned->info().flops.exact);
    EXPECT_GE(planned->info().visible_pairs.value, pairs);
    EXPECT_GE(planned->info().flops.value, pairs * 2 * (c.d_qk + c.d_v));
  }
}

TEST(PlanFigures, VarlenWindowWiderThanAnySequence) {
  Case c;
  c.lens_q = {5, 3};
  c.lens_k = {7, 4};
  c.options.mask.window = {kUnbounded - 1, kUnbounded};
  const auto planned = plan_forward(c, {.backend = Backend::cpu});
  ASSERT_TRUE(planned.ok());
  EXPECT_GE(planned->info().visible_pairs.value, 5 * 7 + 3 * 4);
}

TEST(PlanFigures, MemoryTrafficIsAtLeastOnceEachOperandAndBelowStandardWhenLong) {
  Case c;
  c.s_q = c.s_k = 2048;
  c.d_qk = c.d_v = 64;
  for (const bool backward : {false, true}) {
    const auto planned = backward ? plan_backward(c, {}) : plan_forward(c, {});
    ASSERT_TRUE(planned.ok()) << to_string(planned.error());
    const PlanInfo& info = planned->info();
    const std::int64_t operand = 2048 * 64 * 4;
    EXPECT_GE(info.slow_memory_bytes.value, 4 * operand);
    EXPECT_LT(info.slow_memory_bytes.value, info.standard_memory_bytes.value);
    EXPECT_GE(info.standard_memory_bytes.value, std::int64_t{2048} * 2048 * 4 * 4);
  }
}

TEST(PlanFigures, WorkspaceIsBoundedAndStatedPerThread) {
  Case c;
  c.s_q = c.s_k = 4096;
  c.d_qk = c.d_v = 64;
  const auto one = plan_forward(c, {.threads = 1});
  const auto eight = plan_forward(c, {.threads = 8});
  ASSERT_TRUE(one.ok() && eight.ok());
  EXPECT_EQ(one->info().scratch_bytes_per_thread, eight->info().scratch_bytes_per_thread);
  EXPECT_GE(eight->info().workspace_bytes, one->info().workspace_bytes);
  EXPECT_LE(one->info().scratch_bytes_per_thread, std::size_t{4} << 20);
  EXPECT_LE(eight->info().workspace_bytes, std::size_t{64} << 20);
}

TEST(PlanChoices, TilesAndSplitsDoNotDependOnThreads) {
  Random random(6);
  for (int round = 0; round < by_effort(5, 50, 50); ++round) {
    Case c = random_case(random);
    c.s_k = random.integer(0, 5000);
    const auto one = plan_forward(c, {.threads = 1});
    ASSERT_TRUE(one.ok());
    for (const int threads : {2, 3, 8, 64}) {
      const auto many = plan_forward(c, {.threads = threads});
      ASSERT_TRUE(many.ok());
      EXPECT_EQ(many->info().kernel, one->info().kernel);
      EXPECT_EQ(many->info().rows, one->info().rows);
      EXPECT_EQ(many->info().keys, one->info().keys);
      EXPECT_EQ(many->info().splits, one->info().splits);
    }
  }
}

TEST(PlanChoices, NoMoreThreadsThanPiecesOfWork) {
  constexpr int kMany = std::numeric_limits<int>::max();
  for (const auto& planned :
       {plan_forward({}, {.threads = kMany}), plan_backward({}, {.threads = kMany})}) {
    ASSERT_TRUE(planned.ok());
    EXPECT_LE(planned->info().threads, 4);
    EXPECT_LE(planned->info().workspace_bytes, std::size_t{4} << 20);
  }
}

TEST(PlanChoices, EveryPlanPromisesDeterminism) {
  Case c;
  EXPECT_TRUE(plan_forward(c, {})->info().deterministic);
  EXPECT_TRUE(plan_backward(c, {})->info().deterministic);
}

TEST(PlanChoices, ExplainNamesTheKernel) {
  for (const bool backward : {false, true}) {
    const auto planned = backward ? plan_backward({}, {}) : plan_forward({}, {});
    ASSERT_TRUE(planned.ok());
    EXPECT_NE(explain(planned.value()).find(planned.value().info().kernel), std::string::npos);
  }
}

TEST(PlanChoices, MixedTypesAreDeclinedWithTheReason) {
  Case c;
  Instance x(c);
  x.k = Buffer(DType::bf16, {1, 16, 1, 16});
  x.k.fill(0.5);
  Results r = x.make_results(DType::f32);
  const auto planned = plan(make_problem(x.tensors(r), c.options));
  ASSERT_FALSE(planned.ok());
  EXPECT_EQ(planned.error().code, ErrorCode::unsupported);
  EXPECT_NE(planned.error().message.find("bf16"), std::string::npos) << planned.error().message;
  EXPECT_TRUE(plan(make_problem(x.tensors(r), c.options), {.backend = Backend::reference}).ok());
}

TEST(Forcing, EachTargetOfTheMachine) {
  Case c;
  const auto targets = cpu_target_list();
  ASSERT_FALSE(targets.empty());
  for (const std::string& target : targets) {
    const ScopedEnvironment force("ABACIST_CPU_TARGET", target);
    const auto f = plan_forward(c, {});
    ASSERT_TRUE(f.ok()) << to_string(f.error());
    EXPECT_EQ(f->info().kernel, "cpu.forward." + target);
    const auto b = plan_backward(c, {});
    ASSERT_TRUE(b.ok()) << to_string(b.error());
    EXPECT_EQ(b->info().kernel, "cpu.backward." + target);
  }
  const ScopedEnvironment unforced("ABACIST_CPU_TARGET", "");
  EXPECT_EQ(plan_forward(c, {})->info().kernel, "cpu.forward." + targets.front());
}

TEST(Forcing, AnUnknownTargetIsAnError) {
  for (const char* bad : {"avx1024", "AVX2", "avx2,", " "}) {
    const ScopedEnvironment force("ABACIST_CPU_TARGET", bad);
    const auto planned = plan_forward({}, {});
    ASSERT_FALSE(planned.ok()) << bad;
    EXPECT_EQ(planned.error().argument, "ABACIST_CPU_TARGET");
    EXPECT_NE(planned.error().message.find(bad), std::string::npos) << planned.error().message;
  }
}

TEST(Forcing, BackendByEnvironment) {
  {
    const ScopedEnvironment force("ABACIST_BACKEND", "reference");
    EXPECT_EQ(plan_forward({}, {})->info().kernel, "reference");
    // What the caller forces stands.
    EXPECT_NE(plan_forward({}, {.backend = Backend::cpu})->info().kernel, "reference");
  }
  {
    const ScopedEnvironment force("ABACIST_BACKEND", "cpu");
    EXPECT_NE(plan_forward({}, {})->info().kernel, "reference");
    EXPECT_EQ(plan_forward({}, {.backend = Backend::reference})->info().kernel, "reference");
  }
  for (const char* none : {"", "automatic"}) {
    const ScopedEnvironment force("ABACIST_BACKEND", none);
    EXPECT_TRUE(plan_forward({}, {}).ok());
  }
  const ScopedEnvironment force("ABACIST_BACKEND", "gpu");
  const auto planned = plan_forward({}, {});
  ASSERT_FALSE(planned.ok());
  EXPECT_EQ(planned.error().argument, "ABACIST_BACKEND");
  EXPECT_NE(planned.error().message.find("\"gpu\""), std::string::npos);
}

TEST(Forcing, AForcedBackendThatCannotServeIsAnError) {
  Case c;
  c.dtype = DType::f64;
  const auto planned = plan_forward(c, {.backend = Backend::cpu});
  ASSERT_FALSE(planned.ok());
  EXPECT_EQ(planned.error().code, ErrorCode::unsupported);
  const ScopedEnvironment force("ABACIST_BACKEND", "cpu");
  EXPECT_FALSE(plan_forward(c, {}).ok());
}

// Sizes whose products pass 64 bits although the operands alone do not.
TEST(Plan, ProductsOfValidSizesDoNotOverflow) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  Problem p;
  Operands& x = p.operands;
  x.q = x.o = contiguous(DType::f32, {kMost, 1, 1, 4});
  x.k = x.v = contiguous(DType::f32, {1, kMost, 1, 4});
  const Status mismatch = validate(p);
  ASSERT_FALSE(mismatch.ok());
  EXPECT_EQ(mismatch.error().argument, "k");

  // f16, [total, h, d]: many heads of a group, short sequences of a long buffer.
  const auto varlen = [&](std::int64_t rows, std::int64_t h_q, std::int64_t d, MaxLengths most) {
    x.q = x.o = x.d_o = x.dq = contiguous(DType::f16, {rows, h_q, d});
    x.k = x.v = x.dk = x.dv = contiguous(DType::f16, {std::int64_t{1} << 20, 1, d});
    x.lse = contiguous(DType::f32, {h_q, rows});
    x.cu_seqlens_q = x.cu_seqlens_k = contiguous(DType::i32, {2});
    p.options.max_lengths = most;
  };
  const auto workspace_bytes = [&](Pass pass) {
    p.pass = pass;
    if (pass == Pass::forward) x.d_o = x.dq = x.dk = x.dv = {};
    const auto planned = plan(p, {.backend = Backend::cpu});
    EXPECT_TRUE(planned.ok());
    return planned.ok() ? planned->info().workspace_bytes : 0;
  };
  for (const Pass pass : {Pass::backward, Pass::forward}) {
    varlen(0, kMost, 1, {kMost, kMost});
    EXPECT_LT(workspace_bytes(pass), std::size_t{1} << 30);
  }
  varlen(kMost, 1 << 14, 16, {1, 1 << 20});
  EXPECT_GE(workspace_bytes(Pass::backward), std::size_t{1} << 60);
  x = {};
  x.q = x.o = x.d_o = x.dq = contiguous(DType::f16, {kMost, 1, 1 << 18, 1});
  x.k = x.v = x.dk = x.dv = x.q;
  x.lse = contiguous(DType::f32, {kMost, 1 << 18, 1});
  EXPECT_GE(workspace_bytes(Pass::backward), std::size_t{1} << 60);
}

}  // namespace
}  // namespace abacist::testing
