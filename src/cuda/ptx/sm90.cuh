// One function per PTX instruction that the kernels need and cuda::ptx of the toolkit lacks.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace abacist::cuda::ptx {

// Moves registers between the warpgroups of a block (Count: a multiple of 8; all 4 warps call it).
template <int Count>
__device__ __forceinline__ void setmaxnreg_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void setmaxnreg_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

// Test builds (ABACIST_TEST_DELAYS) stop warps here and there for up to a microsecond, to bring out
// orders of events that timing otherwise hides.
__device__ __forceinline__ void test_delay() {
#ifdef ABACIST_TEST_DELAYS
  const uint32_t hash = (uint32_t(clock64()) ^ threadIdx.x / 32 * 0x9E3779B9u) * 0x85EBCA6Bu;
  if (hash >> 29 == 0) __nanosleep(hash >> 10 & 1023);
#endif
}

// threadIdx.x, read again: the compiler does not keep it, or what follows from it, in a register.
__device__ __forceinline__ int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Named barriers 1..15 (0 is __syncthreads). arrive does not wait.
template <int Threads>
__device__ __forceinline__ void named_barrier_sync(int barrier) {
  test_delay();
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(Threads) : "memory");
}
template <int Threads>
__device__ __forceinline__ void named_barrier_arrive(int barrier) {
  test_delay();
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(Threads) : "memory");
}

// 2^x within 2 ulp; denormals flush to 0, ex2(-inf) = 0, NaN stays NaN.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two f32 to one packed pair, `low` in the low half.
template <class Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t r;
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  }
  return r;
}

// Four 8x8 matrices of 16-bit elements; lane l gives the row address l%8 of matrix l/8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Four 8x8 matrices of 16-bit elements to shared memory; addresses as for ldmatrix_x4.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                            uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Programmatic dependent launch: the next kernel of the stream may start its prologue; ours waits
// here until everything before it in the stream is complete and visible.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void wait_for_prerequisites() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Fetches a tensor map ahead of its first use.
__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace abacist::cuda::ptx
