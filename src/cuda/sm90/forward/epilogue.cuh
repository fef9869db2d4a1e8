// End of a query tile: normalise O, add the sink, write O and LSE.
#pragma once
#include <cuda/ptx>

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
    if (odd)
      w[i] = got;
    else
      w[i + 1] = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? w[i] : w[i + 2], 2);
    if (high)
      w[i] = got;
    else
      w[i + 2] = got;
  }
}

// Whether an element of the thread's two rows is not finite.
template <int N>
__device__ __forceinline__ bool any_not_finite(const float (&o)[N]) {
  float zero[4] = {};
#pragma unroll
  for (int e = 0; e < N; ++e) zero[e % 4] = fmaf(o[e], 0.0f, zero[e % 4]);
  return !(zero[0] + zero[1] + zero[2] + zero[3] == 0.0f);
}

// What the epilogue needs to know of a thread's rows `row` and `row + 8` once their last softmax is
// done.
struct RowEnds {
  float factor0, factor1;  // the result is o * factor; 0 for a row that sees no key
  bool check;              // uniform over the warp: O may have overflowed, look at it
  bool overflowed;         // l did
};

// Normalisation and LSE of a tile, from m and l alone: with chained tiles this runs while the last
// P V is still in flight.
__device__ __forceinline__ RowEnds end_rows(const ForwardParams& p, const Work& w, int group,
                                            int row, int lane, const RowState& state) {
  float l0 = quad_sum(state.l0), l1 = quad_sum(state.l1), m0 = state.m0, m1 = state.m1;
  // |O| <= l max|v|, and len_k max|v| < 2^127 is the caller's part of the contract: while l <= 2
  // len_k nothing has overflowed, and looking at every element (64 instructions at d 128) is not
  // needed.
  const float safe = 2.0f * float(w.len_k);
  const bool redoable =
      w.mode == Work::normal && w.parts[group].frozen_begin < w.parts[group].frozen_end;
  RowEnds ends;
  ends.check =
      __any_sync(0xffffffffu, redoable && (state.suspect || !(l0 <= safe) || !(l1 <= safe)));
  ends.overflowed = row < w.len_q && (!(l0 < INFINITY) || !(l1 < INFINITY));
  bool empty0 = false, empty1 = false;
  if (w.some_empty) {
    const MaskRule rule(p, w);
    empty0 = rule.row_begin(row) >= rule.row_end(row);
    empty1 = rule.row_begin(row + 8) >= rule.row_end(row + 8);
    if (empty0) m0 = -INFINITY, l0 = 0.0f;
    if (empty1) m1 = -INFINITY, l1 = 0.0f;
  }
  float scaled0 = 1.0f, scaled1 = 1.0f;
  if (p.sinks) {
    const float sink = p.sinks[w.head] * 1.4426950408889634f;
    if (sink > -INFINITY) {
      const float higher0 = fmaxf(m0, sink), higher1 = fmaxf(m1, sink);
      scaled0 = ptx::exp2_approx(m0 - higher0);
      scaled1 = ptx::exp2_approx(m1 - higher1);
      l0 = l0 * scaled0 + ptx::exp2_approx(sink - higher0);
      l1 = l1 * scaled1 + ptx::exp2_approx(sink - higher1);
      m0 = higher0;
      m1 = higher1;
    }
  }
  ends.factor0 = empty0 ? 0.0f : __fdividef(scaled0, l0);
  ends.factor1 = empty1 ? 0.0f : __fdividef(scaled1, l1);
  if (p.lse && lane % 4 == 0) {
    float* lse = p.lse + w.batch * p.lse_stride_b + w.head * p.lse_stride_h + w.q_offset + row;
    if (row < w.len_q) lse[0] = l0 == 0.0f ? -INFINITY : (m0 + __log2f(l0)) * 0.6931471805599453f;
    if (row + 8 < w.len_q)
      lse[8] = l1 == 0.0f ? -INFINITY : (m1 + __log2f(l1)) * 0.6931471805599453f;
  }
  return ends;
}

