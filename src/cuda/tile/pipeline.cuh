// mbarriers and rings of shared-memory stages between a producer thread and consumer warps.
#pragma once
#include <cuda/ptx>

#include <cstdint>

#include "../ptx/sm90.cuh"

namespace abacist::cuda::tile {

__device__ __forceinline__ void wait_barrier(uint64_t* barrier, uint32_t parity) {
  ptx::test_delay();
  while (!::cuda::ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}
__device__ __forceinline__ void arrive_barrier(uint64_t* barrier) {
  ::cuda::ptx::mbarrier_arrive(barrier);
}

// Position in a ring of Stages: `stage` and the parity of the current trip around it.
template <int Stages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if constexpr (Stages == 1) {
      parity ^= 1;
    } else if constexpr (Stages == 2) {
      parity ^= stage;
      stage ^= 1;
    } else if (++stage == Stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// full: one arrival with a byte count (the producer); empty: one arrival per consumer warp.
template <int Stages>
struct Ring {
  uint64_t full[Stages];
  uint64_t empty[Stages];

  __device__ void initialise(int consumer_warps) {
    for (int i = 0; i < Stages; ++i) {
      ::cuda::ptx::mbarrier_init(&full[i], 1);
      ::cuda::ptx::mbarrier_init(&empty[i], consumer_warps);
    }
  }
  __device__ __forceinline__ void begin_fill(RingPosition<Stages> at, uint32_t bytes) {
    wait_barrier(&empty[at.stage], at.parity ^ 1);
    ::cuda::ptx::mbarrier_arrive_expect_tx(::cuda::ptx::sem_release, ::cuda::ptx::scope_cta,
                                           ::cuda::ptx::space_shared, &full[at.stage], bytes);
  }
  __device__ __forceinline__ void wait_full(RingPosition<Stages> at) {
    wait_barrier(&full[at.stage], at.parity);
  }
  // Whether it is full already. Several of these ahead of their waits cost one latency, not
  // several.
  __device__ __forceinline__ bool is_full(RingPosition<Stages> at) {
    return ::cuda::ptx::mbarrier_test_wait_parity(&full[at.stage], at.parity);
  }
  __device__ __forceinline__ void release(RingPosition<Stages> at) {
    ptx::test_delay();
    if (threadIdx.x % 32 == 0) arrive_barrier(&empty[at.stage]);
  }
};

}  // namespace abacist::cuda::tile
