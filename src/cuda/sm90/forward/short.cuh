// Exact attention for short sequences, forward: O = softmax(scale Q K^T + mask) V, LSE.
//
// A warp on its own takes 16 query rows of one head against all keys that they see, 16 keys at a
// time, with online softmax. No shared memory and no barrier: what hides the latency of memory is
// that every warp asks for Q and its first K and V at once, 12 KB at d 128, and that 8 warps or
// more do so on every SM. Tiles of 128 rows and 128 keys spend 3 us on a sequence of 16 tokens,
// whose bytes need 0.5.
//
// Everything goes from memory to fragments of mma.m16n8k16 by 16-byte loads, because sums may be
// taken in any order:
//   S = Q K^T   the 8 elements of a load are the thread's columns of two mma, for Q and K alike
//   O = P V     column n of mma t is column n * (d_v / 8) + t of V, so that a thread's columns lie
//               side by side, those of O, too
//
// Bytes: Q, K, V, O once (K and V once for each 16 rows). FLOPs per 16 rows and 16 keys:
// 1,024 (d_qk + d_v).
#pragma once
#include "../../ptx/mma.cuh"
#include "../../ptx/sm90.cuh"
#include "epilogue.cuh"
#include "params.cuh"
#include "score.cuh"
#include "softmax.cuh"

namespace abacist::cuda::sm90 {

// [2][4] scores of rows g, g + 8 (lane = 4 g + c) against keys 2c, 2c + 1 of the first, second 8 of
// 16 keys.
using ShortScores = float[2][4];

// 8 elements at `from`, or zeros.
__device__ __forceinline__ uint4 load_8(const void* from, bool there) {
  return there ? __ldg(static_cast<const uint4*>(from)) : uint4{};
}

// Chunks 4 i + c (of 8 elements) of a row of d elements.
template <int Chunks, class Element>
__device__ __forceinline__ void load_row(uint4 (&to)[Chunks], const Element* row, int d,
                                         bool there) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < Chunks; ++i) {
    const int column = 32 * i + 8 * c;
    to[i] = load_8(row + column, there && column < d);
  }
}

template <class Element, int Chunks>
__device__ __forceinline__ void short_qk(ShortScores& s, const uint4 (&q0)[Chunks],
                                         const uint4 (&q1)[Chunks], const uint4 (&k)[2][Chunks]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    s[half][0] = s[half][1] = s[half][2] = s[half][3] = 0.0f;
#pragma unroll
    for (int i = 0; i < Chunks; ++i) {
      const uint32_t first[4] = {q0[i].x, q1[i].x, q0[i].y, q1[i].y};
      const uint32_t second[4] = {q0[i].z, q1[i].z, q0[i].w, q1[i].w};
      ptx::mma_16x8x16<Element>(s[half], first, k[half][i].x, k[half][i].y);
      ptx::mma_16x8x16<Element>(s[half], second, k[half][i].z, k[half][i].w);
    }
  }
}

