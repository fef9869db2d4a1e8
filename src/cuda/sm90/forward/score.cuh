// Score modifications, before the mask: softcap, then ALiBi. Only Modified instances and the kernel
// for short sequences have this code.
//
//   x = scale q.k;  x = cap tanh(x / cap);  x = x - slope |i + shift - j|;  in log2 units
//
// In first, boundary and online tiles, with softcap and ALiBi together, and in kernels that can
// split keys (of d 256 all of these) x replaces s: modify_scores. Other tiles, most of them, take
// it as they take their exponentials (ScoreForm, exponentials_of): fewer instructions, and those of
// tanh run beside the MUFU's.
//
// tanh(y) = 1 - 2 / (1 + e^2y) cancels where y is small: an error of 1e-7 cap, however small the
// score (cap 1e4: LSE off by 1e-3). Below 0.625 it is y times a polynomial in y^2 instead, off by
// 1.1e-7 of its size. (tanh.approx would be one instruction, but its error of 2^-11 is one of 0.024
// at cap 50.) Which of them is the score's own affair, so that its bits do not depend on its
// neighbours; but a warp whose scores are all below 0.625 cap, as most are, is spared the two MUFU
// instructions of the other.
#pragma once
#include "../../ptx/sm90.cuh"
#include "params.cuh"
#include "softmax.cuh"

namespace abacist::cuda::sm90 {

// Softcap. u = score / (cap kSoftcapUnit); the result, in log2 units, less m.
template <bool Small>
__device__ __forceinline__ float capped_less(float u, const ForwardParams& p, float m) {
  const float z = u * u;
  float quotient = fmaf(p.softcap_series[4], z, p.softcap_series[3]);
#pragma unroll
  for (int i = 2; i >= 0; --i) quotient = fmaf(quotient, z, p.softcap_series[i]);
  float x = fmaf(quotient, u, -m);
  if (!Small && fabsf(u) >= 2.0f) {
    constexpr float kExponent = float(2 * 1.4426950408889634 * kSoftcapUnit);
    const float part = __fdividef(1.0f, ptx::exp2_approx(u * kExponent) + 1.0f);
    x = fmaf(fmaf(part, -2.0f, 1.0f), p.score_log2, -m);  // 2 cap may be infinite
  }
  return x;
}

// s -> u; whether all of the warp are small.
template <int N>
__device__ __forceinline__ bool count_in_caps(float (&s)[N], const ForwardParams& p) {
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    s[i] *= p.softcap_in;
    bits |= __float_as_uint(s[i]);
  }
  return !__any_sync(0xffffffffu, bits & 0x40000000u);  // |u| >= 2, or NaN
}

// u -> capped score in log2 units, less m0 or m1.
template <ForwardTile Tile, bool Small, int N>
__device__ __forceinline__ void cap_scores(float (&s)[N], const ForwardParams& p, float m0,
                                           float m1) {
  // With more of them under way ptxas spills.
  constexpr int kAtOnce = Tile.d_qk > 128 || Tile.splits ? 16 : N;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    s[i] = capped_less<Small>(s[i], p, i % 4 < 2 ? m0 : m1);
    if (i % kAtOnce == kAtOnce - 1 && i + 1 < N) end_block(p.never);
  }
}

// ALiBi, per row of a thread: the slope in log2 units, and i + shift - j for its first column of
// key tile 0.
struct AlibiRows {
  float slope0, slope1;
  int diagonal0, diagonal1;
};

