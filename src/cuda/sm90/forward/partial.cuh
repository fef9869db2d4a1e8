// What a split over keys leaves of its rows: O not yet divided, and their maximum and sum. merge.cu
// puts the splits together.
//
// A split's part of the workspace:  O [partial_rows][d_v], then (maximum, sum) [partial_rows][2],
// float. Rows are counted as those of LSE are: [b, h_q, s_q], or [h_q, total_q]. The maximum is in
// log2 units, what the weights of O and sum are relative to (softmax.cuh): not an LSE, which at
// scores of 10^6 would lose how much the split weighs.
#pragma once
#include <cstdint>

#include "params.cuh"

namespace abacist::cuda::sm90 {

// Whether a run's keys are split.
template <ForwardTile Tile>
__device__ __forceinline__ bool leaves_parts(const ForwardParams& p) {
  return Tile.only_splits() || (Tile.splits && p.splits > 1);
}

// Whether a row sees a key of the split: if not, its O is not written. (Keys whose scores are all
// -inf sum up to 0.)
__device__ __forceinline__ bool is_seen(float2 sums) {
  return !(sums.x == -INFINITY && sums.y == 1.0f);
}

// Whether row r of a tile is to be written: it is one, and, in a redo, one of those that
// overflowed. All others keep what they have: a row's bits do not depend on its neighbours.
template <bool Packs>
__device__ __forceinline__ bool is_written(const Work& w, const RowPlace<Packs>& place, int r) {
  if (w.mode != Work::redo) return place.valid;
  // Volatile: not read ahead of the question, while it may be written.
  const volatile uint32_t& wrong = w.parts[r / 64].redo_rows[r / 16 % 4][r / 8 % 2];
  return place.valid && (wrong >> r % 8 * 4 & 15);
}

template <bool Packs>
__device__ __forceinline__ int64_t partial_row(const ForwardParams& p, const Work& w,
                                               const RowPlace<Packs>& place) {
  return w.batch * p.lse_stride_b + place.head * p.lse_stride_h + w.q_offset + place.position;
}

// (maximum, sum) of each row of a work item's split.
__device__ __forceinline__ float2* partial_sums(const ForwardParams& p, const Work& w) {
  return reinterpret_cast<float2*>(w.parts[1].partials + int64_t(p.partial_rows) * p.d_v);
}

// O of rows r and r + 8 of a tile, straight from registers: each quad writes 32 bytes at a time.
template <int Columns>
__device__ __forceinline__ void store_partial_rows(const ForwardParams& p, const Work& w, int r,
                                                   int lane, const float (&o)[Columns / 2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const RowPlace<true> place(p, w, r + 8 * half);
    const bool written = is_written(w, place, r + 8 * half);
    float* const line = w.parts[1].partials + partial_row(p, w, place) * p.d_v + 2 * (lane % 4);
#pragma unroll
    for (int block = 0; block < Columns / 8; ++block) {
      if (written && 8 * block < p.d_v) {
        *reinterpret_cast<float2*>(line + 8 * block) =
            float2{o[4 * block + 2 * half], o[4 * block + 2 * half + 1]};
      }
    }
  }
}

}  // namespace abacist::cuda::sm90