__device__ __forceinline__ uint32_t word(const uint4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// v[i]: of keys 2c, 2c + 1, 2c + 8, 2c + 9 the columns [g Tiles, (g + 1) Tiles).
template <class Element, int Tiles>
__device__ __forceinline__ void short_pv(float (&o)[Tiles][4], const ShortScores& s,
                                         const uint4 (&v)[4][Tiles / 8]) {
  uint32_t p[4];
#pragma unroll
  for (int j = 0; j < 4; ++j)
    p[j] = ptx::pack<Element>(s[j / 2][j % 2 * 2], s[j / 2][j % 2 * 2 + 1]);
#pragma unroll
  for (int t = 0; t < Tiles; ++t) {
    const unsigned order = t % 2 ? 0x7632 : 0x5410;  // element t % 2 of either word
    const int chunk = t / 8, at = t % 8 / 2;
    ptx::mma_16x8x16<Element>(o[t], p,
                              __byte_perm(word(v[0][chunk], at), word(v[1][chunk], at), order),
                              __byte_perm(word(v[2][chunk], at), word(v[3][chunk], at), order));
  }
}

// One row of the two that a thread has a part of.
struct ShortRow {
  int position;
  int begin, end;  // of the keys it sees; none for a row past the end
  float m, l;      // log2 units; this thread's part of the sum
};

// s -> p for row `half`; what O and l were to be multiplied with.
__device__ __forceinline__ float short_softmax(const ForwardParams& p, ShortScores& s, int half,
                                               int key0, ShortRow& row, float slope, int shift) {
  float top = row.m;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int e = 2 * half; e < 2 * half + 2; ++e) {
      const int key = key0 + 8 * j + e % 2;
      float x = p.modified == ForwardParams::capped
                    ? capped_less<false>(s[j][e] * p.softcap_in, p, 0.0f)
                    : s[j][e] * p.score_log2;
      x = fmaf(-slope, fabsf(float(row.position + shift - key)), x);
      s[j][e] = key >= row.begin && key < row.end ? x : -INFINITY;
      top = fmaxf(top, s[j][e]);
    }
  }
  top = quad_max(top);
  const float use = top == -INFINITY ? 0.0f : top;  // nothing seen yet
  const float scaled = ptx::exp2_approx(row.m - use);
  row.m = top;
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int e = 2 * half; e < 2 * half + 2; ++e) {
      s[j][e] = ptx::exp2_approx(s[j][e] - use);
      sum += s[j][e];
    }
  }
  row.l = fmaf(row.l, scaled, sum);
  return scaled;
}

// LSE and O of row `half`; row.l is the whole sum. All lanes call it: those of a row past the end
// write nothing.
template <int Tiles, class Element>
__device__ __forceinline__ void end_short_row(const ShortParams& p, const float (&o)[Tiles][4],
                                              int half, const ShortRow& row, int len_q, int head,
                                              int batch, int q_offset) {
  const int c = threadIdx.x % 4;
  const bool there = row.position < len_q;
  float m = row.m, l = row.l, scaled = 1.0f;
  const bool empty = row.begin >= row.end;
  if (empty) m = -INFINITY, l = 1.0f;
  if (p.sinks) scaled = add_sink(p.sinks[head] * 1.4426950408889634f, m, l);
  const float factor = empty ? 0.0f : __fdividef(scaled, l);
  if (p.lse && c == 0 && there) {
    p.lse[batch * p.lse_stride_b + head * p.lse_stride_h + q_offset + row.position] = lse_of(m, l);
  }
  // The thread's columns lie side by side, in kChunks pieces of 16 bytes. With four the quad
  // exchanges them, so that a store of the warp writes whole sectors and not halves.
  constexpr int kChunks = Tiles / 4;
  uint32_t words[4][kChunks];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int t = chunk % (Tiles / 8) * 8 + 2 * i, e = 2 * half + chunk / (Tiles / 8);
      // Not by multiplying with 0: a V of NaN must not reach an empty row.
      words[i][chunk] = empty ? 0u : ptx::pack<Element>(o[t][e] * factor, o[t + 1][e] * factor);
    }
    if constexpr (kChunks == 4) transpose_quad(words[i], c);
  }
  Element* line = static_cast<Element*>(p.o) + batch * p.o_stride_b + head * p.o_stride_h +
                  (q_offset + int64_t(row.position)) * p.o_stride_s;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int column = 8 * (kChunks == 4 ? 4 * chunk + c : kChunks * c + chunk);
    if (there && column < p.d_v) {
      *reinterpret_cast<uint4*>(line + column) =
          uint4{words[0][chunk], words[1][chunk], words[2][chunk], words[3][chunk]};
    }
  }
}

