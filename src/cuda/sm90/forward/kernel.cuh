// Exact attention, forward, Hopper (sm_90a).
//
//   O = softmax(scale Q K^T + mask) V,  LSE = logsumexp      (FlashAttention-3, section 3, algorithm 2;
//   with the maximum frozen after the first key tile, softmax.cuh)
//
// What a block computes. Persistent: one block per SM takes query tiles of 64 * groups rows of one head
// until none is left (schedule.cuh), walking the visible key tiles from the first key upwards.
//
// Warp roles.
//   warpgroup 0 .. groups-1   64 query rows each: S = Q K^T (wgmma), softmax, O += P V (wgmma), P in registers
//   warpgroup groups          one thread: decides the next tile, loads Q, K, V by TMA; the rest idle
// Two overlaps: P V of the last tile is in flight during this tile's softmax; and warpgroups take turns
// in issuing GEMMs (named barriers), so that one's softmax runs under another's GEMMs. Without the
// turns the clock falls and a third of the speed is lost (main loop alone: 733 -> 550 TFLOP/s, d 128).
//
// Shared memory (SharedStorage): Q [rows, d_qk], K [stages][keys, d_qk], V [stages][keys, d_v], all in
// 128-byte swizzled panels of 64 columns (tile/descriptor.cuh); works[4], redo[4], barriers.
//
// Barriers.
//   k, v ring full[]   TMA bytes            consumers wait           k, v ring empty[]  one arrival per consumer warp
//   q_full             TMA bytes + works[]  consumers wait           q_empty            same; Q and works[] were read
//   tile_done          one arrival per consumer warp after the tile's stores and redo[] flag
//   named 1 + g        turn of warpgroup g to issue GEMMs            named 8 + g        V tail of warpgroup g zeroed
//
// Bytes per query tile and visible key tile: (d_qk + d_v) * 2 * keys from L2. FLOPs: 2 * rows * keys * (d_qk + d_v).
#pragma once
#include <cuda/ptx>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../ptx/sm90.cuh"
#include "../../ptx/wgmma.cuh"
#include "../../tile/descriptor.cuh"
#include "../../tile/pipeline.cuh"
#include "config.hpp"
#include "epilogue.cuh"
#include "params.cuh"
#include "schedule.cuh"
#include "softmax.cuh"

namespace abacist::cuda::sm90 {

inline constexpr int kWorkSlots = 4;  // a redo is decided at most three tiles later (see produce)

template <ForwardTile Tile>
struct SharedStorage {
  alignas(1024) char q[Tile.q_bytes()];
  alignas(1024) char k[Tile.stages][Tile.k_bytes()];
  alignas(1024) char v[Tile.stages][Tile.v_bytes()];
  tile::Ring<Tile.stages> k_ring, v_ring;
  uint64_t q_full, q_empty, tile_done;
  Work works[kWorkSlots];
  int redo[kWorkSlots];
};

template <int Panels>
__device__ __forceinline__ void load_panels(char* to, const CUtensorMap& map, int panel_bytes, int row, int head,
                                            int batch, uint64_t* full) {
#pragma unroll
  for (int panel = 0; panel < Panels; ++panel) {
    const int32_t at[4] = {panel * tile::kPanelColumns, row, head, batch};
    ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_cluster, ::cuda::ptx::space_global,
                                      to + panel * panel_bytes, &map, at, full);
  }
}