// column0: the first key of the tile.
template <ForwardTile Tile, int N>
__device__ __forceinline__ void modify_scores(float (&s)[N], const ForwardParams& p,
                                              const AlibiRows& alibi, int column0) {
  const bool capped = p.modified == ForwardParams::capped;
  if (capped) {
    // Split keys wait for memory, and for instructions that miss the cache: one query, d 64, 8k
    // keys, no softcap: 13.7 us with code for small scores, 12.7 without.
    if constexpr (Tile.only_splits()) {
      scale_rows(s, p.softcap_in, p.softcap_in);
      cap_scores<Tile, false>(s, p, 0.0f, 0.0f);
    } else if (count_in_caps(s, p)) {
      cap_scores<Tile, true>(s, p, 0.0f, 0.0f);
    } else {
      cap_scores<Tile, false>(s, p, 0.0f, 0.0f);
    }
  }
  const float factor = capped ? 1.0f : p.score_log2;
  if (p.alibi_slopes) {
    const float diagonal0 = float(alibi.diagonal0 - column0);
    const float diagonal1 = float(alibi.diagonal1 - column0);
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float d0 = diagonal0 - float(i * 2), d1 = diagonal1 - float(i * 2);
      s[i] = fmaf(s[i], factor, -alibi.slope0 * fabsf(d0));
      s[i + 1] = fmaf(s[i + 1], factor, -alibi.slope0 * fabsf(d0 - 1.0f));
      s[i + 2] = fmaf(s[i + 2], factor, -alibi.slope1 * fabsf(d1));
      s[i + 3] = fmaf(s[i + 3], factor, -alibi.slope1 * fabsf(d1 - 1.0f));
    }
  } else if (!capped) {
    scale_rows(s, factor, factor);
  }
}

// How the scores of a tile become exponents.
struct ScoreForm {
  enum Kind { modified, exponents, capped_small, before_diagonal } kind;
  float nearest0, nearest1;  // before_diagonal: the last column's distance
};

// Of a frozen tile without a mask. What is left for the exponentials is softcap alone, where it is
// a polynomial, or ALiBi alone where all columns lie before the diagonal, as under a causal mask:
// there the distance is linear in the column. (From the nearest column, whose bias is finite if any
// is.)
template <ForwardTile Tile, int N>
__device__ __forceinline__ ScoreForm form_of(float (&s)[N], const ForwardParams& p,
                                             const RowState& row, const AlibiRows& alibi,
                                             int column0) {
  const bool capped = p.modified == ForwardParams::capped;
  if (capped && !p.alibi_slopes) {
    if (count_in_caps(s, p)) return {ScoreForm::capped_small};
    cap_scores<Tile, false>(s, p, row.m0, row.m1);
    return {ScoreForm::exponents};
  }
  if (!capped && p.alibi_slopes) {
    const int last = column0 + 2 * N - 7;
    const int nearest0 = alibi.diagonal0 - last, nearest1 = alibi.diagonal1 - last;
    if (__all_sync(0xffffffffu, min(nearest0, nearest1) >= 0))
      return {ScoreForm::before_diagonal, float(nearest0), float(nearest1)};
  }
  modify_scores<Tile>(s, p, alibi, column0);
  return {ScoreForm::modified};
}

// Elements [Begin, End) of such a tile: s -> p; their sums are added to t0, t1.
template <int Begin, int End, int N>
__device__ __forceinline__ void exponentials_of(float (&s)[N], const ForwardParams& p,
                                                const RowState& row, const ScoreForm& form,
                                                const AlibiRows& alibi, float& t0, float& t1) {
  if (form.kind == ScoreForm::capped_small) {
    const auto exponent = [&](float u, int half, int) {
      return capped_less<true>(u, p, half ? row.m1 : row.m0);
    };
    return take_exponentials<Begin, End>(s, exponent, t0, t1);
  }
  if (form.kind == ScoreForm::before_diagonal) {
    const float bias0 = fmaf(-alibi.slope0, form.nearest0, -row.m0);
    const float bias1 = fmaf(-alibi.slope1, form.nearest1, -row.m1);
    const auto exponent = [&](float x, int half, int column) {
      const float back = float(2 * N - 7 - column);
      return fmaf(x, p.score_log2,
                  half ? fmaf(-alibi.slope1, back, bias1) : fmaf(-alibi.slope0, back, bias0));
    };
    return take_exponentials<Begin, End>(s, exponent, t0, t1);
  }
  if (form.kind == ScoreForm::exponents) {
    const auto exponent = [](float x, int, int) { return x; };
    return take_exponentials<Begin, End>(s, exponent, t0, t1);
  }
  softmax_frozen_part<Begin, End>(s, row, 1.0f, t0, t1);
}

}  // namespace abacist::cuda::sm90