// D: columns computed with, 64 or 128, for Q, K and V alike. Narrower ones read zeros.
template <int D, class Element>
__global__ void __launch_bounds__(kShortThreads, 2)
    short_forward_kernel(const __grid_constant__ ShortParams p) {
  constexpr int kChunks = D / 32, kTiles = D / 8;
  const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  // Heads of the same rows side by side: they are in memory, too.
  const int item = blockIdx.x * (kShortThreads / 32) + threadIdx.x / 32;
  const int rows = item / p.h_q, head = item - rows * p.h_q;
  const int batch = rows / p.tiles_per_head, row0 = (rows - batch * p.tiles_per_head) * 16;
  if (batch >= p.b) return;
  const SequencePart queries(p.cu_seqlens_q, batch, p.s_q, p.total_q);
  SequencePart keys(p.cu_seqlens_k, batch, p.s_k, p.total_k);
  if (p.k_lengths) keys.length = min(max(p.k_lengths[batch], 0), keys.length);
  if (row0 >= queries.length) return;

  const MaskRule rule(p, queries.length, keys.length);
  const int last = min(row0 + 16, queries.length) - 1;
  const int first_key = rule.row_begin(row0), end_key = rule.row_end(last);
  auto make_row = [&](int position) {
    const bool there = position < queries.length;
    return ShortRow{position, rule.row_begin(position), there ? rule.row_end(position) : 0,
                    -INFINITY, 0.0f};
  };
  ShortRow row[2] = {make_row(row0 + g), make_row(row0 + g + 8)};
  const int shift = p.top_left ? 0 : keys.length - queries.length;
  const float slope = p.alibi_slopes ? p.alibi_slopes[head] * 1.4426950408889634f : 0.0f;

  const int kv_head = head / p.heads_per_kv_head;
  auto* const q = static_cast<const Element*>(p.q) + (p.cu_seqlens_q ? 0 : batch * p.q_stride_b) +
                  head * p.q_stride_h + queries.offset * p.q_stride_s;
  auto* const k = static_cast<const Element*>(p.k) + (p.cu_seqlens_k ? 0 : batch * p.k_stride_b) +
                  kv_head * p.k_stride_h + keys.offset * p.k_stride_s;
  auto* const v = static_cast<const Element*>(p.v) + (p.cu_seqlens_k ? 0 : batch * p.v_stride_b) +
                  kv_head * p.v_stride_h + keys.offset * p.v_stride_s;
  uint4 q0[kChunks], q1[kChunks];
  load_row(q0, q + row[0].position * p.q_stride_s, p.d_qk, row[0].position < queries.length);
  load_row(q1, q + row[1].position * p.q_stride_s, p.d_qk, row[1].position < queries.length);

  float o[kTiles][4] = {};
#pragma unroll 1
  for (int key0 = first_key / 16 * 16; key0 < end_key; key0 += 16) {
    ptx::test_delay();
    // What no row sees is not read: it may be another sequence's.
    auto is_read = [&](int key) { return key >= first_key && key < end_key; };
    uint4 k_part[2][kChunks], v_part[4][kTiles / 8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = key0 + g + 8 * half;
      load_row(k_part[half], k + key * p.k_stride_s, p.d_qk, is_read(key));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = key0 + 2 * c + i % 2 + i / 2 * 8;
#pragma unroll
      for (int chunk = 0; chunk < kTiles / 8; ++chunk) {
        const int column = g * kTiles + 8 * chunk;
        v_part[i][chunk] = load_8(v + key * p.v_stride_s + column, is_read(key) && column < p.d_v);
      }
    }
    ShortScores s;
    short_qk<Element>(s, q0, q1, k_part);
    const float scaled0 = short_softmax(p, s, 0, key0 + 2 * c, row[0], slope, shift);
    const float scaled1 = short_softmax(p, s, 1, key0 + 2 * c, row[1], slope, shift);
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      o[t][0] *= scaled0, o[t][1] *= scaled0, o[t][2] *= scaled1, o[t][3] *= scaled1;
    short_pv<Element>(o, s, v_part);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    row[half].l = quad_sum(row[half].l);
    end_short_row<kTiles, Element>(p, o, half, row[half], queries.length, head, batch,
                                   queries.offset);
  }
}

}  // namespace abacist::cuda::sm90
