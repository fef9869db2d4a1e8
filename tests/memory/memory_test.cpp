// Peak memory of long problems: inputs + outputs + 64 MiB. Each runs in a process of its own.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <vector>

#include "abacist/abacist.hpp"
#include "support/environment.hpp"
#include "support/random.hpp"

namespace abacist::testing {
namespace {

constexpr std::int64_t kAllowance = std::int64_t{64} << 20;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

struct Job {
  std::int64_t s_q = 0, s_k = 0, d = 0;
  bool with_backward = false;
  bool causal = false;
};

std::int64_t peak_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return std::int64_t{usage.ru_maxrss} * 1024;
}

/// One head of random numbers.
std::vector<float> numbers(std::int64_t rows, std::int64_t d, std::uint64_t stream) {
  Random random(stream);
  std::vector<float> values(static_cast<std::size_t>(rows * d));
  for (float& value : values) value = static_cast<float>(2.0 * random.uniform() - 1.0);
  return values;
}

/// What a child process reports.
struct Report {
  bool ok = false;
  std::int64_t operand_bytes = 0;
  std::int64_t before = 0;  ///< peak before anything was allocated
  std::int64_t peak = 0;
  double seconds = 0.0;
  double flops = 0.0;
};

Report measure(const Job& job) {
  Report report;
  report.before = peak_bytes();
  const auto clock_start = std::chrono::steady_clock::now();
  const std::int64_t d = job.d;
  const auto spec_q = contiguous(DType::f32, {1, job.s_q, 1, d});
  const auto spec_k = contiguous(DType::f32, {1, job.s_k, 1, d});
  const auto spec_lse = contiguous(DType::f32, {1, 1, job.s_q});
  auto q = numbers(job.s_q, d, 1);
  auto k = numbers(job.s_k, d, 2);
  auto v = numbers(job.s_k, d, 3);
  std::vector<float> o(q.size());
  std::vector<float> lse(static_cast<std::size_t>(job.s_q));
  report.operand_bytes = static_cast<std::int64_t>(
      sizeof(float) * (q.size() + k.size() + v.size() + o.size() + lse.size()));
  const Options options{.mask = {.causal = job.causal}};
  const ForwardTensors tensors{.q = {q.data(), spec_q},
                               .k = {k.data(), spec_k},
                               .v = {v.data(), spec_k},
                               .o = {o.data(), spec_q},
                               .lse = {lse.data(), spec_lse}};
  const auto planned = plan(make_problem(tensors, options));
  if (!planned.ok()) return report;
  report.flops = static_cast<double>(planned->info().flops.value);
  report.ok = forward(tensors, options).ok();
  if (report.ok && job.with_backward) {
    auto d_o = numbers(job.s_q, d, 4);
    std::vector<float> dq(q.size());
    std::vector<float> dk(k.size());
    std::vector<float> dv(v.size());
    report.operand_bytes +=
        static_cast<std::int64_t>(sizeof(float) * (d_o.size() + dq.size() + dk.size() + dv.size()));
    report.ok = backward({.q = tensors.q,
                          .k = tensors.k,
                          .v = tensors.v,
                          .o = tensors.o,
                          .lse = tensors.lse,
                          .d_o = {d_o.data(), spec_q},
                          .dq = {dq.data(), spec_q},
                          .dk = {dk.data(), spec_k},
                          .dv = {dv.data(), spec_k}},
                         options)
                    .ok();
  }
  report.peak = peak_bytes();
  report.seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - clock_start).count();
  return report;
}

/// In a child process, so that no other test's memory counts and the library starts afresh.
Report measure_apart(const Job& job) {
  int ends[2];
  if (pipe(ends) != 0) return {};
  const pid_t child = fork();
  if (child == 0) {
    const Report report = measure(job);
    const auto written = write(ends[1], &report, sizeof report);
    _exit(written == sizeof report ? 0 : 1);
  }
  close(ends[1]);
  Report report;
  if (read(ends[0], &report, sizeof report) != sizeof report) report = {};
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return report;
}

void expect_bounded(const Job& job) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer's own memory would be counted";
  const Report r = measure_apart(job);
  ASSERT_TRUE(r.ok);
  const std::int64_t extra = r.peak - r.before - r.operand_bytes;
  std::printf(
      "  %lld x %lld d %lld: %.1f s, operands %.1f MiB, extra %.1f MiB; scores would take "
      "%.0f MiB\n",
      static_cast<long long>(job.s_q), static_cast<long long>(job.s_k),
      static_cast<long long>(job.d), r.seconds, static_cast<double>(r.operand_bytes) / 1048576.0,
      static_cast<double>(extra) / 1048576.0,
      static_cast<double>(job.s_q) * static_cast<double>(job.s_k) * 4.0 / 1048576.0);
  EXPECT_LE(extra, kAllowance);
  // The measurement sees what was allocated, or it proves nothing.
  EXPECT_GE(r.peak - r.before, r.operand_bytes / 2);
}

TEST(Memory, ForwardOf100000Keys) {
  const std::int64_t keys = by_effort<std::int64_t>(20'000, 100'000, 100'000);
  expect_bounded({.s_q = by_effort<std::int64_t>(500, 4'000, 100'000), .s_k = keys, .d = 64});
}

TEST(Memory, DecodeOverAMillionKeys) {
  expect_bounded({.s_q = 1, .s_k = by_effort<std::int64_t>(50'000, 1'000'000, 1'000'000), .d = 64});
}

TEST(Memory, CausalForwardOfManyQueries) {
  const std::int64_t s = by_effort<std::int64_t>(2'000, 8'000, 100'000);
  expect_bounded({.s_q = s, .s_k = s, .d = 64, .causal = true});
}

TEST(Memory, BackwardOf100000Keys) {
  const std::int64_t keys = by_effort<std::int64_t>(20'000, 100'000, 100'000);
  expect_bounded({.s_q = by_effort<std::int64_t>(200, 1'000, 10'000),
                  .s_k = keys,
                  .d = 64,
                  .with_backward = true});
}

TEST(Memory, BackwardOf100000Queries) {
  const std::int64_t queries = by_effort<std::int64_t>(20'000, 100'000, 100'000);
  expect_bounded({.s_q = queries,
                  .s_k = by_effort<std::int64_t>(200, 1'000, 10'000),
                  .d = 64,
                  .with_backward = true});
}

}  // namespace
}  // namespace abacist::testing
