// Which query tile comes next, and which key tiles it visits. Runs in the one producer thread.
//
// plain    tiles of a head, then the next head; block b takes every gridDim.x-th. Full attention.
// paired   the longest tile of a head together with its shortest, the second longest with the
//          second shortest and so on: under a causal mask all pairs cost the same, so dealing them
//          out is balanced without any counter, and a head's K and V stay in L2. The last heads'
//          tiles (two or three a block) are dealt out one by one instead, longest first, in rounds
//          whose order alternates: pairs alone leave up to a round of blocks idle at the end.
// counter  sections of heads whose K and V fit the L2 together; within one, longest tiles first,
//          then by head. Blocks take tiles from a counter in the workspace, set to 0 before the
//          launch.
#pragma once
#include <cuda_runtime.h>

#include "params.cuh"
#include "partial.cuh"

namespace abacist::cuda::sm90 {

struct TileOrder {
  enum Kind { plain, paired, counter };
  int next;  // unit of work; paired: twice the pair + 0, 1 for its tiles, then -1 - round

  __device__ explicit TileOrder(const ForwardParams& p) : next(blockIdx.x << (p.order == paired)) {}
  // Combined head (batch * tile_heads + head) and index of the next query tile; false if there is
  // none left.
  __device__ __forceinline__ bool take(const ForwardParams& p, int& all_head, int& index) {
    if (p.order == paired) return take_pair(p, all_head, index) || take_last(p, all_head, index);
    if (next >= p.tile_count) return false;
    if (p.order == plain) {
      all_head = next / p.tiles_per_head;
      index = next - all_head * p.tiles_per_head;
      next += gridDim.x;
      return true;
    }
    const int per_section = p.heads_per_section * p.tiles_per_head;
    const int section = next / per_section, first_head = section * p.heads_per_section;
    const int section_heads = min(p.heads_per_section, p.b * p.tile_heads - first_head);
    const int position = next - section * per_section, round = position / section_heads;
    all_head = first_head + position - round * section_heads;
    index = p.tiles_per_head - 1 - round;
    next = p.tile_counter ? int(gridDim.x + atomicAdd(p.tile_counter, 1u)) : int(next + gridDim.x);
    return true;
  }

 private:
  __device__ __forceinline__ bool take_pair(const ForwardParams& p, int& all_head, int& index) {
    // Two heads at a time: their pairs, then, for an odd number of tiles, their two middle tiles.
    const int half = p.tiles_per_head / 2, two_heads = next / 2 / p.tiles_per_head,
              unit = next / 2 - two_heads * p.tiles_per_head;
    if (next < 0 || 2 * two_heads >= p.paired_heads) return false;
    const bool second = next & 1, middle = unit == 2 * half;
    all_head = 2 * two_heads + (middle ? second : unit >= half);
    const int pair = middle ? half : unit >= half ? unit - half : unit;
    index = second ? pair : p.tiles_per_head - 1 - pair;
    next += second ? 2 * gridDim.x - 1 : 1;
    return true;
  }
  __device__ __forceinline__ bool take_last(const ForwardParams& p, int& all_head, int& index) {
    int rank;
    do {
      next = min(next, 0) - 1;
      const int round = -1 - next;
      rank =
          round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x) - p.odd_pairs;
    } while (rank < 0);
    const int heads = p.b * p.tile_heads - p.paired_heads, turn = rank / heads;
    index = p.tiles_per_head - 1 - turn;
    all_head = p.paired_heads + rank - turn * heads;
    return index >= 0;
  }
};

// Positions of a warpgroup.
template <ForwardTile Tile>
__device__ __forceinline__ int positions_of(const ForwardParams& p) {
  return Tile.packs ? p.row_positions : 64;
}

// The share of the warpgroup whose first position is `first`.
template <ForwardTile Tile>
__device__ __forceinline__ void describe_part(const ForwardParams& p, const MaskRule& rule,
                                              const Work& w, int first, Work::Part& part) {
  int last = min(first + positions_of<Tile>(p), w.len_q) - 1;
  asm("" : "+r"(last));  // else the - 1 is worked into what follows, which costs registers: a spill
  if (first > last || w.begin >= w.end) {
    part.end = w.begin;
    part.full_begin = part.full_end = part.frozen_begin = part.frozen_end = 0;
    return;
  }
  const int first_key = rule.row_begin(last);  // of the last row, which begins last
  part.end = max(w.begin, ceil_div(max(rule.row_end(last), 0), Tile.keys));
  part.full_begin = ceil_div(first_key, Tile.keys);
  part.full_end = max(rule.row_end(first), 0) / Tile.keys;
  // A maximum can be frozen once every row has seen a visible key (softmax.cuh): not in the first
  // tile visited, nor where the last row only begins.
  part.frozen_begin = max(w.begin, first_key / Tile.keys) + 1;
  part.frozen_end = part.end;
  if (w.mode == Work::redo || w.some_empty) part.frozen_begin = part.frozen_end = 0;
}

