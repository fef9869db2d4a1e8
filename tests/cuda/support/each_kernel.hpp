// Tests that every kernel of the forward pass takes in turn.
#pragma once

#include "cuda/support/gpu.hpp"
#include "cuda/support/kernels.hpp"
#include "support/bounds.hpp"

namespace abacist::testing {

/// TEST_P in any file; the kernels are bound to it in gpu_kernels_test.cpp.
class GpuKernels : public GpuTest, public ::testing::WithParamInterface<Kernel> {
 protected:
  const FewMultiprocessors few_{GetParam().multiprocessors};

  static Case base(DType dtype = DType::bf16) {
    const Kernel& kernel = GetParam();
    return {.b = 2,
            .h_k = 2,
            .group = kernel.group,
            .s_q = kernel.s_q,
            .s_k = kernel.s_k,
            .d_qk = kernel.d,
            .d_v = kernel.d,
            .dtype = dtype,
            .o_dtype = dtype};
  }

  /// Three sequences of nearly the lengths that the kernel is chosen for.
  static Case varlen(DType dtype = DType::bf16) {
    Case c = base(dtype);
    c.lens_q = {c.s_q, c.s_q - 1, (c.s_q + 1) / 2};
    c.lens_k = {c.s_k, c.s_k - 3, (c.s_k + 1) / 2};
    return c;
  }

  /// Poisoned outputs after a run of the kernel that is meant.
  static Results run(const Instance& x) {
    Results results = gpu_results(x);
    const GpuForward gpu(x, results);
    const auto planned = plan(make_problem(gpu.tensors(), x.c.options));
    EXPECT_TRUE(planned.ok()) << (planned ? "" : to_string(planned.error()));
    if (!planned) return results;
    const std::string& kernel = planned->info().kernel;
    EXPECT_TRUE(is_kernel(kernel, GetParam().ending)) << kernel;
    const Status status = run_on_gpu(x, results);
    EXPECT_TRUE(status.ok()) << to_string(status.error()) << "\n" << x.c.text();
    return results;
  }

  static void check(const Instance& x) {
    const Results results = run(x);
    check_forward(x, results, Expected(x, false), GetParam().name);
  }
};

}  // namespace abacist::testing
