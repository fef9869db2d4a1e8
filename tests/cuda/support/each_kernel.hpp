// Kernels of the forward pass on a GPU (d 96 and 192/128 aside), a problem that each serves, and
// tests that each takes in turn.
#pragma once

#include <array>
#include <cstdint>

#include "cuda/support/gpu.hpp"
#include "support/bounds.hpp"

namespace abacist::testing {

/// Lengths, and heads of a group, for which the plan takes a certain kernel.
struct Kernel {
  const char* name;
  const char* ending;  ///< of the kernel's name in the plan
  std::int64_t group, s_q, s_k;
  std::int64_t d;
  int multiprocessors = 0;  ///< 0: all
};

inline constexpr Kernel kKernels[] = {{"tiled64", "", 1, 150, 300, 64},
                                      {"split64", ".split", 1, 150, 2100, 64},
                                      {"tiled64long", "", 1, 150, 2100, 64, 2},
                                      {"tiled256long", "", 1, 20, 4200, 256, 2},
                                      {"tiled128", "", 1, 150, 300, 128},
                                      {"tiled192", "", 1, 130, 250, 192},
                                      {"tiled256", "", 1, 130, 200, 256},
                                      {"split256", ".split", 1, 20, 4200, 256},
                                      {"split128", ".split", 1, 3, 3000, 128},
                                      {"packedsplit64", ".packed.split", 8, 3, 2500, 64},
                                      {"packedsplit128", ".packed.split", 7, 5, 2100, 128},
                                      {"packedsplit192", ".packed.split", 4, 8, 1800, 192},
                                      {"packed64", ".packed", 4, 6, 300, 64},
                                      {"packed128", ".packed", 7, 5, 400, 128},
                                      {"packed192", ".packed", 4, 8, 250, 192},
                                      {"packed256", ".packed", 12, 3, 200, 256},
                                      {"short64", ".short", 2, 40, 60, 64},
                                      {"short128", ".short", 3, 20, 45, 128}};

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

/// Where the LSE of an element of O is.
inline std::array<std::int64_t, kMaxRank> lse_index(
    const Case& c, const std::array<std::int64_t, kMaxRank>& of_o) {
  if (c.varlen()) return {of_o[1], of_o[0]};
  return {of_o[0], of_o[2], of_o[1]};
}

}  // namespace abacist::testing