template <ForwardTile Tile>
__device__ __forceinline__ void describe_traits(const ForwardParams& p, Work& w) {
  const bool ordinary = !leaves_parts<Tile>(p) && (!Tile.packs || p.row_heads == 1);
  int traits = 0;
  if (w.mode == Work::normal && !w.some_empty && w.begin < w.end) {
    if (ordinary && !p.sinks) traits |= Work::plain_end;
    if (ordinary && (!p.cu_seqlens_q || w.rows >= Tile.rows())) traits |= Work::plain_store;
    const int last = min(positions_of<Tile>(p) * Tile.groups, w.rows) - 1;
    if (w.position + last + w.first <= w.begin * Tile.keys) traits |= Work::same_first;
  }
#pragma unroll 1
  for (int group = 0; group < Tile.groups; ++group) {
    Work::Part& part = w.parts[group];
    const bool redoable = (traits & Work::same_first) || part.frozen_begin < part.frozen_end;
    part.traits = redoable ? traits | Work::redoable : traits & ~Work::plain_end;
  }
  float* lse = p.lse;
  if (lse)
    lse += w.batch * p.lse_stride_b + w.head * p.lse_stride_h + w.q_offset + int64_t(w.position);
  w.parts[0].lse = lse;
}

// One of `splits` equal ranges of the key tiles that a query tile visits, as if it were a sequence
// of its own: keys count from its first one on. Rows that see none of them are empty, which is what
// all of them are where there are fewer tiles than splits.
template <ForwardTile Tile>
__device__ __forceinline__ void take_split(const ForwardParams& p, int split, MaskRule& rule,
                                           Work& w) {
  const int last = min(w.position + Tile.groups * positions_of<Tile>(p), w.len_q) - 1;
  const int begin = rule.row_begin(w.position) / Tile.keys;
  const int tiles = max(ceil_div(rule.row_end(last), Tile.keys) - begin, 0);
  const int from = (begin + tiles * split / p.splits) * Tile.keys;
  const int to = (begin + tiles * (split + 1) / p.splits) * Tile.keys;
  w.k_offset += from;
  w.len_k = max(min(w.len_k, to) - from, 0);
  rule.first -= from;
  rule.end -= from;
  rule.len_k = w.len_k;
  w.parts[1].partials = p.partials + int64_t(split) * p.partial_rows * (p.d_v + 2);
}

// Fills `w` for one query tile; false if it has no rows (shorter sequences of a varlen batch).
template <ForwardTile Tile>
__device__ __forceinline__ bool describe_tile(const ForwardParams& p, int all_head, int index,
                                              Work& w) {
#pragma unroll 1
  for (int group = 0; group < Tile.groups; ++group)
    for (auto& warp : w.parts[group].redo_rows) warp[0] = warp[1] = p.always_online ? ~0u : 0u;
  w.batch = all_head / p.tile_heads;
  if (w.batch >= p.b) return false;
  const int tile_head = all_head - w.batch * p.tile_heads;
  w.kv_head = tile_head / p.tile_heads_per_kv_head;
  int ahead = tile_head - w.kv_head * p.tile_heads_per_kv_head, split = 0;
  if constexpr (Tile.splits) {
    split = ahead % p.splits;
    ahead /= p.splits;
  }
  if constexpr (Tile.packs) {
    ahead *= p.row_heads;
    w.heads = min(p.row_heads, p.heads_per_kv_head - ahead);
  }
  w.head = w.kv_head * p.heads_per_kv_head + ahead;
  w.position = index * Tile.groups * positions_of<Tile>(p);
  w.mode = p.always_online ? Work::redo : Work::normal;
  const SequencePart queries(p.cu_seqlens_q, w.batch, p.s_q, p.total_q);
  w.len_q = queries.length;
  w.q_offset = queries.offset;
  const SequencePart keys(p.cu_seqlens_k, w.batch, p.s_k, p.total_k);
  w.len_k = p.k_lengths ? min(max(p.k_lengths[w.batch], 0), keys.length) : keys.length;
  w.k_offset = keys.offset;
  if (w.position >= w.len_q) return false;

  w.rows = w.len_q - w.position;
  MaskRule rule(p, w.len_q, w.len_k);
  if (leaves_parts<Tile>(p)) take_split<Tile>(p, split, rule, w);
  w.first = rule.first;
  w.behind = rule.end;
  const int last = min(w.position + Tile.groups * positions_of<Tile>(p), w.len_q) - 1;
  const int first_key = rule.row_begin(w.position), end_key = rule.row_end(last);
  // Emptiness starts at one end of the tile: before the first key, or past the last one of a
  // window.
  w.some_empty = rule.is_empty(w.position) || rule.is_empty(last);
  w.begin = first_key < end_key ? first_key / Tile.keys : 0;
  w.end = first_key < end_key ? ceil_div(end_key, Tile.keys) : 0;
#pragma unroll 1
  for (int group = 0; group < Tile.groups; ++group) {
    const int first = w.position + group * positions_of<Tile>(p);
    describe_part<Tile>(p, rule, w, first, w.parts[group]);
  }
  // Read again from here on: few registers are left.
  asm volatile("" ::: "memory");
  describe_traits<Tile>(p, w);
  return true;
}

}  // namespace abacist::cuda::sm90
