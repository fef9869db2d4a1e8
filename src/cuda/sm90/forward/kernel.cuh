// Exact attention, forward, Hopper (sm_90a).
//
//   O = softmax(scale Q K^T + mask) V,  LSE = logsumexp      (FlashAttention-3, section 3,
//   algorithm 2; with the maximum frozen after the first key tile, softmax.cuh)
//
// What a block computes. Persistent: one block per SM takes query tiles of 64 * groups rows of one
// head until none is left (schedule.cuh), walking the visible key tiles from the first key upwards.
//
// Warp roles.
//   warpgroup 0 .. groups-1   64 query rows each: S = Q K^T (wgmma), softmax, O += P V (wgmma), P
//   in registers warpgroup groups          one thread: decides the next tile, loads Q, K, V by TMA;
//   the rest idle
// Two overlaps: P V of the last tile is in flight during this tile's softmax; and warpgroups take
// turns in issuing GEMMs (named barriers), so that one's softmax runs under another's GEMMs.
// Without the turns the clock falls and a third of the speed is lost (main loop alone: 733 -> 550
// TFLOP/s, d 128).
//
// Shared memory (SharedStorage): Q [rows, d_qk], K [stages][keys, d_qk], V [stages][keys, d_v], all
// in 128-byte swizzled panels of 64 columns (tile/descriptor.cuh); works[8], redo[8], barriers.
//
// Barriers.
//   q, k, v ring full[]   TMA bytes (q: and works[])   consumers wait
//   q, k, v ring empty[]  one arrival per consumer warp   the producer waits; q's answer to a flush
//   also
//                         says that all tiles are stored and all redo[] flags are set
//   named 1 + g           turn of warpgroup g to issue GEMMs        named 8 + g   V tail of
//   warpgroup g zeroed
//
// Bytes per query tile and visible key tile: (d_qk + d_v) * 2 * keys from L2. FLOPs: 2 * rows *
// keys * (d_qk + d_v).
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

inline constexpr int kWorkSlots = 8;  // a power of two above kRedoDelay

// When q_empty of message i - 2 has been waited for, message i - 4 is finished and its verdict
// final.
inline constexpr int kRedoDelay = 4;

template <ForwardTile Tile>
struct SharedStorage {
  alignas(1024) char q[Tile.q_stages][Tile.q_bytes()];
  alignas(1024) char k[Tile.stages][Tile.k_bytes()];
  alignas(1024) char v[Tile.stages][Tile.v_bytes()];
  alignas(1024) char o[Tile.o_bytes() ? Tile.o_bytes() : 1];  // a part for each warp
  tile::Ring<Tile.q_stages> q_ring;
  tile::Ring<Tile.stages> k_ring, v_ring;
  Work works[kWorkSlots];
  int redo[kWorkSlots];
};

template <int Panels>
__device__ __forceinline__ void load_panels(char* to, const CUtensorMap& map, int panel_bytes,
                                            int row, int head, int batch, uint64_t* full) {
#pragma unroll
  for (int panel = 0; panel < Panels; ++panel) {
    const int32_t at[4] = {panel * tile::kPanelColumns, row, head, batch};
    ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_cluster, ::cuda::ptx::space_global,
                                      to + panel * panel_bytes, &map, at, full);
  }
}

