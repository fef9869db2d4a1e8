// The same bits on every run, with any number of threads, any workspace content, and under
// concurrency.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "support/bounds.hpp"
#include "support/case.hpp"
#include "support/environment.hpp"

namespace abacist::testing {
namespace {

struct Bits {
  std::vector<std::byte> o, lse, dq, dk, dv, d_bias, d_sinks;
  bool operator==(const Bits&) const = default;
};

Bits bits_of(const Both& both) {
  return {both.results.o.element_bytes(),        both.results.lse.element_bytes(),
          both.gradients.dq.element_bytes(),     both.gradients.dk.element_bytes(),
          both.gradients.dv.element_bytes(),     both.gradients.d_bias.element_bytes(),
          both.gradients.d_sinks.element_bytes()};
}

Bits run(const Instance& x, int threads) {
  return bits_of(x.run_both({.backend = Backend::cpu, .threads = threads}));
}

void expect_equal(const Bits& a, const Bits& b, const std::string& what) {
  EXPECT_EQ(a.o, b.o) << "O, " << what;
  EXPECT_EQ(a.lse, b.lse) << "LSE, " << what;
  EXPECT_EQ(a.dq, b.dq) << "dQ, " << what;
  EXPECT_EQ(a.dk, b.dk) << "dK, " << what;
  EXPECT_EQ(a.dv, b.dv) << "dV, " << what;
  EXPECT_EQ(a.d_bias, b.d_bias) << "dBias, " << what;
  EXPECT_EQ(a.d_sinks, b.d_sinks) << "dSinks, " << what;
}

std::vector<std::pair<const char*, Case>> cases() {
  const std::int64_t s = by_effort<std::int64_t>(150, 500, 2000);
  Case dense{.b = 2, .h_k = 2, .group = 2, .s_q = s, .s_k = s, .d_qk = 64, .d_v = 64};
  dense.options.mask.causal = true;
  dense.d_lse = true;
  Case one_head{.s_q = s, .s_k = 2 * s, .d_qk = 32, .d_v = 48};
  one_head.alibi_rank = 1;
  Case decode{.h_k = 2, .group = 4, .s_q = 1, .s_k = 20 * s, .d_qk = 64, .d_v = 64};
  Case varlen{.h_k = 1, .group = 3, .d_qk = 40, .d_v = 24};
  varlen.lens_q = {1, s, 0, s / 3, 17};
  varlen.lens_k = {s, s / 2, 5, 0, 33};
  varlen.options.mask.window = {100, 30};
  Case split_varlen{.d_qk = 16, .d_v = 16};
  split_varlen.lens_q = {2, 1};
  split_varlen.lens_k = {10 * s, 3};
  // Gradients that heads, sequences and rows add to: items of several threads take turns.
  Case shared_bias{.b = 3, .h_k = 2, .group = 2, .s_q = s / 2, .s_k = s, .d_qk = 16, .d_v = 16};
  shared_bias.bias = {.present = true, .b = false, .h = false};
  shared_bias.sinks = true;
  Case row_bias = shared_bias;
  row_bias.bias = {.present = true, .b = false, .h = true, .s = false};
  Case split_rows = shared_bias;  // heads of a query row in two row tiles
  split_rows.b = 2;
  split_rows.group = 7;
  split_rows.s_q = s / 4;
  Case varlen_bias = varlen;
  varlen_bias.bias = shared_bias.bias;
  varlen_bias.sinks = true;
  return {{"dense", dense},       {"shared bias", shared_bias}, {"split rows", split_rows},
          {"row bias", row_bias}, {"varlen bias", varlen_bias}, {"one head", one_head},
          {"decode", decode},     {"varlen", varlen},           {"split varlen", split_varlen}};
}

TEST(Repeat, SameBitsForEveryThreadCountAndRun) {
  for (auto [name, c] : cases()) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      c.dtype = c.o_dtype = dtype;
      c.grad_dtype = DType::f32;  // dQ, dK, dV before any rounding
      const Instance x(c);
      for_each_target([&, label = std::string(name)](const std::string& target) {
        const Bits first = run(x, 1);
        // The types differ in packing and storing alone; f32 gets the runs.
        const int rounds = dtype == DType::f32 ? by_effort(1, 3, 20) : by_effort(1, 1, 5);
        const bool few = dtype != DType::f32 && effort() == Effort::reduced;
        for (int round = 0; round < rounds; ++round) {
          for (const int threads : few ? std::vector{3} : std::vector{1, 2, 3, 8}) {
            expect_equal(run(x, threads), first,
                         target + " " + label + " " + to_string(dtype) + " with " +
                             std::to_string(threads) + " threads, round " + std::to_string(round));
          }
        }
      });
      if (HasFailure()) return;
    }
  }
}

TEST(Repeat, ThreadsOfTheCallersArenaGiveTheSameBits) {
  for (const auto& [name, c] : cases()) {
    const Instance x(c);
    expect_equal(run(x, 0), run(x, 1), name);
  }
}

TEST(Repeat, ReferenceToo) {
  Case c{.b = 2, .h_k = 3, .group = 2, .s_q = 20, .s_k = 30};
  const Instance x(c);
  const Bits first = bits_of(x.run_both({.backend = Backend::reference, .threads = 1}));
  for (const int threads : {2, 3, 8}) {
    expect_equal(bits_of(x.run_both({.backend = Backend::reference, .threads = threads})), first,
                 std::to_string(threads) + " threads");
  }
}

