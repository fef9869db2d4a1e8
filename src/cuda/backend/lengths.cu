// cu_seqlens in device memory: 0 first, ascending, no length over its maximum, the last one within
// the tensor. key_lengths: from 0 to the keys that there are. The attention kernel bounds every
// index by itself, so this only tells.
//
// One block: reads 4 (b + 1) bytes of each array.
#include <cuda_runtime.h>

#include "cuda/backend/lengths.hpp"

namespace abacist::cuda {
namespace {

constexpr int kThreads = 1024;

__device__ bool is_wrong(const std::int32_t* cu, std::int64_t b, std::int64_t total,
                         std::int64_t most) {
  if (cu == nullptr) return false;
  bool wrong = cu[0] != 0 || cu[b] > total;
#pragma unroll 4
  for (std::int64_t i = threadIdx.x; i < b; i += kThreads) {
    const std::int64_t length = std::int64_t{cu[i + 1]} - cu[i];
    wrong = wrong || length < 0 || length > most;
  }
  return wrong;
}

__device__ bool is_outside(const std::int32_t* lengths, std::int64_t b, std::int64_t most) {
  if (lengths == nullptr) return false;
  bool outside = false;
  for (std::int64_t i = threadIdx.x; i < b; i += kThreads) {
    outside = outside || lengths[i] < 0 || lengths[i] > most;
  }
  return outside;
}

__global__ void __launch_bounds__(kThreads) check_lengths(Lengths lengths, std::uint32_t* status) {
  const bool wrong_q = is_wrong(lengths.cu_q, lengths.b, lengths.total_q, lengths.most_q);
  const bool wrong_k = is_wrong(lengths.cu_k, lengths.b, lengths.total_k, lengths.most_k);
  const bool wrong_keys = is_outside(lengths.keys, lengths.b, lengths.most_k);
  std::uint32_t faults = __syncthreads_or(wrong_q) ? DeviceFault::cu_seqlens_q : 0;
  faults |= __syncthreads_or(wrong_k) ? DeviceFault::cu_seqlens_k : 0;
  faults |= __syncthreads_or(wrong_keys) ? DeviceFault::key_lengths : 0;
  if (threadIdx.x == 0) *status = faults;
}

}  // namespace

int load_length_check() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, check_lengths);
}

int enqueue_length_check(const Lengths& lengths, std::uint32_t* status, Stream stream) {
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(1);
  launch.blockDim = dim3(kThreads);
  launch.stream = stream;
  return cudaLaunchKernelEx(&launch, check_lengths, lengths, status);
}

}  // namespace abacist::cuda
