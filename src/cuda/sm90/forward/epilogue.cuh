// End of a query tile: normalise O, add the sink, write O and LSE.
#pragma once
#include <cuda/ptx>

#include "../../ptx/sm90.cuh"
#include "params.cuh"
#include "partial.cuh"
#include "softmax.cuh"

namespace abacist::cuda::sm90 {

// The same in all lanes, and the compiler knows it: what steers loops around wgmma must be uniform,
// else ring positions and descriptors live in ordinary registers and every wgmma waits for their
// transfer.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

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

// Whether an element of the thread's first, second row is not finite.
template <int N>
__device__ __forceinline__ void find_not_finite(const float (&o)[N], bool& row0, bool& row1) {
  float zero[4] = {};
#pragma unroll
  for (int e = 0; e < N; ++e) zero[e % 4] = fmaf(o[e], 0.0f, zero[e % 4]);
  row0 = !(zero[0] + zero[1] == 0.0f);
  row1 = !(zero[2] + zero[3] == 0.0f);
}

// What the epilogue needs to know of a thread's two rows once their last softmax is done.
struct RowEnds {
  float factor0, factor1;  // the result is o * factor; 0 if no key was seen, or if l overflowed
  bool check0, check1;     // O or l may have overflowed, look at them; by any thread of the row
};

// LSE of rows r and r + 8 of a tile, or, of a split, maximum and sum.
template <ForwardTile Tile>
__device__ __forceinline__ void write_lse(const ForwardParams& p, const Work& w, int r, float m0,
                                          float l0, float m1, float l1) {
  // Code of its own for what most tiles are, where registers allow.
  if ((Tile.chained() || !Tile.packs) && !Tile.splits && !(Tile.packs && p.row_heads > 1) &&
      w.mode != Work::redo) {
    const int i = w.position + r;
    float* lse = p.lse + w.batch * p.lse_stride_b + w.head * p.lse_stride_h + w.q_offset + i;
    if (i < w.len_q) lse[0] = lse_of(m0, l0);
    if (i + 8 < w.len_q) lse[8] = lse_of(m1, l1);
    return;
  }
#pragma unroll 1
  for (int second = 0; second < 2; ++second) {  // one after the other: few registers are left
    const RowPlace<Tile.packs> place(p, w, r + 8 * second);
    if (is_written(w, place, r + 8 * second)) {
      if (leaves_parts<Tile>(p)) {
        partial_sums(p, w)[partial_row(p, w, place)] = second ? float2{m1, l1} : float2{m0, l0};
        continue;
      }
      p.lse[w.batch * p.lse_stride_b + place.head * p.lse_stride_h + w.q_offset + place.position] =
          second ? lse_of(m1, l1) : lse_of(m0, l0);
    }
  }
}

// Normalisation and LSE of a thread's rows r and r + 8 of a tile, from m and l alone: with chained
// tiles this runs while the last P V is still in flight.
template <ForwardTile Tile, class Element>
__device__ __forceinline__ RowEnds end_rows(const ForwardParams& p, const Work& w, int r, int lane,
                                            const RowState& state) {
  float l0 = quad_sum(state.l0), l1 = quad_sum(state.l1), m0 = state.m0, m1 = state.m1;
  // |O| <= l max|v|, and len_k max|v| < 2^127 is the caller's part of the contract: while l <= 2
  // len_k nothing has overflowed, and looking at every element (64 instructions at d 128) is not
  // needed.
  const float safe = 2.0f * float(w.len_k);
  const bool redoable = w.parts[r / 64].traits & Work::redoable;
  RowEnds ends;
  const bool huge0 = is_huge<Element>(m0) && w.mode == Work::normal;
  const bool huge1 = is_huge<Element>(m1) && w.mode == Work::normal;
  ends.check0 = (redoable && (state.suspect0 || !(l0 <= safe))) || huge0;
  ends.check1 = (redoable && (state.suspect1 || !(l1 <= safe))) || huge1;
  if (huge0) l0 = NAN;
  if (huge1) l1 = NAN;
  bool empty0 = false, empty1 = false;
  if (w.some_empty) {
    const MaskRule rule(w);
    empty0 = rule.is_empty(row_position<Tile.packs>(p, w, r));
    empty1 = rule.is_empty(row_position<Tile.packs>(p, w, r + 8));
    if (empty0) m0 = -INFINITY, l0 = 1.0f;
    if (empty1) m1 = -INFINITY, l1 = 1.0f;
  }
  float scaled0 = 1.0f, scaled1 = 1.0f;
  if (!leaves_parts<Tile>(p) && p.sinks) {  // they join when all splits are there
    scaled0 = add_sink(p.sinks[RowPlace<Tile.packs>(p, w, r).head] * 1.4426950408889634f, m0, l0);
    scaled1 =
        add_sink(p.sinks[RowPlace<Tile.packs>(p, w, r + 8).head] * 1.4426950408889634f, m1, l1);
  }
  ends.factor0 = empty0 ? 0.0f : __fdividef(scaled0, l0);
  ends.factor1 = empty1 ? 0.0f : __fdividef(scaled1, l1);
  if ((leaves_parts<Tile>(p) || p.lse) && lane % 4 == 0) write_lse<Tile>(p, w, r, m0, l0, m1, l1);
  return ends;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ void store_if(bool condition, float* to, float x) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %2, 0;"
      "@p st.global.f32 [%0], %1;}" ::"l"(to),
      "f"(x), "r"(int(condition))
      : "memory");
}