/// A plan's workspace with one byte value everywhere.
class FilledWorkspace {
 public:
  FilledWorkspace(std::size_t bytes, std::byte value)
      : memory_(bytes + kWorkspaceAlignment, value) {
    void* data = memory_.data();
    std::size_t space = memory_.size();
    std::align(kWorkspaceAlignment, bytes, data, space);
    workspace_ = {data, bytes};
  }
  RunOptions options() const { return {.workspace = workspace_}; }

 private:
  std::vector<std::byte> memory_;
  Workspace workspace_{};
};

TEST(Repeat, WorkspaceContentDoesNotMatter) {
  for (const auto& [name, c] : cases()) {
    const Instance x(c);
    Both both = x.run_both();
    const Bits first = bits_of(both);
    const auto forward_plan =
        plan(make_problem(x.tensors(both.results), x.c.options), {.backend = Backend::cpu});
    const auto backward_plan =
        plan(make_problem(x.tensors(std::as_const(both.results), both.gradients), x.c.options),
             {.backend = Backend::cpu});
    ASSERT_TRUE(forward_plan.ok() && backward_plan.ok());
    FilledWorkspace reused(
        std::max(forward_plan->info().workspace_bytes, backward_plan->info().workspace_bytes),
        std::byte{0x55});
    for (int round = 0; round < 3; ++round) {  // what a run leaves behind must not disturb the next
      Both again{x.make_results(c.o_dtype), x.make_gradients(c.grad_dtype)};
      ASSERT_TRUE(forward_plan->run(x.tensors(again.results), reused.options()).ok());
      ASSERT_TRUE(
          backward_plan
              ->run(x.tensors(std::as_const(again.results), again.gradients), reused.options())
              .ok());
      expect_equal(bits_of(again), first, std::string(name) + " round " + std::to_string(round));
    }
  }
}

// Edge case 46: many threads at once, through one plan and through one-line calls, all shapes
// mixed.
TEST(Concurrency, CallsFromManyThreadsDoNotDisturbEachOther) {
  std::vector<Instance> instances;
  std::vector<Bits> expected;
  for (auto [name, c] : cases()) {
    if (effort() != Effort::full) {
      c.s_q = std::min<std::int64_t>(c.s_q, 150);
      c.s_k = std::min<std::int64_t>(c.s_k, 1500);
      for (auto* lens : {&c.lens_q, &c.lens_k}) {
        for (std::int64_t& len : *lens) len = std::min<std::int64_t>(len, 300);
      }
    }
    instances.emplace_back(c);
    expected.push_back(run(instances.back(), 2));
  }
  constexpr int kThreads = 8;
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < by_effort(2, 5, 40); ++round) {
        const std::size_t n = static_cast<std::size_t>(t + round) % instances.size();
        const Instance& x = instances[n];
        Both both{x.make_results(x.c.o_dtype), x.make_gradients(x.c.grad_dtype)};
        const PlanOptions options{.backend = Backend::cpu, .threads = 1 + t % 3};
        const bool ok =
            forward(x.tensors(both.results), x.c.options, options).ok() &&
            backward(x.tensors(std::as_const(both.results), both.gradients), x.c.options, options)
                .ok();
        if (!ok || !(bits_of(both) == expected[n])) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Concurrency, OnePlanManyRuns) {
  Case c{.h_k = 2, .s_q = 150, .s_k = 300, .d_qk = 32, .d_v = 32};
  const Instance x(c);
  Results first = x.make_results(DType::f32);
  x.forward(first, {.backend = Backend::cpu});
  const auto planned =
      plan(make_problem(x.tensors(first), c.options), {.backend = Backend::cpu, .threads = 2});
  ASSERT_TRUE(planned.ok());
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < 5; ++round) {
        FilledWorkspace workspace(planned->info().workspace_bytes, std::byte{0xff});
        Results r = x.make_results(DType::f32);
        const Plan copy = planned.value();
        if (!copy.run(x.tensors(r), workspace.options()).ok() ||
            r.o.element_bytes() != first.o.element_bytes()) {
          ++wrong;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Progress, ReachesOneAndStaysInRange) {
  Case c{.b = 2, .h_k = 2, .s_q = 300, .s_k = 300};
  const Instance x(c);
  struct Seen {
    std::atomic<double> most = 0.0;
    std::atomic<bool> outside = false;
  };
  const auto hook = [](double done, void* context) {
    auto& s = *static_cast<Seen*>(context);
    if (!(done >= 0.0 && done <= 1.0)) s.outside = true;
    double most = s.most;
    while (done > most && !s.most.compare_exchange_weak(most, done)) {
    }
  };
  Both both{x.make_results(DType::f32), x.make_gradients(DType::f32)};
  Seen forward_seen;
  ASSERT_TRUE(forward(x.tensors(both.results), c.options, {.backend = Backend::cpu},
                      {.progress = hook, .progress_context = &forward_seen})
                  .ok());
  Seen backward_seen;
  ASSERT_TRUE(backward(x.tensors(std::as_const(both.results), both.gradients), c.options,
                       {.backend = Backend::cpu},
                       {.progress = hook, .progress_context = &backward_seen})
                  .ok());
  for (const Seen* seen : {&forward_seen, &backward_seen}) {
    EXPECT_EQ(seen->most, 1.0);
    EXPECT_FALSE(seen->outside);
  }
}

}  // namespace
}  // namespace abacist::testing
