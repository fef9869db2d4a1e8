// Online softmax of one warpgroup's score tile, with and without a maximum per score.
//
// Exact for any m as long as nothing overflows:  O = sum_j 2^(x_j - m) v_j / sum_j 2^(x_j - m),
// with x = scale_log2 s. (Online softmax: Milakov and Gimelshein 2018; FlashAttention,
// algorithm 1.)
//
//   online   m is the true running maximum; O and l are rescaled when it rises. Boundary tiles, the
//            first tile of a query tile, and everything in a redo.
//   frozen   m stays what it was, no maximum per score. If a thread's partial row sum passes
//            kRaiseThreshold, m rises by a whole exponent, so that the rescaling of O, l and this
//            tile's p is a power of two and exact. If p overflowed before that, or O did, the
//            result is not finite: the query tile is done again with `online`, once. A row is
//            frozen only after it has seen a visible key, so m is a real score. O can overflow only
//            while l > len_k (end_rows says why), which is remembered when l is scaled down.
//
// Measured on the loop alone (one H200): online 630..663, frozen 733..745 TFLOP/s at d 128.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "../../ptx/sm90.cuh"

namespace abacist::cuda::sm90 {

// The running values of the two rows that a thread holds of every score tile.
struct RowState {
  float m0, m1;  // log2 units of the scaled score; never -inf in use (see online)
  float l0, l1;  // this thread's part of the sum
  // l has been above what is safe for O before m rose (see end_rows). A row's own: whether it is
  // done again, and so its bits, must not depend on other rows of the tile.
  bool suspect0, suspect1;
};

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Far above what ordinary scores do after their first tile, and as far below overflow as that
// allows: bf16 has float's exponents, so a tile whose scores rise by less than 2^103 is not redone.
// (With 2^64, logits that rise by 0.35 nats a key were redone in every query tile: half the speed.)
// f16 ends at 65,504; p never passes the threshold unscaled.
template <class Element>
inline constexpr float kRaiseThreshold = std::is_same_v<Element, __nv_bfloat16> ? 0x1p24f : 0x1p10f;

// Log2 units. Up to here a weight of 1 is off by less than its rounding to the element type
// (softmax_online; for bf16 that would hold to 2^16). 16k keys that rise by 0.35 nats each reach
// 8,273: with 2^13 for bf16 every query tile of them was done twice.
template <class Element>
inline constexpr float kHugeScore = std::is_same_v<Element, __nv_bfloat16> ? 0x1p15f : 0x1p13f;

// Whether a row's maximum is; -inf, for a row that has seen nothing, is not.
template <class Element>
__device__ __forceinline__ bool is_huge(float m) {
  return fabsf(m) > kHugeScore<Element> && fabsf(m) < INFINITY;
}

// The sink joins a row: m and l with it; what the row's weights are scaled by. One of NaN passes.
__device__ __forceinline__ float add_sink(float sink, float& m, float& l) {
  if (sink == -INFINITY) return 1.0f;
  const float higher = fmaxf(m, sink);
  const float scaled = ptx::exp2_approx(m - higher);
  l = l * scaled + ptx::exp2_approx(sink - higher);
  m = higher;
  return scaled;
}

// -inf for a row without keys (m = -inf, l = 1); NaN if keys are there but all their scores -inf.
__device__ __forceinline__ float lse_of(float m, float l) {
  return l == 0.0f ? NAN : (m + __log2f(l)) * 0.6931471805599453f;
}

// ptxas moves nothing over it. `never` is 0.
__device__ __forceinline__ void end_block(int never) {
#pragma unroll 1
  for (int i = 0; i < never; ++i) asm volatile("nanosleep.u32 20;" ::: "memory");
}

template <int N>
__device__ __forceinline__ void scale_rows(float (&x)[N], float f0, float f1) {
#pragma unroll
  for (int i = 0; i < N; i += 4) x[i] *= f0, x[i + 1] *= f0, x[i + 2] *= f1, x[i + 3] *= f1;
}

// s -> p in place, l and m updated. a0, a1: what O must be multiplied with before this tile's P V.
// scale_log2 is above zero (fill_score); s of a masked element is -inf.
// What rounding takes from max(s) scale_log2, up to 2^-24 of it, remains in all exponents of a row.
// For huge scores that is too much: the largest weight is not 1, past 2^32 not even finite. Those
// rows are done again (end_rows), where products are rounded before anything is subtracted:
// precise.
template <int N>
__device__ __forceinline__ void softmax_online(float (&s)[N], RowState& row, float scale_log2,
                                               bool first, bool precise, float safe_sum, float& a0,
                                               float& a1) {
  row.suspect0 = !first && (row.suspect0 || !(row.l0 <= safe_sum));
  row.suspect1 = !first && (row.suspect1 || !(row.l1 <= safe_sum));
  float x0 = -INFINITY, x1 = -INFINITY;
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    x0 = fmaxf(x0, fmaxf(s[i], s[i + 1]));
    x1 = fmaxf(x1, fmaxf(s[i + 2], s[i + 3]));
  }
  x0 = quad_max(x0) * scale_log2;
  x1 = quad_max(x1) * scale_log2;
  if (!first) {
    x0 = fmaxf(x0, row.m0);
    x1 = fmaxf(x1, row.m1);
  }
  // A row that has seen nothing yet: 2^(-inf - 0) = 0 for every element, and no NaN.
  const float use0 = x0 == -INFINITY ? 0.0f : x0;
  const float use1 = x1 == -INFINITY ? 0.0f : x1;
  if (precise) {  // uniform
    scale_rows(s, scale_log2, scale_log2);
    scale_log2 = 1.0f;
  }
  a0 = first ? 0.0f : ptx::exp2_approx(row.m0 - use0);
  a1 = first ? 0.0f : ptx::exp2_approx(row.m1 - use1);
  row.m0 = x0;
  row.m1 = x1;
  float t0 = 0.0f, t1 = 0.0f;
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    s[i] = ptx::exp2_approx(fmaf(s[i], scale_log2, -use0));
    s[i + 1] = ptx::exp2_approx(fmaf(s[i + 1], scale_log2, -use0));
    s[i + 2] = ptx::exp2_approx(fmaf(s[i + 2], scale_log2, -use1));
    s[i + 3] = ptx::exp2_approx(fmaf(s[i + 3], scale_log2, -use1));
    t0 += s[i] + s[i + 1];
    t1 += s[i + 2] + s[i + 3];
  }
  row.l0 = first ? t0 : fmaf(row.l0, a0, t0);
  row.l1 = first ? t1 : fmaf(row.l1, a1, t1);
}