// Through shared memory, a warp on its own: 16 rows in swizzled panels of [16, 64] at `staging`,
// then TMA. That is 300 instructions less than from registers, and the stores do not hold up the
// warp. TMA clips at the end of the tensor only, so rows short of a sequence's end are copied one
// by one.
template <ForwardTile Tile, class Element>
__device__ __forceinline__ void store_rows_staged(const ForwardParams& p, const Work& w,
                                                  int warp_row, int lane,
                                                  const float (&o)[Tile.d_v / 2], float f0,
                                                  float f1, char* staging) {
  const bool elected = lane == 0;
  if (elected) {
    // The last store must have read the buffer; before a redo, it must have written its result.
    if (w.mode == Work::redo) {
      ::cuda::ptx::cp_async_bulk_wait_group(::cuda::ptx::n32_t<0>{});
    } else {
      ::cuda::ptx::cp_async_bulk_wait_group_read(::cuda::ptx::n32_t<0>{});
    }
  }
  __syncwarp();
  const uint32_t base = __cvta_generic_to_shared(staging);
  const int r = lane % 16;
#pragma unroll
  for (int step = 0; step < Tile.d_v / 16; ++step) {
    const int chunk = step * 2 + lane / 16, e = step * 8;
    ptx::stmatrix_x4(base + (chunk / 8) * 2048 + r * 128 + ((chunk % 8) ^ (r % 8)) * 16,
                     ptx::pack<Element>(o[e] * f0, o[e + 1] * f0),
                     ptx::pack<Element>(o[e + 2] * f1, o[e + 3] * f1),
                     ptx::pack<Element>(o[e + 4] * f0, o[e + 5] * f0),
                     ptx::pack<Element>(o[e + 6] * f1, o[e + 7] * f1));
  }
  __syncwarp();
  if (w.some_empty) {
    // Not by a factor of 0: a V of NaN in a visited tile must not reach an empty row.
    const MaskRule rule(p, w);
#pragma unroll 1
    for (int i = lane; i < 16 * Tile.v_panels() * 8; i += 32) {
      const int empty_row = i / (Tile.v_panels() * 8), chunk = i % (Tile.v_panels() * 8);
      if (rule.row_begin(warp_row + empty_row) >= rule.row_end(warp_row + empty_row)) {
        *reinterpret_cast<uint4*>(staging + (chunk / 8) * 2048 + empty_row * 128 +
                                  (chunk % 8) * 16) = uint4{};
      }
    }
  }
  ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
  __syncwarp();
  // No warp-wide operation under these conditions, and no else: ptxas would take the warp for
  // divergent from here on and keep ring positions and wgmma descriptors in ordinary registers.
  const bool clipped = !p.cu_seqlens_q || warp_row + 16 <= w.len_q;
  if (elected && clipped && warp_row < w.len_q) {
#pragma unroll
    for (int panel = 0; panel < Tile.v_panels(); ++panel) {
      const int32_t at[4] = {panel * 64, w.q_offset + warp_row, w.head,
                             p.cu_seqlens_q ? 0 : w.batch};
      ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_global, ::cuda::ptx::space_shared,
                                        &p.o_map, at, staging + panel * 2048);
    }
    ::cuda::ptx::cp_async_bulk_commit_group();
  }
  if (!clipped) {
    auto* out = static_cast<Element*>(p.o) + w.head * p.o_stride_h;
#pragma unroll 1
    for (int i = lane; i < 16 * Tile.v_panels() * 8; i += 32) {
      const int copy_row = i / (Tile.v_panels() * 8), chunk = i % (Tile.v_panels() * 8);
      if (warp_row + copy_row < w.len_q && chunk * 8 < p.d_v) {
        *reinterpret_cast<uint4*>(out + (w.q_offset + int64_t(warp_row + copy_row)) * p.o_stride_s +
                                  chunk * 8) =
            *reinterpret_cast<const uint4*>(staging + (chunk / 8) * 2048 + copy_row * 128 +
                                            ((chunk % 8) ^ (copy_row % 8)) * 16);
      }
    }
  }
}

// Straight from registers, for shapes without room for a buffer: each quad writes 64 contiguous
// bytes.
template <ForwardTile Tile, class Element>
__device__ __forceinline__ void store_rows_direct(const ForwardParams& p, const Work& w, int row,
                                                  int lane, const float (&o)[Tile.d_v / 2],
                                                  const RowEnds& ends) {
  auto* out = static_cast<Element*>(p.o) + w.batch * p.o_stride_b + w.head * p.o_stride_h;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = row + 8 * half;
    const float factor = half ? ends.factor1 : ends.factor0;
    Element* line = out + (w.q_offset + int64_t(i)) * p.o_stride_s;
#pragma unroll
    for (int block = 0; block < Tile.d_v / 8; block += 4) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int e = 4 * (block + j) + 2 * half;
        // Not by multiplying with 0: a V of NaN in a visited tile must not reach an empty row.
        words[j] = factor == 0.0f ? 0u : ptx::pack<Element>(o[e] * factor, o[e + 1] * factor);
      }
      transpose_quad(words, lane);
      const int column = (block + lane % 4) * 8;
      if (i < w.len_q && column < p.d_v) {
        *reinterpret_cast<uint4*>(line + column) = uint4{words[0], words[1], words[2], words[3]};
      }
    }
  }
}

// Writes O; returns whether the tile must be redone with the true maximum. o is only read: with
// chained tiles a wgmma is in flight, and ptxas would serialise.
template <ForwardTile Tile, class Element>
__device__ __forceinline__ bool store_rows(const ForwardParams& p, const Work& w, int group,
                                           int lane, const float (&o)[Tile.d_v / 2],
                                           const RowEnds& ends, char* staging) {
  const int warp_row = w.row0 + group * 64 + threadIdx.x / 32 % 4 * 16, row = warp_row + lane / 4;
  bool redo = false;
  if (ends.check)
    redo =
        ends.overflowed | (row < w.len_q & any_not_finite(o));  // no branch: see store_rows_staged
  if constexpr (Tile.staged_output()) {
    store_rows_staged<Tile, Element>(p, w, warp_row, lane, o, ends.factor0, ends.factor1, staging);
  } else {
    store_rows_direct<Tile, Element>(p, w, row, lane, o, ends);
  }
  return redo;
}

// A query tile none of whose rows sees a key.
template <ForwardTile Tile, class Element>
__device__ __forceinline__ void write_empty_rows(const ForwardParams& p, const Work& w, int group,
                                                 int lane, char* staging) {
  const float o[Tile.d_v / 2] = {};
  const int row = w.row0 + group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
  store_rows<Tile, Element>(p, w, group, lane, o, end_rows(p, w, group, row, lane, RowState{}),
                            staging);
}

}  // namespace abacist::cuda::sm90