// The producer thread.
template <ForwardTile Tile>
__device__ __forceinline__ void produce(const ForwardParams& p, SharedStorage<Tile>& shared) {
  tile::RingPosition<Tile.stages> k_at, v_at;
  TileOrder order(p);
  int issued = 0;

  int row = 0, kv_head = 0, kv_batch = 0;  // where the next K tile starts; few registers: it has 32
  auto load_k = [&] {
    shared.k_ring.begin_fill(k_at, Tile.k_bytes());
    load_panels<Tile.qk_panels()>(shared.k[k_at.stage], p.k_map, Tile.keys * 128, row, kv_head, kv_batch,
                                  &shared.k_ring.full[k_at.stage]);
    k_at.advance();
    row += Tile.keys;
  };
  auto load_v = [&](int v_row) {
    shared.v_ring.begin_fill(v_at, Tile.v_bytes());
    load_panels<Tile.v_panels()>(shared.v[v_at.stage], p.v_map, Tile.keys * 128, v_row, kv_head, kv_batch,
                                 &shared.v_ring.full[v_at.stage]);
    v_at.advance();
  };
  auto wait_q_empty = [&] { tile::wait_barrier(&shared.q_empty, (issued & 1) ^ 1); };
  // A tile whose frozen maximum overflowed, among tiles [from, to); -1 if none.
  auto take_redo = [&](int from, int to) {
    for (int i = max(from, 0); i < to; ++i) {
      volatile int& flag = shared.redo[i % kWorkSlots];
      if (flag) {
        flag = 0;
        return i % kWorkSlots;
      }
    }
    return -1;
  };

  for (;; ++issued) {
    // q_empty of tile issued - 2 has been waited for, hence tile issued - 3 is finished: its redo flag
    // is final, and its slot is not the one about to be overwritten.
    int again = take_redo(issued - 3, issued - 2);
    Work w;
    bool found = false;
    if (again < 0) {
      while (!found && order.next < p.tile_count) found = describe_tile<Tile>(p, order.take(p), w);
      if (!found && issued > 0) {  // none left: wait for the verdicts that are still open
        wait_q_empty();
        tile::wait_barrier(&shared.tile_done, (issued - 1) & 1);
        again = take_redo(issued - 3, issued);
      }
    }
    if (again >= 0) {
      w = shared.works[again];
      w.mode = Work::redo;
      w.full_begin = w.full_end = 0;
      found = true;
    }
    if (!found) {
      w.mode = Work::stop;
      w.begin = w.end = 0;
    }
    int tiles = w.end - w.begin;
    row = w.k_offset + w.begin * Tile.keys;
    kv_head = w.head / p.heads_per_kv_head;
    kv_batch = p.cu_seqlens_k ? 0 : w.batch;
    if (tiles > 0) load_k();
    wait_q_empty();
    shared.works[issued % kWorkSlots] = w;
    shared.redo[issued % kWorkSlots] = 0;
    if (tiles > 0) {
      ::cuda::ptx::mbarrier_arrive_expect_tx(::cuda::ptx::sem_release, ::cuda::ptx::scope_cta,
                                             ::cuda::ptx::space_shared, &shared.q_full, Tile.q_bytes());
      for (int group = 0; group < Tile.groups; ++group) {
        load_panels<Tile.qk_panels()>(shared.q + group * 64 * Tile.qk_panels() * 128, p.q_map, 64 * 128,
                                      w.q_offset + w.row0 + group * 64, w.head, p.cu_seqlens_q ? 0 : w.batch,
                                      &shared.q_full);
      }
    } else {
      tile::arrive_barrier(&shared.q_full);
    }
    if (!found) return;
    if (tiles > 0) {
      while (--tiles > 0) {
        load_k();
        load_v(row - 2 * Tile.keys);
      }
      load_v(row - Tile.keys);
    }
  }
}

