// Which query tile comes next, and which key tiles it visits. Runs in the one producer thread.
//
// Tiles are ordered by section (heads whose K and V fit the L2 together), then by query tile, longest
// first under causal masks, then by head. Blocks take them in this order: from a counter in the
// workspace if there is one, else dealt out forwards and backwards in turn, which balances the
// falling lengths almost as well and needs no memory.
#pragma once
#include <cuda_runtime.h>

#include "params.cuh"

namespace abacist::cuda::sm90 {

struct TileOrder {
  int next, place;  // place: of this block in the current round of gridDim.x tiles

  __device__ explicit TileOrder(const ForwardParams&) : next(blockIdx.x), place(blockIdx.x) {}
  __device__ __forceinline__ int take(const ForwardParams& p) {
    const int taken = next;
    if (p.tile_counter) {
      next = gridDim.x + atomicAdd(p.tile_counter, 1u);
    } else {
      const int mirrored = gridDim.x - 1 - place;
      next += gridDim.x - place + mirrored;
      place = mirrored;
    }
    return taken;
  }
};

// Fills `w` for tile number `tile`; false if the tile has no rows (shorter sequences of a varlen batch).
template <ForwardTile Tile>
__device__ __forceinline__ bool describe_tile(const ForwardParams& p, int tile, Work& w) {
  const int per_section = p.heads_per_section * p.tiles_per_head;
  const int section = tile / per_section;
  const int rest = tile - section * per_section;
  const int section_heads = min(p.heads_per_section, p.b * p.h_q - section * p.heads_per_section);
  const int order = rest / section_heads;
  const int all_head = section * p.heads_per_section + rest - order * section_heads;
  const int index = p.longest_first ? p.tiles_per_head - 1 - order : order;
  w.batch = all_head / p.h_q;
  w.head = all_head - w.batch * p.h_q;
  w.row0 = index * Tile.rows();
  w.mode = p.always_online ? Work::redo : Work::normal;
  w.len_q = p.s_q;
  w.len_k = p.s_k;
  w.q_offset = 0;
  w.k_offset = 0;
  // Device lengths are data: whatever they hold, nothing outside the tensors is touched.
  if (p.cu_seqlens_q) {
    w.q_offset = min(max(p.cu_seqlens_q[w.batch], 0), p.total_q);
    w.len_q = min(max(p.cu_seqlens_q[w.batch + 1] - w.q_offset, 0), min(p.s_q, p.total_q - w.q_offset));
  }
  if (p.cu_seqlens_k) {
    w.k_offset = min(max(p.cu_seqlens_k[w.batch], 0), p.total_k);
    w.len_k = min(max(p.cu_seqlens_k[w.batch + 1] - w.k_offset, 0), min(p.s_k, p.total_k - w.k_offset));
  }
  if (p.k_lengths) w.len_k = min(max(p.k_lengths[w.batch], 0), w.len_k);
  if (w.row0 >= w.len_q) return false;

  const MaskRule rule(p, w);
  const int last_row = min(w.row0 + Tile.rows(), w.len_q) - 1;
  const int first_key = rule.row_begin(w.row0), end_key = rule.row_end(last_row);
  if (first_key >= end_key) {
    w.begin = w.end = w.full_begin = w.full_end = 0;
    return true;
  }
  w.begin = first_key / Tile.keys;
  w.end = (end_key + Tile.keys - 1) / Tile.keys;
  // Full tiles: every row of the tile sees every key. The first tile visited fixes the maximum, so it
  // never counts as full.
  w.full_begin = max(w.begin + 1, (rule.row_begin(last_row) + Tile.keys - 1) / Tile.keys);
  w.full_end = min(w.end, max(rule.row_end(w.row0), 0) / Tile.keys);
  // A frozen maximum needs a visible key of every row before the first full tile (see softmax.cuh).
  if (rule.row_begin(last_row) >= w.full_begin * Tile.keys) ++w.full_begin;
  if (w.mode == Work::redo) w.full_end = w.full_begin = 0;
  return true;
}

}  // namespace abacist::cuda::sm90