// The producer thread. Every message to the consumers is a Work in works[] and a fill of the Q
// ring.
template <ForwardTile Tile>
__device__ __forceinline__ void produce(const ForwardParams& p, SharedStorage<Tile>& shared) {
  tile::RingPosition<Tile.q_stages> q_at;
  tile::RingPosition<Tile.stages> k_at, v_at;
  TileOrder order;

  int issued = 0;        // messages sent
  bool flushed = false;  // the last message was a flush and no redo came of it

  // K and V are two streams of tiles. V runs one tile behind K, also across query tiles: the next
  // query tile's first K is requested before this one's last V, whose buffer becomes free later.
  int k_row = 0, v_row = 0, kv_head = 0, kv_batch = 0, v_head = 0, v_batch = 0, tiles = 0;
  auto load_k = [&] {
    shared.k_ring.begin_fill(k_at, Tile.k_bytes());
    load_panels<Tile.qk_panels()>(shared.k[k_at.stage], p.k_map, Tile.keys * 128, k_row, kv_head,
                                  kv_batch, &shared.k_ring.full[k_at.stage]);
    k_at.advance();
    k_row += Tile.keys;
  };
  auto load_v = [&] {
    shared.v_ring.begin_fill(v_at, Tile.v_bytes());
    load_panels<Tile.v_panels()>(shared.v[v_at.stage], p.v_map, Tile.keys * 128, v_row, v_head,
                                 v_batch, &shared.v_ring.full[v_at.stage]);
    v_at.advance();
    v_row += Tile.keys;
  };
  // A message whose frozen maximum overflowed, among [from, to); its slot, or -1.
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
  // Writes the next message into its slot of works[], field by field: a Work in registers would
  // spill.
  auto select = [&] {
    Work& w = shared.works[issued % kWorkSlots];
    int again = take_redo(issued - kRedoDelay, issued - kRedoDelay + 1);
    if (again < 0 && flushed) {
      // Once all consumers have answered the flush, every verdict is final. Its stage of the Q ring
      // is the one before q_at.
      static_assert(Tile.q_stages == 1);
      tile::wait_barrier(&shared.q_ring.empty[0], q_at.parity ^ 1);
      again = take_redo(issued - kRedoDelay, issued);
      if (again < 0) w.mode = Work::stop;
    } else if (again < 0) {
      int all_head, index;
      bool found = false;
      while (!found && order.take(p, all_head, index))
        found = describe_tile<Tile>(p, all_head, index, w);
      if (!found) w.mode = Work::flush;
    }
    if (again >= 0) {
      w = shared.works[again];
      w.mode = Work::redo;
      w.frozen_begin = w.frozen_end = 0;
    }
    flushed = w.mode == Work::flush;
    if (w.mode >= Work::flush) w.begin = w.end = 0;
  };
  bool v_pending = false;
  // The first K of a message's tile (if it has any), then what is pending of V.
  auto begin_loads = [&](const Work& w) {
    tiles = w.end - w.begin;
    if (tiles > 0) {
      k_row = w.k_offset + w.begin * Tile.keys;
      kv_head = w.head / p.heads_per_kv_head;
      kv_batch = p.cu_seqlens_k ? 0 : w.batch;
      load_k();
    }
    if (v_pending) load_v();
    v_pending = tiles > 0;
    v_row = k_row - Tile.keys;
    v_head = kv_head;
    v_batch = kv_batch;
  };
  auto send = [&] {
    const Work& w = shared.works[issued % kWorkSlots];
    tile::wait_barrier(&shared.q_ring.empty[q_at.stage], q_at.parity ^ 1);
    shared.redo[issued % kWorkSlots] = 0;
    if (w.begin < w.end) {
      shared.q_ring.begin_fill(q_at, Tile.q_bytes());
      for (int group = 0; group < Tile.groups; ++group) {
        load_panels<Tile.qk_panels()>(shared.q[q_at.stage] + group * 64 * Tile.qk_panels() * 128,
                                      p.q_map, 64 * 128, w.q_offset + w.row0 + group * 64, w.head,
                                      p.cu_seqlens_q ? 0 : w.batch,
                                      &shared.q_ring.full[q_at.stage]);
      }
    } else {
      tile::arrive_barrier(&shared.q_ring.full[q_at.stage]);
    }
    q_at.advance();
    ++issued;
  };

  select();
  if constexpr (Tile.q_registers) {
    // Q's buffer is free as soon as the consumers have started on a tile: the next tile is chosen
    // and its Q requested a whole tile ahead, so that its latency is never seen.
    send();
    for (;;) {
      const Work& w = shared.works[(issued - 1) % kWorkSlots];
      if (w.mode == Work::stop) return;
      begin_loads(w);
      if (--tiles > 0) {
        load_k();
        load_v();
      }
      select();
      send();
      while (--tiles > 0) {
        load_k();
        load_v();
      }
    }
  } else {
    for (;;) {  // chosen a tile ahead, too, but Q's buffer is in use until the tile ends
      const Work& w = shared.works[issued % kWorkSlots];
      begin_loads(w);
      send();
      if (w.mode == Work::stop) return;
      if (--tiles > 0) {
        load_k();
        load_v();
      }
      select();
      while (--tiles > 0) {
        load_k();
        load_v();
      }
    }
  }
}