// One consumer warpgroup.
template <ForwardTile Tile, class Element>
__device__ __forceinline__ void consume(const ForwardParams& p, SharedStorage<Tile>& shared) {
  constexpr int kKeys = Tile.keys;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // uniform, else descriptors cost registers
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint32_t q_address = __cvta_generic_to_shared(shared.q) + group * 64 * Tile.qk_panels() * 128;
  const tile::Descriptor q_base(q_address);
  const tile::Descriptor k_base(uint32_t(__cvta_generic_to_shared(shared.k[0])));
  const tile::Descriptor v_base(uint32_t(__cvta_generic_to_shared(shared.v[0])), kKeys * 128);
  const float scale_log2 = p.scale_log2;

  float s[kKeys / 2];                                   // [64, keys] over the warpgroup
  float o[Tile.d_v / 2];                                // [64, d_v]
  uint32_t probability[kKeys / 16][4];                  // P as A fragments
  uint32_t q_fragments[Tile.q_registers ? Tile.d_qk / 16 : 1][4];
  tile::RingPosition<Tile.stages> k_at, v_at;

  auto my_turn = [&] { ptx::named_barrier_sync<256>(1 + group); };
  auto next_turn = [&] { ptx::named_barrier_arrive<256>(1 + (group + 1 == Tile.groups ? 0 : group + 1)); };
  auto issue_qk = [&] {
    const uint32_t k = k_at.stage * Tile.k_bytes();
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile.d_qk / 16; ++step) {
      const uint64_t b = k_base.at(k + tile::k_major_step_bytes(step, kKeys));
      if constexpr (Tile.q_registers) {
        ptx::wgmma_rs<Element, 0>(s, q_fragments[step], b, step);
      } else {
        ptx::wgmma_ss<Element, 0>(s, q_base.at(tile::k_major_step_bytes(step, 64)), b, step);
      }
    }
    ptx::wgmma_commit();
  };
  auto issue_pv = [&] {
    const uint32_t v = v_at.stage * Tile.v_bytes();
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      ptx::wgmma_rs<Element, 1>(o, probability[step], v_base.at(v + tile::mn_major_step_bytes(step)), 1);
    }
    ptx::wgmma_commit();
  };
  auto pack_probability = [&] {
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) probability[i][j] = ptx::pack<Element>(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
    }
  };

  if (group == Tile.groups - 1) ptx::named_barrier_arrive<256>(1);  // the first turn is group 0's
  for (int tile_index = 0;; ++tile_index) {
    tile::wait_barrier(&shared.q_full, tile_index & 1);
    const Work w = shared.works[tile_index % kWorkSlots];
    if (w.mode == Work::stop) return;
    const MaskRule rule(p, w);
    const int row = w.row0 + group * 64 + warp * 16 + lane / 4;  // and row + 8
    RowState state{-INFINITY, -INFINITY, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < Tile.d_v / 2; ++i) o[i] = 0.0f;

    auto mask = [&](int n) {
      if (n >= w.full_begin && n < w.full_end) return;
      const int column0 = n * kKeys + 2 * (lane % 4);
      mask_scores(s, rule.row_begin(row) - column0, rule.row_end(row) - column0,
                  rule.row_begin(row + 8) - column0, rule.row_end(row + 8) - column0);
    };
    // Rows of V past the sequence's end hold anything, NaN included, and 0 * NaN is NaN. TMA writes
    // zeros past the tensor only. Every warpgroup clears them for itself: the same zeros.
    auto clear_v_tail = [&](int n) {
      const int valid = w.len_k - n * kKeys;
      if (valid >= kKeys) return;
      char* v = shared.v[v_at.stage];
      for (int i = threadIdx.x % 128; i < (kKeys - valid) * Tile.v_panels() * 8; i += 128) {
        const int r = valid + i / (Tile.v_panels() * 8), chunk = i % (Tile.v_panels() * 8);
        *reinterpret_cast<uint4*>(v + (chunk / 8) * kKeys * 128 + r * 128 + (chunk % 8) * 16) = uint4{};
      }
      ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
      ptx::named_barrier_sync<128>(8 + group);
    };

    if (w.begin < w.end) {
      if constexpr (Tile.q_registers) {
#pragma unroll
        for (int step = 0; step < Tile.d_qk / 16; ++step) {
          const int r = warp * 16 + lane % 16, chunk = step * 2 + lane / 16;
          ptx::ldmatrix_x4(q_fragments[step],
                           q_address + (chunk / 8) * 8192 + r * 128 + ((chunk % 8) ^ (r % 8)) * 16);
        }
        if (lane == 0) tile::arrive_barrier(&shared.q_empty);
      }
      float a0, a1;
      shared.k_ring.wait_full(k_at);
      my_turn();
      issue_qk();
      next_turn();
      ptx::wgmma_wait<0>();
      ptx::hold_registers(s);
      shared.k_ring.release(k_at);
      k_at.advance();
      mask(w.begin);
      softmax_online(s, state, scale_log2, true, a0, a1);
      pack_probability();

      // One key tile: Q K^T of tile n and P V of tile n - 1 in flight, softmax of n under the latter.
      auto begin_step = [&](int n) {
        shared.k_ring.wait_full(k_at);
        my_turn();
        issue_qk();
        shared.v_ring.wait_full(v_at);
        issue_pv();
        next_turn();
        ptx::wgmma_wait<1>();
        ptx::hold_registers(s);
        shared.k_ring.release(k_at);
        k_at.advance();
      };
      auto end_step = [&] {
        ptx::wgmma_wait<0>();
        ptx::hold_registers(o);
        shared.v_ring.release(v_at);
        v_at.advance();
      };
      for (int n = w.begin + 1; n < w.end;) {
        if (n >= w.full_begin && n < w.full_end) {
          do {
            float t0, t1;
            begin_step(n);
            softmax_frozen(s, state, scale_log2, t0, t1);
            state.l0 += t0;
            state.l1 += t1;
            const bool raise = __any_sync(0xffffffffu, fmaxf(t0, t1) > kRaiseThreshold<Element>);
            // This branch also keeps ptxas from moving the wait for P V up into the exponentials.
            if (raise) raise_rows<Element>(s, state, t0, t1, a0, a1);
            end_step();
            if (raise) scale_rows(o, a0, a1);
            pack_probability();
          } while (++n < w.full_end);
        } else {
          begin_step(n);
          mask(n);
          softmax_online(s, state, scale_log2, false, a0, a1);
          end_step();
          scale_rows(o, a0, a1);
          pack_probability();
          ++n;
        }
      }
      if constexpr (!Tile.q_registers) {
        if (lane == 0) tile::arrive_barrier(&shared.q_empty);
      }
      shared.v_ring.wait_full(v_at);
      clear_v_tail(w.end - 1);
      my_turn();
      issue_pv();
      next_turn();
      end_step();
    } else if (lane == 0) {
      tile::arrive_barrier(&shared.q_empty);
    }

    const bool bad = finish_rows<Tile, Element>(p, w, rule, row, lane, o, state);
    if (w.mode == Work::normal && w.full_begin < w.full_end && __any_sync(0xffffffffu, bad) && lane == 0) {
      *static_cast<volatile int*>(&shared.redo[tile_index % kWorkSlots]) = 1;
    }
    __syncwarp();
    if (lane == 0) tile::arrive_barrier(&shared.tile_done);
  }
}

