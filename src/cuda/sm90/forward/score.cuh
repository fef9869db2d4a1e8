// Score modifications, before the mask: softcap, then ALiBi. Only the Modified instances have this
// code.
//
//   x = scale q.k;  x = cap tanh(x / cap);  x = x - slope |i + shift - j|;  left in s: x log2(e)
//
// tanh(y) = 1 - 2 / (1 + e^2y): about 1e-7 absolute, so cap * 1e-7 in the score. tanh.approx would
// be one instruction, but its error of 2^-11 is one of 0.024 at cap 50.
#pragma once
#include "../../ptx/sm90.cuh"
#include "params.cuh"

namespace abacist::cuda::sm90 {

// diagonal: i + shift - j of this thread's first row and the first of its columns.
template <int N>
__device__ __forceinline__ void modify_scores(float (&s)[N], const ForwardParams& p, int head,
                                              float diagonal) {
  if (p.softcap_out != 0.0f) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float e = ptx::exp2_approx(s[i] * p.softcap_in);
      s[i] = fmaf(__fdividef(-2.0f, e + 1.0f), p.softcap_out, p.softcap_out);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] *= p.scale_log2;
  }
  if (p.alibi_slopes) {
    const float slope = p.alibi_slopes[head] * 1.4426950408889634f;
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float d = diagonal - float(i * 2);
      s[i] = fmaf(-slope, fabsf(d), s[i]);
      s[i + 1] = fmaf(-slope, fabsf(d - 1.0f), s[i + 1]);
      s[i + 2] = fmaf(-slope, fabsf(d + 8.0f), s[i + 2]);
      s[i + 3] = fmaf(-slope, fabsf(d + 7.0f), s[i + 3]);
    }
  }
}

}  // namespace abacist::cuda::sm90
