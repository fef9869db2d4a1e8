// Warpgroup matrix multiply (sm_90a): d[64, N] (+)= a[64, 16] · b[16, N], f32 accumulators in
// registers. A group is: wgmma_fence, any number of wgmma, wgmma_commit; wgmma_wait<n> leaves n
// groups in flight. Registers of a group in flight must not be touched. The compiler does not know
// when they are written, so hold_registers after the wait keeps every use of them behind it.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace abacist::cuda::ptx {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int InFlight>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(InFlight) : "memory");
}
template <int N>
__device__ __forceinline__ void hold_registers(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#include "wgmma.inc"  // from generate_wgmma.py, in the build folder

}  // namespace abacist::cuda::ptx
