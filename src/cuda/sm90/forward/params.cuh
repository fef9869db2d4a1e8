// Kernel parameters and the work messages from the producer to the consumers.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "config.hpp"

namespace abacist::cuda::sm90 {

// Where tanh is taken of score / cap, that is counted in this: it has a polynomial below 2
// (score.cuh).
inline constexpr double kSoftcapUnit = 0.3125;

struct ForwardParams {
  CUtensorMap q_map;  // (d, s, h, b), box 64 x 64; packed: (d, h, s, b), box 64 x heads x positions
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
  float scale_log2;  // p = 2^(scale_log2 s - m); scale * log2(e) where scores are not modified
  // How scores are modified (score.cuh); short.cuh reads score_log2 always.
  float softcap_in;                                  // scale / (cap kSoftcapUnit)
  float score_log2;                                  // times a score, or its tanh: log2 units
  enum Modification { unmodified, scaled, capped };  // scaled: by 0 or less, or for ALiBi
  int modified;
  int b, heads_per_kv_head;
  // The 64 rows of a warpgroup are row_heads query heads at each of row_positions positions, the
  // heads of a position side by side: 1 x 64, or, with the query heads of a kv head packed, as many
  // as fit. A tile head is what has query tiles of its own: a query head, or row_heads of them.
  int row_heads, row_positions;
  int row_divisor;  // (r * row_divisor) >> 16 is r / row_heads for r < 64
  int tile_heads;   // of a sequence
  int tile_heads_per_kv_head;
  int q_slice_bytes;     // that TMA writes of Q for a warpgroup
  int s_q, s_k;          // dense lengths, or bounds of the device lengths
  int total_q, total_k;  // varlen
  int d_v;
  int left, right;  // clamped to +-2^29
  int top_left;
  int tiles_per_head, tile_count, heads_per_section, order;  // order: TileOrder::Kind
  // TileOrder::paired: heads whose tiles are dealt out in pairs (even), and how many blocks get a
  // pair more than the others.
  int paired_heads, odd_pairs;
  int never;          // 0: a branch on it ends a block of instructions (end_block)
  int always_online;  // never freeze the maximum (tests, and the redo path)
  // A split over keys, in kernels for that: tile heads are `splits` times as many, side by side,
  // and each leaves unfinished rows (partial.cuh) for merge.cu.
  int splits;
  float* partials;  // [splits]
  int partial_rows;
  float softcap_series[5];  // cap tanh(y) log2(e) / u in powers of u^2; y = kSoftcapUnit u
};

// Beside that, what short.cuh needs: it does not load by TMA.
struct ShortParams : ForwardParams {
  const void* q;
  const void* k;
  const void* v;
  int64_t q_stride_b, q_stride_s, q_stride_h;
  int64_t k_stride_b, k_stride_s, k_stride_h;
  int64_t v_stride_b, v_stride_s, v_stride_h;
  int h_q, d_qk;
};

// A sequence's rows in its tensor, from cu_seqlens (null: the tensor is one of b sequences of
// `longest` rows). Lengths on the device are data: whatever they hold, nothing outside the tensors
// is touched.
struct SequencePart {
  int offset = 0, length;
  __device__ __forceinline__ SequencePart(const int32_t* cu_seqlens, int batch, int longest,
                                          int total)
      : length(longest) {
    if (!cu_seqlens) return;
    offset = min(max(cu_seqlens[batch], 0), total);
    length = min(max(cu_seqlens[batch + 1], offset) - offset, min(longest, total - offset));
  }
};

// One query tile. Written by the producer to shared memory, read by every consumer thread.
struct alignas(16) Work {
  enum Mode { normal, redo, flush, stop };  // flush: finish what is pending and report
  // What makes a warpgroup's part of a tile ordinary, so that code of its own does it faster.
  enum Trait {
    plain_end = 1,    // every row sees a key, no sinks, heads not packed, no redo, redoable
    plain_store = 2,  // and TMA may write whole boxes of rows
    redoable = 4,     // with the true maximum, should O or l overflow
    same_first = 8,   // all rows see the first key of the first key tile; scale > 0
  };
  int position, head, batch, mode;       // the first position and query head
  int len_q, len_k, q_offset, k_offset;  // offsets: first row of the sequence in its tensor
  int begin, end;                        // key tiles to load
  int some_empty;                        // some rows see no key at all
  int heads;                             // query heads: row_heads or fewer
  int kv_head;
  int rows;           // positions from the first on: len_q - position
  int first, behind;  // position i sees [i + first, i + behind) within [0, len_k)
  // What each consumer warpgroup does with them: a warpgroup of earlier rows ends earlier under a
  // causal mask. In key tiles:
  struct Part {
    int end;                       // begin: none of its rows sees a key, or it has no rows
    int full_begin, full_end;      // those without masked elements
    int frozen_begin, frozen_end;  // those done with a frozen maximum
    int traits;                    // of Trait
    union {
      float* lse;       // parts[0]: of the first position; null: none is wanted
      float* partials;  // parts[1]: of the split (partial.cuh)
    };
    // The rows whose result is to be replaced in a redo: for each warp a bit a lane, for the first
    // and for the second of the two rows of which the lane has a part.
    uint32_t redo_rows[4][2];
  } parts[3];
};
static_assert(sizeof(Work) == 256);

// Where row r of a tile (64 for each warpgroup) is in its sequence.
template <bool Packs>
struct RowPlace {
  int position, head;
  bool valid;
  __device__ __forceinline__ RowPlace(const ForwardParams& p, const Work& w, int r) {
    if constexpr (!Packs) {
      position = w.position + r;
      head = w.head;
      valid = position < w.len_q;
      return;
    }
    const int down = r % 64 * p.row_divisor >> 16, across = r % 64 - down * p.row_heads;
    position = w.position + r / 64 * p.row_positions + down;
    head = w.head + min(across, w.heads - 1);
    valid = down < p.row_positions && position < w.len_q && across < w.heads;
  }
};

// The position of row r, or, for rows that are none, one that may be past the end.
template <bool Packs>
__device__ __forceinline__ int row_position(const ForwardParams& p, const Work& w, int r) {
  if constexpr (!Packs) return w.position + r;
  return w.position + r / 64 * p.row_positions + (r % 64 * p.row_divisor >> 16);
}

// The visible keys of the query at position i are [row_begin(i), row_end(i)): DESIGN's one interval
// rule.
struct MaskRule {
  int first, end, len_k;  // position i sees [i + first, i + end) within [0, len_k)
  __device__ __forceinline__ explicit MaskRule(const Work& w)
      : first(w.first), end(w.behind), len_k(w.len_k) {}
  __device__ __forceinline__ MaskRule(const ForwardParams& p, int len_q, int keys) : len_k(keys) {
    const int shift = p.top_left ? 0 : keys - len_q;
    first = shift - p.left;
    end = shift + p.right + 1;
  }
  __device__ __forceinline__ int row_begin(int i) const { return max(0, i + first); }
  __device__ __forceinline__ int row_end(int i) const { return min(len_k, i + end); }
  __device__ __forceinline__ bool is_empty(int i) const { return row_begin(i) >= row_end(i); }
};

}  // namespace abacist::cuda::sm90
