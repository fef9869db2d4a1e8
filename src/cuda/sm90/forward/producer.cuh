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
      const int before = (issued - 1) % Tile.q_stages, fill = (issued - 1) / Tile.q_stages;
      tile::wait_barrier(&shared.q_ring.empty[before], fill & 1);
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
      const int* from = reinterpret_cast<const int*>(&shared.works[again]);
#pragma unroll 1
      for (int i = 0; i < int(sizeof(Work) / sizeof(int)); ++i)
        reinterpret_cast<int*>(&w)[i] = from[i];
      w.mode = Work::redo;
      for (Work::Part& part : w.parts) part.frozen_begin = part.frozen_end = 0;
    }
    flushed = w.mode == Work::flush;
    if (w.mode >= Work::flush) {
      w.begin = w.end = 0;
      for (Work::Part& part : w.parts) part.end = 0;
    }
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
  if constexpr (Tile.chained()) {
    // A buffer for Q is free as soon as the consumers have started on a tile: the next tile is
    // chosen and its Q requested a whole tile ahead, so that its latency is never seen.
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

}  // namespace abacist::cuda::sm90
