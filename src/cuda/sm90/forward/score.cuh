// Score modifications, before the mask: softcap, then ALiBi. Only the Modified instances have this
// code.
//
//   x = scale q.k;  x = cap tanh(x / cap);  x = x - slope |i + shift - j|;  left in s: x log2(e)
//
// tanh(y) = 1 - 2 / (1 + e^2y) cancels where y is small: an error of 1e-7 cap, however small the
// score (cap 1e4: LSE off by 1e-3). Below 0.625 it is y + y^3 P(y^2) instead, P as in Cephes'
// tanhf: a few units in the last place of the score. tanh.approx would be one instruction, but its
// error of 2^-11 is one of 0.024 at cap 50.
#pragma once
#include "../../ptx/sm90.cuh"
#include "params.cuh"

namespace abacist::cuda::sm90 {

// tanh(y) of t = 2 log2(e) y; the polynomial is one of t, too (few registers are left here).
__device__ __forceinline__ float tanh_of(float t) {
  constexpr double kY = 0.34657359027997264, kZ = kY * kY;  // y = kY t
  const float z = t * t;
  float p = fmaf(float(-5.70498872745e-3 * kZ * kZ * kZ * kZ * kZ * kY), z,
                 float(2.06390887954e-2 * kZ * kZ * kZ * kZ * kY));
  p = fmaf(p, z, float(-5.37397155531e-2 * kZ * kZ * kZ * kY));
  p = fmaf(p, z, float(1.33314422036e-1 * kZ * kZ * kY));
  p = fmaf(p, z, float(-3.33332819422e-1 * kZ * kY));
  p = fmaf(p, z, float(kY)) * t;
  if (fabsf(t) < 1.8f) return p;
  return fmaf(__fdividef(1.0f, ptx::exp2_approx(t) + 1.0f), -2.0f, 1.0f);
}

// Per row of this thread: the slope, and i + shift - j for the first of its columns.
template <int N>
__device__ __forceinline__ void modify_scores(float (&s)[N], const ForwardParams& p, float slope0,
                                              float slope1, float diagonal0, float diagonal1) {
  if (p.softcap_out != 0.0f) {
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = tanh_of(s[i] * p.softcap_in) * p.softcap_out;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] *= p.scale_log2;
  }
  if (p.alibi_slopes) {
    slope0 *= 1.4426950408889634f;
    slope1 *= 1.4426950408889634f;
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float d0 = diagonal0 - float(i * 2), d1 = diagonal1 - float(i * 2);
      s[i] = fmaf(-slope0, fabsf(d0), s[i]);
      s[i + 1] = fmaf(-slope0, fabsf(d0 - 1.0f), s[i + 1]);
      s[i + 2] = fmaf(-slope1, fabsf(d1), s[i + 2]);
      s[i + 3] = fmaf(-slope1, fabsf(d1 - 1.0f), s[i + 3]);
    }
  }
}

}  // namespace abacist::cuda::sm90
