// Problems on a GPU, and their plans, without one.
#pragma once

#include <gtest/gtest.h>

#include "api/validate.hpp"
#include "cuda/backend/plan.hpp"

namespace abacist::testing {

inline const Device kGpu{DeviceType::cuda, 0};

inline cuda::DeviceFacts h200() {
  return {.index = 0, .name = "NVIDIA H200", .capability = 90, .multiprocessors = 132};
}

/// A problem that the kernel takes: bf16 [2, 380, 8 / 2, 128].
inline Problem good() {
  Problem p;
  Operands& x = p.operands;
  x.q = contiguous(DType::bf16, {2, 380, 8, 128}, kGpu);
  x.k = contiguous(DType::bf16, {2, 500, 2, 128}, kGpu);
  x.v = contiguous(DType::bf16, {2, 500, 2, 128}, kGpu);
  x.o = x.q;
  x.lse = contiguous(DType::f32, {2, 8, 380}, kGpu);
  return p;
}

inline Result<core::Draft> plan_of(const Problem& problem,
                                   const cuda::DeviceFacts& device = h200()) {
  const auto resolved = api::resolve(problem);
  if (!resolved) {
    ADD_FAILURE() << "not a valid problem: " << to_string(resolved.error());
    return resolved.error();
  }
  return cuda::plan_on(resolved.value(), device);
}

}  // namespace abacist::testing