// (The shape itself as a template argument of a __global__ function breaks nvcc 13.0's host stub.)
template <int DQk, int DV, class Element>
__global__ void __launch_bounds__(forward_tile(DQk, DV).threads(), 1)
    forward_kernel(const __grid_constant__ ForwardParams p) {
  constexpr ForwardTile Tile = forward_tile(DQk, DV);
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Tile>*>(shared_bytes);
  if (threadIdx.x == 0) {
    constexpr int kWarps = Tile.groups * 4;
    shared.k_ring.initialise(kWarps);
    shared.v_ring.initialise(kWarps);
    ::cuda::ptx::mbarrier_init(&shared.q_full, 1);
    ::cuda::ptx::mbarrier_init(&shared.q_empty, kWarps);
    ::cuda::ptx::mbarrier_init(&shared.tile_done, kWarps);
    for (int& flag : shared.redo) flag = 0;
    ::cuda::ptx::fence_mbarrier_init(::cuda::ptx::sem_release, ::cuda::ptx::scope_cluster);
  }
  __syncthreads();
  if (threadIdx.x / 128 == Tile.groups) {
    ptx::setmaxnreg_decrease<Tile.producer_registers()>();
    if (threadIdx.x == Tile.groups * 128) produce<Tile>(p, shared);
  } else {
    ptx::setmaxnreg_increase<Tile.consumer_registers()>();
    consume<Tile, Element>(p, shared);
  }
}

}  // namespace abacist::cuda::sm90