// The first tile of a query tile, without what softmax_online must think of: m is the maximum of
// each row's first `Columns` scores, among which there is one that is visible. Others may be
// above it; what follows is as for a frozen maximum.
template <int Columns, int N>
__device__ __forceinline__ void first_maximum(const float (&s)[N], RowState& row,
                                              float scale_log2) {
  float x0 = -INFINITY, x1 = -INFINITY;
#pragma unroll
  for (int i = 0; i < Columns / 2; i += 4) {
    x0 = fmaxf(x0, fmaxf(s[i], s[i + 1]));
    x1 = fmaxf(x1, fmaxf(s[i + 2], s[i + 3]));
  }
  row.m0 = quad_max(x0) * scale_log2;
  row.m1 = quad_max(x1) * scale_log2;
  row.l0 = row.l1 = 0.0f;
  row.suspect0 = row.suspect1 = false;
}

// Elements [Begin, End) of s -> 2^exponent in place; their sums are added to t0, t1. `exponent` is
// given an element, which of the thread's two rows it is of, and its column less that of the first.
template <int Begin, int End, int N, class Exponent>
__device__ __forceinline__ void take_exponentials(float (&s)[N], Exponent exponent, float& t0,
                                                  float& t1) {
#pragma unroll
  for (int i = Begin; i < End; i += 4) {
    s[i] = ptx::exp2_approx(exponent(s[i], 0, i * 2));
    s[i + 1] = ptx::exp2_approx(exponent(s[i + 1], 0, i * 2 + 1));
    s[i + 2] = ptx::exp2_approx(exponent(s[i + 2], 1, i * 2));
    s[i + 3] = ptx::exp2_approx(exponent(s[i + 3], 1, i * 2 + 1));
    t0 += s[i] + s[i + 1];
    t1 += s[i + 2] + s[i + 3];
  }
}

// The same with m as it stands.
template <int Begin, int End, int N>
__device__ __forceinline__ void softmax_frozen_part(float (&s)[N], const RowState& row,
                                                    float scale_log2, float& t0, float& t1) {
  const auto exponent = [&](float x, int half, int) {
    return fmaf(x, scale_log2, half ? -row.m1 : -row.m0);
  };
  take_exponentials<Begin, End>(s, exponent, t0, t1);
}

template <int N>
__device__ __forceinline__ void softmax_frozen(float (&s)[N], const RowState& row, float scale_log2,
                                               float& t0, float& t1) {
  t0 = t1 = 0.0f;
  softmax_frozen_part<0, N>(s, row, scale_log2, t0, t1);
}

// How far m must rise for a row whose partial sums in the tile are t: a whole exponent, 0 if none.
template <class Element>
__device__ __forceinline__ int raise_exponent(float t) {
  const float worst = quad_max(t);
  if (!(worst > kRaiseThreshold<Element>)) return 0;  // NaN: nothing to gain, the redo sees it
  return min(((__float_as_int(worst) >> 23) & 255) - 127, 126);
}
__device__ __forceinline__ float power_of_two(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}

// The rare branch after softmax_frozen: rescales this tile's p, l and m of the rows that need it; O
// must then be multiplied with f0, f1. Rows that need nothing get 1, so a row's bits depend on it
// alone.
template <class Element, int N>
__device__ __forceinline__ void raise_rows(float (&s)[N], RowState& row, float t0, float t1,
                                           float& f0, float& f1) {
  const int e0 = raise_exponent<Element>(t0), e1 = raise_exponent<Element>(t1);
  f0 = power_of_two(-e0);
  f1 = power_of_two(-e1);
  row.suspect0 |= e0 > 0;
  row.suspect1 |= e1 > 0;
  row.m0 += float(e0);
  row.m1 += float(e1);
  row.l0 *= f0;
  row.l1 *= f1;
  scale_rows(s, f0, f1);
}

// Of a row's columns that a thread has (8 i + 2 (lane % 4) + {0, 1}), those before `column` of the
// tile (less 2 (lane % 4)): a bit each.
__device__ __forceinline__ uint32_t bits_before(int column) {
  column = max(column, 0);
  uint32_t beyond;
  asm("shl.b32 %0, -1, %1;" : "=r"(beyond) : "r"(column / 8 * 2 + min(column % 8, 2)));
  return ~beyond;  // 32 and more: all
}

// Elements that are not kept become -inf. Bits of the thread's two rows.
template <int N>
__device__ __forceinline__ void mask_scores(float (&s)[N], uint32_t keep0, uint32_t keep1) {
  static_assert(N <= 64);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const uint32_t keep = row ? keep1 : keep0;
#pragma unroll
    for (int j = 0; j < N / 2; ++j) {
      float& x = s[j / 2 * 4 + row * 2 + j % 2];
      x = keep >> j & 1 ? x : -INFINITY;
    }
  }
}

}  // namespace abacist::cuda::sm90
