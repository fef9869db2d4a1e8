// Kernel parameters and the work messages from the producer to the consumers.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "config.hpp"

namespace abacist::cuda::sm90 {

struct ForwardParams {
  CUtensorMap q_map;  // (d, s, h, b), box 64 x 64 rows
  CUtensorMap k_map;  // (d, s, h, b), box 64 x keys
  CUtensorMap v_map;
  CUtensorMap o_map;  // (d, s, h, b), box 64 x 16 rows
  void* o;
  float* lse;
  int64_t o_stride_b, o_stride_s, o_stride_h;
  int64_t lse_stride_b, lse_stride_h;
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;
  const int32_t* k_lengths;
  const float* alibi_slopes;
  const float* sinks;
  uint32_t* tile_counter;  // for TileOrder::counter
  float scale_log2;        // scale * log2(e): p = 2^(scale_log2 s - m)
  float softcap_in;        // 2 log2(e) scale / cap and cap log2(e), 0 without softcap (score.cuh)
  float softcap_out;
  int b, h_q, heads_per_kv_head;
  int s_q, s_k;          // dense lengths, or bounds of the device lengths
  int total_q, total_k;  // varlen
  int d_v;
  int left, right;  // clamped to +-2^29
  int top_left;
  int tiles_per_head, tile_count, heads_per_section, order;  // order: TileOrder::Kind
  // TileOrder::paired: heads whose tiles are dealt out in pairs (even), and how many blocks get a
  // pair more than the others.
  int paired_heads, odd_pairs;
  int always_online;  // never freeze the maximum (tests, and the redo path)
  int frozen_masked;  // tiles with masked elements, too: scaling leaves -inf what it is
};

// One query tile. Written by the producer to shared memory, read by every consumer thread.
struct alignas(16) Work {
  enum Mode { normal, redo, flush, stop };  // flush: finish what is pending and report
  int row0, head, batch, mode;
  int len_q, len_k, q_offset, k_offset;  // offsets: first row of the sequence in its tensor
  int begin, end;                        // key tiles to load
  int some_empty;                        // some rows see no key at all
  int unused;
  // What each consumer warpgroup does with them: a warpgroup of earlier rows ends earlier under a
  // causal mask. All in key tiles.
  struct Part {
    int end;                       // begin: none of its rows sees a key, or it has no rows
    int full_begin, full_end;      // those without masked elements
    int frozen_begin, frozen_end;  // those done with a frozen maximum
    int unused[3];
  } parts[3];
};
static_assert(sizeof(Work) == 144);

// The visible keys of query row i are [row_begin(i), row_end(i)): DESIGN's one interval rule.
struct MaskRule {
  int first, last, len_k;  // row i sees [i + first, i + last] within [0, len_k)
  __device__ __forceinline__ MaskRule(const ForwardParams& p, const Work& w) {
    const int shift = p.top_left ? 0 : w.len_k - w.len_q;
    first = shift - p.left;
    last = shift + p.right;
    len_k = w.len_k;
  }
  __device__ __forceinline__ int row_begin(int i) const { return max(0, i + first); }
  __device__ __forceinline__ int row_end(int i) const { return min(len_k, i + last + 1); }
};

}  // namespace abacist::cuda::sm90
