// Exact attention, forward, Hopper (sm_90a).
//
//   O = softmax(scale Q K^T + mask) V,  LSE = logsumexp
//   (FlashAttention-3, section 3, algorithm 2; with the maximum frozen after the first key tile,
//   softmax.cuh; instances with Modified apply softcap and ALiBi, score.cuh)
//
// What a block computes. Persistent: one block per SM takes query tiles of 64 * groups rows of one
// head, or, with few queries, of all heads of a group (RowPlace), until none is left
// (schedule.cuh), walking the visible key tiles from the first key upwards.
//
// Warp roles.
//   warpgroup 0 .. groups-1   (consumer.cuh) 64 query rows each: S = Q K^T by wgmma, softmax,
//                             O += P V by wgmma, P in registers
//   warpgroup groups          (producer.cuh) one thread: decides the next tile, loads Q, K, V by
//                             TMA; the rest idle
// Two overlaps: P V of the last tile is in flight during this tile's softmax; and warpgroups take
// turns in issuing GEMMs (named barriers), so that one's softmax runs under another's GEMMs.
// Without the turns the clock falls and a quarter of the speed is lost (main loop alone, d 128:
// 733 -> 550 TFLOP/s).
//
// Shared memory (shared.cuh): Q [rows, d_qk], K [stages][keys, d_qk], V [stages][keys, d_v], O
// [rows, d_v], all in 128-byte swizzled panels of 64 columns (tile/descriptor.cuh); works[8],
// redo[8], barriers.
//
// Barriers.
//   q, k, v ring full[]    TMA bytes, for q also works[]; the consumers wait
//   q, k, v ring empty[]   one arrival per consumer warp; the producer waits. q's answer to a flush
//                          also says that every tile is stored and every redo[] flag set
//   named 1 + g            turn of warpgroup g to issue GEMMs
//   named 8 + g            warpgroup g has zeroed the tail of V
//
// Bytes per query tile and visible key tile: (d_qk + d_v) * 2 * keys, from L2 mostly.
// FLOPs: 2 * rows * keys * (d_qk + d_v).
#pragma once
#include <cuda/ptx>

#include "consumer.cuh"
#include "producer.cuh"

namespace abacist::cuda::sm90 {

// (The shape itself as a template argument of a __global__ function breaks nvcc 13.0's host stub.)
template <int Shape, class Element, bool Modified, bool Splits>
__global__ void __launch_bounds__(kForwardTiles[Shape].threads(), 1)
    forward_kernel(const __grid_constant__ ForwardParams p) {
  constexpr ForwardTile Tile = kForwardTiles[Shape].with(Modified, Splits);
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Tile>*>(shared_bytes);
  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&p.q_map, &p.k_map, &p.v_map}) ptx::prefetch_tensor_map(map);
    constexpr int kWarps = Tile.groups * 4;
    shared.k_ring.initialise(kWarps);
    shared.v_ring.initialise(kWarps);
    shared.q_ring.initialise(kWarps);
    for (int& flag : shared.redo) flag = 0;
    ::cuda::ptx::fence_mbarrier_init(::cuda::ptx::sem_release, ::cuda::ptx::scope_cluster);
  }
  __syncthreads();
  if (threadIdx.x / 128 == Tile.groups) {
    ptx::setmaxnreg_decrease<Tile.producer_registers()>();
    if (threadIdx.x == Tile.groups * 128) produce<Tile>(p, shared);
  } else {
    ptx::setmaxnreg_increase<Tile.consumer_registers()>();
    ptx::wait_for_prerequisites();
    consume<Tile, Element, Modified>(p, shared);
  }
}

}  // namespace abacist::cuda::sm90
