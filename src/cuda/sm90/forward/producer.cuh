// The producer of a block: one thread that decides what comes next and loads it by TMA.
#pragma once
#include <cuda/ptx>

#include "../../tile/descriptor.cuh"
#include "../../tile/pipeline.cuh"
#include "schedule.cuh"
#include "shared.cuh"

namespace abacist::cuda::sm90 {

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
  TileOrder order(p);

  int issued = 0;  // messages sent

  // K and V are two streams of tiles. V runs one tile behind K, also across query tiles: the next
  // query tile's first K is requested before this one's last V, whose buffer becomes free later.
  int k_row = 0, k_slot = kWorkSlots - 1, tiles = 0;  // the next K tile's first row, its message
  shared.works[k_slot].begin = shared.works[k_slot].end = 0;
  auto load_k = [&] {
    shared.k_ring.begin_fill(k_at, Tile.k_bytes());
    const Work& w = shared.works[k_slot];
    load_panels<Tile.qk_panels()>(shared.k[k_at.stage], p.k_map, Tile.keys * 128, k_row, w.kv_head,
                                  p.cu_seqlens_k ? 0 : w.batch, &shared.k_ring.full[k_at.stage]);
    k_at.advance();
    k_row += Tile.keys;
  };
  auto load_v = [&](int row, int slot) {
    shared.v_ring.begin_fill(v_at, Tile.v_bytes());
    const Work& w = shared.works[slot];
    load_panels<Tile.v_panels()>(shared.v[v_at.stage], p.v_map, Tile.keys * 128, row, w.kv_head,
                                 p.cu_seqlens_k ? 0 : w.batch, &shared.v_ring.full[v_at.stage]);
    v_at.advance();
  };
  auto load_both = [&] {
    load_k();
    load_v(k_row - 2 * Tile.keys, k_slot);
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
    ptx::test_delay();
    Work& w = shared.works[issued % kWorkSlots];
    const bool flushed = issued > 0 && shared.works[(issued - 1) % kWorkSlots].mode == Work::flush;
    int again = take_redo(issued - kRedoDelay, issued - kRedoDelay + 1);
    if (again < 0 && flushed) {
      // Once all consumers have answered the flush, every verdict is final. Its stage of the Q ring
      // is the one before q_at.
      const int before = (issued - 1) % Tile.q_stages, fill = (issued - 1) / Tile.q_stages;
      tile::wait_barrier(&shared.q_ring.empty[before], fill & 1);
      again = take_redo(issued - kRedoDelay, issued);
      if (again < 0) w.mode = Work::stop;
    } else if (again < 0) {
      int all_head, index;
      do {
        if (!order.take(p, all_head, index)) {
          w.mode = Work::flush;
          break;
        }
      } while (!describe_tile<Tile>(p, all_head, index, w));
    }
    if (again >= 0) {
      int slot = issued;  // again, so that it is not kept in a register until here
      asm volatile("" : "+r"(slot));
      const int* from = reinterpret_cast<const int*>(&shared.works[again]);
      int* to = reinterpret_cast<int*>(&shared.works[slot % kWorkSlots]);
#pragma unroll 1
      for (int i = 0; i < int(sizeof(Work) / sizeof(int)); ++i) to[i] = from[i];
      w.mode = Work::redo;
      for (Work::Part& part : w.parts) part.frozen_begin = part.frozen_end = part.traits = 0;
    }
    if (w.mode >= Work::flush) {
      w.begin = w.end = 0;
      for (Work::Part& part : w.parts) part.end = 0;
    }
  };
  // The first K of a message's tile (if it has any), then what is pending of V.
  auto begin_loads = [&](int slot) {
    const Work& w = shared.works[slot];
    const int v_row = k_row - Tile.keys, v_slot = k_slot;
    tiles = w.end - w.begin;
    k_slot = slot;
    if (tiles > 0) {
      k_row = w.k_offset + w.begin * Tile.keys;
      load_k();
    }
    if (shared.works[v_slot].begin < shared.works[v_slot].end) load_v(v_row, v_slot);
  };
  auto send = [&] {
    const Work& w = shared.works[issued % kWorkSlots];
    const bool packed = Tile.packs && p.row_heads > 1;
    tile::wait_barrier(&shared.q_ring.empty[q_at.stage], q_at.parity ^ 1);
    shared.redo[issued % kWorkSlots] = 0;
    if (w.begin < w.end) {
      int with_rows = 1;  // warpgroups
      for (int group = 1; group < Tile.groups; ++group)
        with_rows += w.position + group * positions_of<Tile>(p) < w.len_q;
      shared.q_ring.begin_fill(
          q_at, with_rows * (Tile.packs ? p.q_slice_bytes : 64 * Tile.qk_panels() * 128));
#pragma unroll 1
      for (int group = 0; group < with_rows; ++group) {
        const int row = w.q_offset + w.position + group * positions_of<Tile>(p);
        load_panels<Tile.qk_panels()>(shared.q[q_at.stage] + group * 64 * Tile.qk_panels() * 128,
                                      p.q_map, 64 * 128, packed ? w.head : row,
                                      packed ? row : w.head, p.cu_seqlens_q ? 0 : w.batch,
                                      &shared.q_ring.full[q_at.stage]);
      }
    } else {
      tile::arrive_barrier(&shared.q_ring.full[q_at.stage]);
    }
    q_at.advance();
    ++issued;
  };

  // The first tile follows from the parameters alone, unless lengths are on the device: it is
  // chosen while the kernel before still runs.
  const bool reads_lengths = p.cu_seqlens_q || p.cu_seqlens_k || p.k_lengths || p.tile_counter;
  if (reads_lengths) ptx::wait_for_prerequisites();
  select();
  if (!reads_lengths) ptx::wait_for_prerequisites();
  if constexpr (Tile.chained()) {
    // A buffer for Q is free as soon as the consumers have started on a tile: the next tile is
    // chosen and its Q requested a whole tile ahead, so that its latency is never seen.
    send();
    for (;;) {
      const int slot = (issued - 1) % kWorkSlots;
      if (shared.works[slot].mode == Work::stop) return;
      begin_loads(slot);
      if (--tiles > 0) load_both();
      select();
      send();
      while (--tiles > 0) load_both();
    }
  } else {
    for (;;) {  // chosen a tile ahead, too, but Q's buffer is in use until the tile ends
      const int slot = issued % kWorkSlots;
      begin_loads(slot);
      send();
      if (shared.works[slot].mode == Work::stop) return;
      if (--tiles > 0) load_both();
      select();
      while (--tiles > 0) load_both();
    }
  }
}

}  // namespace abacist::cuda::sm90