// The same for an ordinary tile (Work::plain_end): l is a normal number there, or infinite, or
// NaN. No branch, and what it needs to know is read at once.
template <class Element>
__device__ __forceinline__ RowEnds end_plain_rows(const Work& w, int r, int lane,
                                                  const RowState& state) {
  float* const lse = w.parts[0].lse;
  const int rows = w.rows;
  const float safe = 2.0f * float(w.len_k);
  const float l0 = quad_sum(state.l0), l1 = quad_sum(state.l1);
  const bool huge0 = fabsf(state.m0) > kHugeScore<Element>,
             huge1 = fabsf(state.m1) > kHugeScore<Element>;
  RowEnds ends;
  ends.check0 = state.suspect0 | !(l0 <= safe) | huge0;
  ends.check1 = state.suspect1 | !(l1 <= safe) | huge1;
  ends.factor0 = huge0 ? NAN : reciprocal_approx(l0);
  ends.factor1 = huge1 ? NAN : reciprocal_approx(l1);
  constexpr float kLn2 = 0.6931471805599453f;
  const bool writes = lse && lane % 4 == 0;
  store_if(writes && r < rows, lse + r, (state.m0 + log2_approx(l0)) * kLn2);
  store_if(writes && r + 8 < rows, lse + r + 8, (state.m1 + log2_approx(l1)) * kLn2);
  return ends;
}