// The same in all lanes, and the compiler knows it: what steers loops around wgmma must be uniform,
// else ring positions and descriptors live in ordinary registers and every wgmma waits for their
// transfer.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// One consumer warpgroup. With chained tiles, the last P V of a query tile and its epilogue are
// left pending until the next tile's first Q K^T has been issued: the tensor cores do not drain in
// between.
template <ForwardTile Tile, class Element>
__device__ __forceinline__ void consume(const ForwardParams& p, SharedStorage<Tile>& shared) {
  constexpr int kKeys = Tile.keys;
  const int group = uniform(threadIdx.x / 128);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint32_t q_address =
      __cvta_generic_to_shared(shared.q[0]) + group * 64 * Tile.qk_panels() * 128;
  const tile::Descriptor q_base(q_address);
  const tile::Descriptor k_base(uint32_t(__cvta_generic_to_shared(shared.k[0])));
  const tile::Descriptor v_base(uint32_t(__cvta_generic_to_shared(shared.v[0])), kKeys * 128);
  const float scale_log2 = p.scale_log2;
  char* const staging = shared.o + (group * 4 + warp) * (Tile.o_bytes() / (Tile.groups * 4));

  float s[kKeys / 2];                        // [64, keys] over the warpgroup
  float o[Tile.d_v / 2];                     // [64, d_v]
  uint32_t probability[kKeys / 16][4] = {};  // P as A fragments
  uint32_t q_fragments[Tile.q_registers ? Tile.d_qk / 16 : 1][4];
  RowState state{};
  tile::RingPosition<Tile.q_stages> q_at;
  int key_tile = 0;  // number of the next K tile; the next V tile is the one before
  // The tile whose last P V and epilogue are still to do: its slot + kWorkSlots * the keys of the
  // sequence in its last V (in one register: a second would spill at d 128). -1: none.
  int pending = -1;
  int o_started =
      0;  // 0: the next P V overwrites o (writing zeros would need registers, see late_epilogue)

  static_assert(Tile.stages == 2);
  auto position = [](int number) {
    return tile::RingPosition<2>{number & 1, uint32_t(number >> 1 & 1)};
  };
  auto my_turn = [&] { ptx::named_barrier_sync<256>(1 + group); };
  auto next_turn = [&] {
    ptx::named_barrier_arrive<256>(1 + (group + 1 == Tile.groups ? 0 : group + 1));
  };
  auto issue_qk = [&] {
    const uint32_t q = q_at.stage * Tile.q_bytes(), k = (key_tile & 1) * Tile.k_bytes();
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile.d_qk / 16; ++step) {
      const uint64_t b = k_base.at(k + tile::k_major_step_bytes(step, kKeys));
      if constexpr (Tile.q_registers) {
        ptx::wgmma_rs<Element, 0>(s, q_fragments[step], b, step);
      } else {
        ptx::wgmma_ss<Element, 0>(s, q_base.at(q + tile::k_major_step_bytes(step, 64)), b, step);
      }
    }
    ptx::wgmma_commit();
  };
  // accumulate = 0: o starts here (no instruction but wgmma may write o while another group is in
  // flight).
  auto issue_pv = [&](int accumulate, int v_tile) {
    const uint32_t v = (v_tile & 1) * Tile.v_bytes();
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      ptx::wgmma_rs<Element, 1>(o, probability[step],
                                v_base.at(v + tile::mn_major_step_bytes(step)),
                                step == 0 ? accumulate : 1);
    }
    ptx::wgmma_commit();
  };
  auto pack_probability = [&] {
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        probability[i][j] = ptx::pack<Element>(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
    }
  };
  // Rows of V past the sequence's end hold anything, NaN included, and 0 * NaN is NaN. TMA writes
  // zeros past the tensor only. Every warpgroup clears them for itself: the same zeros.
  auto wait_last_v = [&] {
    shared.v_ring.wait_full(position(key_tile - 1));
    const int valid = pending / kWorkSlots;
    if (valid >= kKeys) return;
    char* v = shared.v[(key_tile - 1) & 1];
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < (kKeys - valid) * Tile.v_panels() * 8; i += 128) {
      const int r = valid + i / (Tile.v_panels() * 8), chunk = i % (Tile.v_panels() * 8);
      *reinterpret_cast<uint4*>(v + (chunk / 8) * kKeys * 128 + r * 128 + (chunk % 8) * 16) =
          uint4{};
    }
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
    ptx::named_barrier_sync<128>(8 + group);
  };
  auto first_row = [&](const Work& w) { return w.row0 + group * 64 + warp * 16 + lane / 4; };
  auto end_pending = [&] {
    const Work& w = shared.works[pending % kWorkSlots];
    return end_rows(p, w, first_row(w), lane, state);
  };
  auto store_pending = [&](int slot, const RowEnds& ends) {
    const Work w = shared.works[slot];
    const bool redo = store_rows<Tile, Element>(p, w, group, lane, o, ends, staging);
    if (__any_sync(0xffffffffu, redo) && lane == 0)
      *static_cast<volatile int*>(&shared.redo[slot]) = 1;
  };
  auto drain = [&] {  // the pending P V and epilogue, with nothing to overlap
    wait_last_v();
    my_turn();
    issue_pv(o_started, key_tile - 1);
    next_turn();
    const RowEnds ends = end_pending();
    ptx::wgmma_wait<0>();
    ptx::hold_registers(o);
    shared.v_ring.release(position(key_tile - 1));
    store_pending(pending % kWorkSlots, ends);
    pending = -1;
  };
  auto release_q = [&] {
    shared.q_ring.release(q_at);
    q_at.advance();
  };

  if (group == Tile.groups - 1) ptx::named_barrier_arrive<256>(1);  // the first turn is group 0's
  for (int slot = 0;; slot = (slot + 1) % kWorkSlots) {
    shared.q_ring.wait_full(q_at);
    const Work& w = shared.works[slot];
    const int begin = uniform(w.begin), end = uniform(w.end), mode = uniform(w.mode);
    const int frozen_begin = uniform(w.frozen_begin), frozen_end = uniform(w.frozen_end);
    const int row = first_row(w);
    key_tile = uniform(key_tile);
    if (mode >= Work::flush || begin >= end) {
      if constexpr (Tile.chained()) {
        if (pending >= 0) drain();
      }
      if (mode == Work::stop) break;
      if (mode < Work::flush)
        write_empty_rows<Tile, Element>(p, w, group, lane, staging);  // no row sees a key
      release_q();
      continue;
    }
    if constexpr (Tile.q_registers) {
#pragma unroll
      for (int step = 0; step < Tile.d_qk / 16; ++step) {
        const int r = warp * 16 + lane % 16, chunk = step * 2 + lane / 16;
        ptx::ldmatrix_x4(q_fragments[step], q_address + q_at.stage * Tile.q_bytes() +
                                                (chunk / 8) * 8192 + r * 128 +
                                                ((chunk % 8) ^ (r % 8)) * 16);
      }
      release_q();
    }
    auto mask = [&](int n) {
      if (n >= w.full_begin && n < w.full_end) return;
      const MaskRule rule(p, w);
      const int column0 = n * kKeys + 2 * (lane % 4);
      if (n < w.full_begin)
        mask_before(s, rule.row_begin(row) - column0, rule.row_begin(row + 8) - column0);
      if (n >= w.full_end)
        mask_from(s, rule.row_end(row) - column0, rule.row_end(row + 8) - column0);
    };
    auto end_qk = [&](int n) {
      ptx::hold_registers(s);
      shared.k_ring.release(position(key_tile));
      ++key_tile;
      if constexpr (!Tile.q_registers) {
        if (n + 1 == end)
          release_q();  // the next tile's Q takes its place while this one's softmax runs
      }
    };

    auto end_pv_step = [&] {
      ptx::wgmma_wait<0>();
      ptx::hold_registers(o);
      shared.v_ring.release(position(key_tile - 2));  // end_qk has counted on
    };
    // The scores of key tile n are in s and P V of tile n - 1 is in flight: softmax, P.
    auto frozen_tile = [&] {
      float t0, t1, f0, f1;
      softmax_frozen(s, state, scale_log2, t0, t1);
      state.l0 += t0;
      state.l1 += t1;
      const bool raise = __any_sync(0xffffffffu, fmaxf(t0, t1) > kRaiseThreshold<Element>);
      // This branch also keeps ptxas from moving the wait for P V up into the exponentials.
      if (raise) raise_rows<Element>(s, state, t0, t1, f0, f1);
      end_pv_step();
      if (raise) scale_rows(o, f0, f1);
      pack_probability();
    };
    auto online_tile = [&](int n) {
      float f0, f1;
      mask(n);
      softmax_online(s, state, scale_log2, false, 0.5f * float(w.len_k), f0, f1);
      end_pv_step();
      scale_rows(o, f0, f1);
      pack_probability();
    };

    // First key tile. Chained: over the last P V of the query tile before (or over a P V of
    // nothing, whose result is dropped). That tile's epilogue then runs under the second Q K^T.
    float unused0, unused1;
    int n = begin + 1;
    shared.k_ring.wait_full(position(key_tile));
    if constexpr (Tile.chained()) {
      if (pending >= 0) wait_last_v();
      my_turn();
      issue_qk();
      issue_pv(o_started, key_tile - 1);
      next_turn();
      RowEnds ends{};
      if (pending >= 0) ends = end_pending();
      ptx::wgmma_wait<1>();
      end_qk(begin);
      mask(begin);
      softmax_online(s, state, scale_log2, true, 0.0f, unused0, unused1);
      ptx::wgmma_wait<0>();
      ptx::hold_registers(o);
      if (pending >= 0) shared.v_ring.release(position(key_tile - 2));
      pack_probability();
      const int finished = pending;
      pending = slot + kWorkSlots * min(uniform(w.len_k) - (end - 1) * kKeys, kKeys);
      if (Tile.late_epilogue() && n >= frozen_begin && n < frozen_end) {
        shared.k_ring.wait_full(position(key_tile));
        my_turn();
        issue_qk();
        next_turn();
        if (finished >= 0) store_pending(finished % kWorkSlots, ends);
        // Drained before P V is issued: within one stage ptxas would want a second set of registers
        // for o.
        ptx::wgmma_wait<0>();
        end_qk(n);
        shared.v_ring.wait_full(position(key_tile - 2));
        issue_pv(0, key_tile - 2);
        o_started = 1;
        frozen_tile();
        ++n;
      } else {
        if (finished >= 0) store_pending(finished % kWorkSlots, ends);
        o_started = 0;
      }
    } else {
      my_turn();
      issue_qk();
      next_turn();
      ptx::wgmma_wait<0>();
      end_qk(begin);
      mask(begin);
      softmax_online(s, state, scale_log2, true, 0.0f, unused0, unused1);
      pending = slot + kWorkSlots * min(uniform(w.len_k) - (end - 1) * kKeys, kKeys);
      o_started = 0;
      pack_probability();
    }

    // One key tile: Q K^T of tile n and P V of tile n - 1 in flight, softmax of n under the latter.
    auto begin_step = [&](int n) {
      shared.k_ring.wait_full(position(key_tile));
      my_turn();
      issue_qk();
      shared.v_ring.wait_full(position(key_tile - 1));
      issue_pv(o_started, key_tile - 1);
      o_started = 1;
      next_turn();
      ptx::wgmma_wait<1>();
      end_qk(n);
    };
    while (n < end) {
      if (n >= frozen_begin && n < frozen_end) {
        do {
          begin_step(n);
          frozen_tile();
        } while (++n < frozen_end);
      } else {
        begin_step(n);
        online_tile(n);
        ++n;
      }
    }
    if constexpr (!Tile.chained()) drain();
  }
  // Shared memory must outlive the stores that read it.
  if (lane == 0) ::cuda::ptx::cp_async_bulk_wait_group_read(::cuda::ptx::n32_t<0>{});
}

// (The shape itself as a template argument of a __global__ function breaks nvcc 13.0's host stub.)
template <int Shape, class Element>
__global__ void __launch_bounds__(kForwardTiles[Shape].threads(), 1)
    forward_kernel(const __grid_constant__ ForwardParams p) {
  constexpr ForwardTile Tile = kForwardTiles[Shape];
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
  ptx::wait_for_prerequisites();
  if (threadIdx.x / 128 == Tile.groups) {
    ptx::setmaxnreg_decrease<Tile.producer_registers()>();
    if (threadIdx.x == Tile.groups * 128) produce<Tile>(p, shared);
  } else {
    ptx::setmaxnreg_increase<Tile.consumer_registers()>();
    consume<Tile, Element>(p, shared);
  }
}

}  // namespace abacist::cuda::sm90
