// Every allocation of every call fails once: the call says so, in C and in C++, without an
// exception, a leak (AddressSanitizer), or, where it fails before the computation, a written byte.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "abacist/abacist.h"
#include "abacist/attention.hpp"

namespace {

/// Allocations of this thread until one fails; negative: none fails. The library's worker threads
/// are oneTBB's, whose own allocations are not what is tested.
thread_local std::int64_t allocations_left = -1;
thread_local bool has_failed = false;

bool allocation_fails() {
  if (allocations_left < 0) return false;
  if (allocations_left-- > 0) return false;
  has_failed = true;
  return true;
}

void* allocate(std::size_t bytes) {
  void* const memory = allocation_fails() ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// Not inlined: GCC takes free() of what it knows operator new to have returned for a mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes) { return allocate(bytes); }
[[gnu::noinline]] void* operator new[](std::size_t bytes) { return allocate(bytes); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

// The linker sends the library's calls here (--wrap).
extern "C" void* __real_aligned_alloc(std::size_t alignment, std::size_t bytes);
extern "C" void* __wrap_aligned_alloc(std::size_t alignment, std::size_t bytes) {
  return allocation_fails() ? nullptr : __real_aligned_alloc(alignment, bytes);
}

namespace {

constexpr std::int64_t kB = 2, kS = 40, kH = 2, kD = 16;
constexpr std::size_t kCount = kB * kS * kH * kD;

/// A problem for C with memory of its own.
struct Problem {
  std::vector<float> q, k, v, o, lse, d_o, dq, dk, dv;
  abacist_tensors forward{}, backward{};

  Problem()
      : q(kCount, 0.5f), k(q), v(q), o(kCount), lse(kB * kH * kS), d_o(q), dq(o), dk(o), dv(o) {
    const std::int64_t shape[] = {kB, kS, kH, kD};
    const std::int64_t lse_shape[] = {kB, kH, kS};
    const auto dense = [&](std::vector<float>& x) {
      return abacist_contiguous(x.data(), ABACIST_F32, 4, shape);
    };
    forward.struct_size = sizeof forward;
    forward.q = dense(q);
    forward.k = dense(k);
    forward.v = dense(v);
    forward.o = dense(o);
    forward.lse = abacist_contiguous(lse.data(), ABACIST_F32, 3, lse_shape);
    backward = forward;
    backward.d_o = dense(d_o);
    backward.dq = dense(dq);
    backward.dk = dense(dk);
    backward.dv = dense(dv);
  }
};

/// Runs a call with its first, second, ... allocation failing, until none fails. The call returns
/// ABACIST_OK or what went wrong.
int fail_each(const std::function<abacist_status()>& call) {
  for (int n = 0; n < 10'000; ++n) {
    has_failed = false;
    allocations_left = n;
    const abacist_status status = call();
    allocations_left = -1;
    if (!has_failed) {
      EXPECT_EQ(status, ABACIST_OK) << abacist_last_error();
      return n;
    }
    EXPECT_EQ(status, ABACIST_OUT_OF_MEMORY) << "allocation " << n << ": " << abacist_last_error();
    if (status != ABACIST_OUT_OF_MEMORY) return n;
  }
  ADD_FAILURE() << "never ran out of allocations";
  return 0;
}

/// The same for C++.
int fail_each_cxx(const std::function<abacist::Status()>& call) {
  return fail_each([&] {
    const abacist::Status status = call();
    if (status) return ABACIST_OK;
    return status.error().code == abacist::ErrorCode::out_of_memory ? ABACIST_OUT_OF_MEMORY
                                                                    : ABACIST_INTERNAL_ERROR;
  });
}

class Allocation : public testing::Test {
 protected:
  void SetUp() override {
    // oneTBB and Highway set themselves up once.
    ASSERT_EQ(abacist_forward(&x_.forward, nullptr, nullptr, nullptr), ABACIST_OK);
    ASSERT_EQ(abacist_backward(&x_.backward, nullptr, nullptr, nullptr), ABACIST_OK);
    x_.o.assign(kCount, 0.0f);
    one_thread_.struct_size = sizeof one_thread_;
    one_thread_.threads = 1;
  }
  bool o_is_untouched() const {
    return std::all_of(x_.o.begin(), x_.o.end(), [](float value) { return value == 0.0f; });
  }

  Problem x_;
  abacist_plan_options one_thread_{};
};

TEST_F(Allocation, PlansOfC) {
  const int allocations = fail_each([&] {
    abacist_plan* plan = nullptr;
    const auto status =
        abacist_plan_create(ABACIST_FORWARD, &x_.forward, nullptr, &one_thread_, &plan);
    EXPECT_EQ(plan != nullptr, status == ABACIST_OK);
    abacist_plan_destroy(plan);
    return status;
  });
  EXPECT_GT(allocations, 1);
}

TEST_F(Allocation, ForwardOfC) {
  const int allocations = fail_each([&] {
    const auto status = abacist_forward(&x_.forward, nullptr, &one_thread_, nullptr);
    EXPECT_EQ(status != ABACIST_OK, o_is_untouched());
    return status;
  });
  EXPECT_GT(allocations, 2);
}

TEST_F(Allocation, BackwardOfC) {
  EXPECT_GT(
      fail_each([&] { return abacist_backward(&x_.backward, nullptr, &one_thread_, nullptr); }), 2);
}

TEST_F(Allocation, ReferenceOfC) {
  abacist_plan_options reference = one_thread_;
  reference.backend = ABACIST_BACKEND_REFERENCE;
  EXPECT_GT(fail_each([&] { return abacist_forward(&x_.forward, nullptr, &reference, nullptr); }),
            1);
  EXPECT_GT(fail_each([&] { return abacist_backward(&x_.backward, nullptr, &reference, nullptr); }),
            1);
}

TEST_F(Allocation, OnTwoThreads) {
  abacist_plan_options two = one_thread_;
  two.threads = 2;
  fail_each([&] { return abacist_forward(&x_.forward, nullptr, &two, nullptr); });
  fail_each([&] { return abacist_backward(&x_.backward, nullptr, &two, nullptr); });
}

TEST_F(Allocation, KeysThatAreSplitAndMerged) {
  // One query over many keys: partial results, merged.
  const std::int64_t q_shape[] = {1, 1, 1, kD}, k_shape[] = {1, 20'000, 1, kD};
  std::vector<float> k(20'000 * kD, 0.25f), v(k);
  abacist_tensors t{};
  t.struct_size = sizeof t;
  t.q = abacist_contiguous(x_.q.data(), ABACIST_F32, 4, q_shape);
  t.k = abacist_contiguous(k.data(), ABACIST_F32, 4, k_shape);
  t.v = abacist_contiguous(v.data(), ABACIST_F32, 4, k_shape);
  t.o = abacist_contiguous(x_.o.data(), ABACIST_F32, 4, q_shape);
  fail_each([&] { return abacist_forward(&t, nullptr, &one_thread_, nullptr); });
  EXPECT_EQ(x_.o[0], 0.25f);
}

TEST_F(Allocation, MergeValidateExplainOfC) {
  std::vector<float> o(kCount), lse(x_.lse.size());
  abacist_tensors into{};
  into.struct_size = sizeof into;
  into.o = x_.forward.o;
  into.o.data = o.data();
  into.lse = x_.forward.lse;
  into.lse.data = lse.data();
  const abacist_partial parts[] = {{x_.forward.o, x_.forward.lse}, {x_.forward.o, x_.forward.lse}};
  EXPECT_GT(fail_each([&] { return abacist_merge(parts, 2, &into); }), 1);
  fail_each([&] { return abacist_validate(ABACIST_FORWARD, &x_.forward, nullptr); });
  abacist_plan* plan = nullptr;
  ASSERT_EQ(abacist_plan_create(ABACIST_FORWARD, &x_.forward, nullptr, nullptr, &plan), ABACIST_OK);
  char text[64];
  EXPECT_GT(fail_each([&] { return abacist_plan_explain(plan, text, sizeof text, nullptr); }), 1);
  abacist_plan_destroy(plan);
}

TEST_F(Allocation, ErrorsThemselvesNeedMemory) {
  // An error whose message cannot be made is an out_of_memory error; else it is the error.
  x_.forward.q.shape[3] = 7;
  for (int n = 0; n < 100; ++n) {
    has_failed = false;
    allocations_left = n;
    const auto status = abacist_forward(&x_.forward, nullptr, nullptr, nullptr);
    allocations_left = -1;
    EXPECT_EQ(status, has_failed ? ABACIST_OUT_OF_MEMORY : ABACIST_INVALID_ARGUMENT);
    EXPECT_NE(std::string(abacist_last_error()), "");
    if (!has_failed) return;
  }
  ADD_FAILURE() << "never ran out of allocations";
}

TEST_F(Allocation, CallsOfCxx) {
  const auto spec = abacist::contiguous(abacist::DType::f32, {kB, kS, kH, kD});
  const auto lse_spec = abacist::contiguous(abacist::DType::f32, {kB, kH, kS});
  const abacist::ForwardTensors t{.q = {x_.q.data(), spec},
                                  .k = {x_.k.data(), spec},
                                  .v = {x_.v.data(), spec},
                                  .o = {x_.o.data(), spec},
                                  .lse = {x_.lse.data(), lse_spec}};
  const abacist::BackwardTensors gradients{.q = t.q,
                                           .k = t.k,
                                           .v = t.v,
                                           .o = t.o,
                                           .lse = t.lse,
                                           .d_o = {x_.d_o.data(), spec},
                                           .dq = {x_.dq.data(), spec},
                                           .dk = {x_.dk.data(), spec},
                                           .dv = {x_.dv.data(), spec}};
  const abacist::PlanOptions one{.threads = 1};
  EXPECT_GT(fail_each_cxx([&] { return abacist::forward(t, {}, one); }), 2);
  EXPECT_GT(fail_each_cxx([&] { return abacist::backward(gradients, {}, one); }), 2);
  fail_each_cxx([&] { return abacist::validate(make_problem(t)); });
  std::vector<float> merged(kCount);
  const abacist::Partial part{t.o, t.lse};
  EXPECT_GT(fail_each_cxx([&] { return abacist::merge({&part, 1}, {merged.data(), spec}); }), 1);
  const auto plan = abacist::plan(make_problem(t));
  ASSERT_TRUE(plan.ok());
  std::vector<std::byte> memory(plan->info().workspace_bytes + 256);
  void* aligned = memory.data();
  std::size_t space = memory.size();
  std::align(256, plan->info().workspace_bytes, aligned, space);
  const abacist::RunOptions run{.workspace = {aligned, plan->info().workspace_bytes}};
  EXPECT_GT(fail_each_cxx([&] { return plan->run(t, run); }), 1);
  EXPECT_GT(fail_each_cxx([&]() -> abacist::Status {
              auto planned = abacist::plan(make_problem(t));
              if (!planned) return planned.error();
              return {};
            }),
            1);
  for (int n = 0; n < 3; ++n) {
    allocations_left = n;
    const std::string text = abacist::explain(*plan);
    allocations_left = -1;
    EXPECT_EQ(text, "");
  }
}

}  // namespace