// Through shared memory, a warp on its own: 16 rows in swizzled panels of [16, 64] at `staging`,
// then TMA. That is 300 instructions less than from registers, and the stores do not hold up the
// warp. TMA clips at the end of the tensor only, so rows short of a sequence's end are copied one
// by one; so are those of packed heads, which are not one box for every number of heads, and those
// of a redo.
template <ForwardTile Tile, class Element>
__device__ __forceinline__ void store_rows_staged(const ForwardParams& p, const Work& w,
                                                  int warp_row, int lane,
                                                  const float (&o)[Tile.d_v / 2], float f0,
                                                  float f1, char* staging, bool plain) {
  // What steers the store, read before the first thing that waits. The position is that of the
  // warp's first row, unless heads are packed.
  const int position = w.position + warp_row, row = uniform(w.q_offset + position);
  const int head = uniform(w.head), batch = uniform(p.cu_seqlens_q ? 0 : w.batch);
  const bool inside = warp_row < w.rows;
  bool redo = false, clipped = true, some_empty = false;
  if (!plain) {
    redo = w.mode == Work::redo;
    clipped =
        !(Tile.packs && p.row_heads > 1) && !redo && (!p.cu_seqlens_q || position + 16 <= w.len_q);
    some_empty = w.some_empty;
  }
  const bool elected = lane == 0;
  if (elected) {
    // The last store must have read the buffer; before a redo, it must have written its result.
    if (redo) {
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
  if (some_empty) {
    // Not by a factor of 0: a V of NaN in a visited tile must not reach an empty row.
    const MaskRule rule(w);
#pragma unroll 1
    for (int i = lane; i < 16 * Tile.v_panels() * 8; i += 32) {
      const int empty_row = i / (Tile.v_panels() * 8), chunk = i % (Tile.v_panels() * 8);
      if (rule.is_empty(row_position<Tile.packs>(p, w, warp_row + empty_row))) {
        *reinterpret_cast<uint4*>(staging + (chunk / 8) * 2048 + empty_row * 128 +
                                  (chunk % 8) * 16) = uint4{};
      }
    }
  }
  ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
  __syncwarp();
  // No warp-wide operation under these conditions, and no else: ptxas would take the warp for
  // divergent from here on and keep ring positions and wgmma descriptors in ordinary registers.
  if (elected && clipped && inside) {
#pragma unroll
    for (int panel = 0; panel < Tile.v_panels(); ++panel) {
      const int32_t at[4] = {panel * 64, row, head, batch};
      ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_global, ::cuda::ptx::space_shared,
                                        &p.o_map, at, staging + panel * 2048);
    }
    ::cuda::ptx::cp_async_bulk_commit_group();
  }
  if (!clipped) {
    auto* out = static_cast<Element*>(p.o) + w.batch * p.o_stride_b;
#pragma unroll 1
    for (int i = lane; i < 16 * Tile.v_panels() * 8; i += 32) {
      const int copy_row = i / (Tile.v_panels() * 8), chunk = i % (Tile.v_panels() * 8);
      const RowPlace<Tile.packs> place(p, w, warp_row + copy_row);
      if (is_written(w, place, warp_row + copy_row) && chunk * 8 < p.d_v) {
        *reinterpret_cast<uint4*>(out + place.head * p.o_stride_h +
                                  (w.q_offset + int64_t(place.position)) * p.o_stride_s +
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
__device__ __forceinline__ void store_rows_direct(const ForwardParams& p, const Work& w, int r,
                                                  int lane, const float (&o)[Tile.d_v / 2],
                                                  const RowEnds& ends, bool plain) {
  auto* out = static_cast<Element*>(p.o) + w.batch * p.o_stride_b;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const RowPlace<Tile.packs> place(p, w, r + 8 * half);
    const bool written = plain ? r + 8 * half < w.rows : is_written(w, place, r + 8 * half);
    const float factor = half ? ends.factor1 : ends.factor0;
    Element* line =
        out + place.head * p.o_stride_h + (w.q_offset + int64_t(place.position)) * p.o_stride_s;
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
      if (written && column < p.d_v) {
        *reinterpret_cast<uint4*>(line + column) = uint4{words[0], words[1], words[2], words[3]};
      }
    }
  }
}

// Of bits of lanes, four lanes a row: all bits of each row that has one.
__device__ __forceinline__ uint32_t rows_of(uint32_t lanes) {
  lanes |= lanes >> 1;
  lanes |= lanes >> 2;
  return (lanes & 0x11111111u) * 15u;
}

// Writes O. Rows that must be redone with the true maximum are noted in `w`, and `redo` is set. o
// is only read: with chained tiles a wgmma is in flight, and ptxas would serialise.
template <ForwardTile Tile, class Element>
__device__ __forceinline__ void store_rows(const ForwardParams& p, Work& w, int group, int lane,
                                           const float (&o)[Tile.d_v / 2], const RowEnds& ends,
                                           char* staging, int* redo, bool plain) {
  ptx::test_delay();
  const int warp = threadIdx.x / 32 % 4, warp_row = group * 64 + warp * 16;
  const int r = warp_row + lane / 4;
  if (__any_sync(0xffffffffu, ends.check0 | ends.check1)) {
    bool wrong0, wrong1;
    find_not_finite(o, wrong0, wrong1);
    // No branch: see store_rows_staged.
    wrong0 = RowPlace<Tile.packs>(p, w, r).valid & (!(ends.factor0 > 0.0f) | wrong0);
    wrong1 = RowPlace<Tile.packs>(p, w, r + 8).valid & (!(ends.factor1 > 0.0f) | wrong1);
    const uint32_t rows0 =
        __ballot_sync(0xffffffffu, wrong0) & rows_of(__ballot_sync(0xffffffffu, ends.check0));
    const uint32_t rows1 =
        __ballot_sync(0xffffffffu, wrong1) & rows_of(__ballot_sync(0xffffffffu, ends.check1));
    if ((rows0 | rows1) && lane == 0) {
      w.parts[group].redo_rows[warp][0] = rows0;
      w.parts[group].redo_rows[warp][1] = rows1;
      *static_cast<volatile int*>(redo) = 1;
    }
  }
  if (leaves_parts<Tile>(p)) {
    if constexpr (Tile.splits) store_partial_rows<Tile.d_v>(p, w, r, lane, o);
  } else if constexpr (Tile.staged_output()) {
    store_rows_staged<Tile, Element>(p, w, warp_row, lane, o, ends.factor0, ends.factor1, staging,
                                     plain);
  } else {
    store_rows_direct<Tile, Element>(p, w, r, lane, o, ends, plain);
  }
}

// A query tile none of whose rows sees a key.
template <ForwardTile Tile, class Element>
__device__ __forceinline__ void write_empty_rows(const ForwardParams& p, Work& w, int group,
                                                 int lane, char* staging, int* redo) {
  const float o[Tile.d_v / 2] = {};
  const int r = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const RowEnds ends = end_rows<Tile, Element>(p, w, r, lane, RowState{});
  if (leaves_parts<Tile>(p)) return;  // nobody reads such a row's O
  store_rows<Tile, Element>(p, w, group, lane, o, ends, staging, redo, false);
}

}  // namespace abacist::cuda::sm90
