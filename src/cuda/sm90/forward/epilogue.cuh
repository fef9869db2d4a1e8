// End of a query tile: normalise O, add the sink, write O and LSE.
#pragma once
#include "../../ptx/sm90.cuh"
#include "params.cuh"
#include "softmax.cuh"

namespace abacist::cuda::sm90 {

// Lane j of each quad holds word j of four 16-byte chunks; afterwards it holds all of chunk j.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int lane) {
  const bool odd = lane & 1, high = lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? w[i] : w[i + 1], 1);
    if (odd) w[i] = got; else w[i + 1] = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? w[i] : w[i + 2], 2);
    if (high) w[i] = got; else w[i + 2] = got;
  }
}

// Writes rows `row` and `row + 8`. Returns whether a row of this thread is not finite, though it sees a key.
// Stores go straight from registers: each quad writes 64 contiguous bytes, no shared memory is needed
// and ragged tiles are a predicate.
template <ForwardTile Tile, class Element>
__device__ __forceinline__ bool finish_rows(const ForwardParams& p, const Work& w, int row, int lane,
                                            float (&o)[Tile.d_v / 2], RowState state) {
  const MaskRule rule(p, w);
  float l[2] = {quad_sum(state.l0), quad_sum(state.l1)};
  float m[2] = {state.m0, state.m1};
  float factor[2];
  bool empty_row[2];
  bool bad = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = row + 8 * half;
    const bool empty = empty_row[half] = rule.row_begin(i) >= rule.row_end(i);
    float zero = 0.0f;  // NaN if an element of the row is not finite
#pragma unroll
    for (int e = 0; e < Tile.d_v / 2; e += 4) {
      zero = fmaf(o[e + 2 * half], 0.0f, zero);
      zero = fmaf(o[e + 2 * half + 1], 0.0f, zero);
    }
    bad |= i < w.len_q && !empty && (!(l[half] < INFINITY) || zero != 0.0f);
    float top = empty ? -INFINITY : m[half], sum = empty ? 0.0f : l[half], scaled = 1.0f;
    if (p.sinks) {
      const float sink = p.sinks[w.head] * 1.4426950408889634f;
      if (sink > -INFINITY) {
        const float higher = fmaxf(top, sink);
        scaled = ptx::exp2_approx(top - higher);
        sum = sum * scaled + ptx::exp2_approx(sink - higher);
        top = higher;
      }
    }
    factor[half] = scaled / sum;
    if (p.lse && lane % 4 == 0 && i < w.len_q) {
      p.lse[w.batch * p.lse_stride_b + w.head * p.lse_stride_h + w.q_offset + i] =
          sum == 0.0f ? -INFINITY : (top + __log2f(sum)) * 0.6931471805599453f;
    }
  }
  auto* out = static_cast<Element*>(p.o) + w.batch * p.o_stride_b + w.head * p.o_stride_h;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = row + 8 * half;
    Element* line = out + (w.q_offset + int64_t(i)) * p.o_stride_s;
#pragma unroll
    for (int block = 0; block < Tile.d_v / 8; block += 4) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int e = 4 * (block + j) + 2 * half;
        // Selected, not multiplied by 0: a V of NaN in a visited tile must not reach an empty row.
        words[j] = empty_row[half] ? 0u : ptx::pack<Element>(o[e] * factor[half], o[e + 1] * factor[half]);
      }
      transpose_quad(words, lane);
      const int column = (block + lane % 4) * 8;
      if (i < w.len_q && column < p.d_v) {
        *reinterpret_cast<uint4*>(line + column) = uint4{words[0], words[1], words[2], words[3]};
      }
    }
  }
  return bad;
}

// A query tile none of whose rows sees a key.
template <ForwardTile Tile, class Element>
__device__ __forceinline__ void write_empty_rows(const ForwardParams& p, const Work& w, int row, int lane) {
  float o[Tile.d_v / 2] = {};
  finish_rows<Tile, Element>(p, w, row, lane, o, RowState{});
}

}  // namespace abacist::cuda::sm90
