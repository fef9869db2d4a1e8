// Forward pass of one work item: O = softmax(scale Q K^T) V and LSE, FlashAttention-2 (Dao 2023,
// algorithm 1) with queries in the vector lanes.
//
// An item is a tile of query rows (heads of a group packed in) against a range of keys. Q is packed
// once as panels [d_qk][kPanel]; the keys pass in blocks, K and V packed in chunks of 16 columns
// for the products of gemm-inl.h:
//   S^T[key][row] = sum_c K[key][c] Q^T[c][row],  O^T[c][row] += sum_key V^T[c][key] P^T[key][row].
// Per panel and block: the scores with their running maximum in the epilogue, one exp2 pass, the
// second product with the rescaling of O folded into adding the block to it. Mask edges and boolean
// masks hide scores while they are in registers; softcap, ALiBi and a bias take a pass of their
// own.
//
// Slow memory per item: Q, O, LSE once; K and V of the visible keys once. FLOPs: 2 (d_qk + d_v) per
// visible pair, plus the masked part of edge steps (panel x kStep).
#if defined(ABACIST_CPU_SIMD_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ABACIST_CPU_SIMD_FORWARD_INL_H_
#undef ABACIST_CPU_SIMD_FORWARD_INL_H_
#else
#define ABACIST_CPU_SIMD_FORWARD_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "cpu/simd/dropout-inl.h"
#include "cpu/simd/gemm-inl.h"
#include "cpu/simd/kernels.hpp"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/pack-inl.h"
#include "cpu/simd/pair_scores-inl.h"
#include "cpu/simd/pairs-inl.h"
#include "cpu/simd/scores-inl.h"

HWY_BEFORE_NAMESPACE();
namespace abacist::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Of a packed block: K [chunks of d_qk][keys][kChunk], then V [chunks of d_v][keys][kChunk].
size_t packed_floats(const Tiles& tiles, std::int64_t d_qk, std::int64_t d_v) {
  return static_cast<size_t>(tiles.keys) * (hwy::RoundUpTo(static_cast<size_t>(d_qk), kChunk) +
                                            hwy::RoundUpTo(static_cast<size_t>(d_v), kChunk));
}

void pack_keys(const ForwardTask& task, std::int64_t block, float* packed) {
  const size_t keys = static_cast<size_t>(task.tiles.keys);
  const size_t d_qk = static_cast<size_t>(task.d_qk);
  const std::int64_t k0 = block * task.tiles.keys;
  const auto count =
      static_cast<size_t>(std::min<std::int64_t>(task.tiles.keys, task.last_key - k0));
  pack_chunks(task.k, k0, count, d_qk, keys, packed);
  pack_chunks(task.v, k0, count, static_cast<size_t>(task.d_v), keys,
              packed + keys * hwy::RoundUpTo(d_qk, kChunk));
}

/// Where an item's intermediate tiles lie in the thread's scratch.
struct ForwardScratch {
  float* q;        // [panels][d_qk][kPanel]
  float* o;        // [panels][d_v padded][kPanel]
  float* maximum;  // [panels][kPanel], base-2 units
  float* top;      // [panels][kPanel], natural units, with bias or boolean mask only
  float* sum;      // [panels][kPanel]
  float* block;    // packed keys, unless the task brings them
  float* s;        // [keys][kPanel]: scores, then probabilities
  size_t keys;

  size_t bytes;

  ForwardScratch(const Tiles& tiles, size_t d_qk, size_t d_v, std::byte* memory) {
    const size_t rows = static_cast<size_t>(tiles.rows);
    keys = static_cast<size_t>(tiles.keys);
    const size_t d_v_padded = hwy::RoundUpTo(d_v, std::max(kStep, kLanes));
    Carver carver{memory};
    q = carver.floats(rows * hwy::RoundUpTo(d_qk, kLanes));
    o = carver.floats(rows * d_v_padded);
    maximum = carver.floats(rows);
    sum = carver.floats(rows);
    top = carver.floats(rows);
    block = carver.floats(
        packed_floats(tiles, static_cast<std::int64_t>(d_qk), static_cast<std::int64_t>(d_v)));
    s = carver.floats(keys * kPanel);
    bytes = carver.used;
  }
};

/// Products that a pass of its own will make scores of. The pairs that it will read, if any, are
/// asked for between them, a few rows at a time (bias at d 64: 2% of the pass in one burst).
struct Products {
  static constexpr bool kScores = false;

  const Maybe<PanelPairs>& pairs;
  std::int64_t k0;
  const BlockRange& range;

  template <size_t first, size_t last>
  HWY_INLINE void before(size_t j) const {
    if (pairs) ask(j);
  }
  HWY_NOINLINE void ask(size_t j) const {
    pairs->prefetch(k0, range, (j - range.first) / kStep, (range.last - range.first) / kStep);
  }
  template <size_t first, size_t last>
  HWY_INLINE void finish(size_t, Accumulators&) const {}
};

/// What plain scores take in while they are in registers: mask edges, if there are any.
struct Edges {
  static constexpr bool kScores = true;
  const Maybe<LaneValues>& lanes;
  const BlockRange& range;

  template <size_t first, size_t last>
  HWY_INLINE void before(size_t) const {}
  template <size_t first, size_t last>
  HWY_INLINE void finish(size_t j, Accumulators& acc) const {
    if (lanes) hide_edges<first, last>(*lanes, range, j, acc);
  }
};

/// Scores of keys [j0, j1) of the block against vectors [first, last) of one panel into s, with the
/// largest per lane; `finish` (Products, Edges, SeenPairs) makes scores of products.
template <size_t first, size_t last, class Finish>
HWY_INLINE void score_steps(const ForwardScratch& x, const float* k, const float* q, size_t d_qk,
                            size_t j0, size_t j1, Finish& finish, Prefetch& ahead,
                            V (&largest)[kVectors]) {
  for (size_t j = j0; j < j1; j += kStep) {
    ahead.step();
    finish.template before<first, last>(j);
    Accumulators acc;
    multiply_columns<first, last>(k, x.keys, j, q, d_qk, acc);
    finish.template finish<first, last>(j, acc);
    store<first, last>(acc, x.s + j * kPanel);
    for (size_t m = 0; Finish::kScores && m < kStep; ++m) {
      for (size_t v = first; v < last; ++v) largest[v] = hn::Max(largest[v], acc.c[m][v]);
    }
  }
}

/// Scores of a range of the block against one panel. A vector of lanes skips the keys at either end
/// that only others see: a window of 512 keys ran at 0.83 of the plain rate without, a panel's 48
/// rows walking 568 keys.
template <class Finish>
HWY_NOINLINE void score_products(const ForwardScratch& x, const float* k, const float* q,
                                 size_t d_qk, const BlockRange& r, Finish finish, Prefetch& ahead,
                                 V (&largest)[kVectors]) {
  static_assert(kVectors == 3);
  const F f;
  for (V& value : largest) value = hn::Set(f, -std::numeric_limits<float>::infinity());
  score_steps<0, 1>(x, k, q, d_qk, r.begin[0], r.begin[1], finish, ahead, largest);
  score_steps<0, 2>(x, k, q, d_qk, r.begin[1], r.begin[2], finish, ahead, largest);
  score_steps<0, 3>(x, k, q, d_qk, r.begin[2], r.end[0], finish, ahead, largest);
  score_steps<1, 3>(x, k, q, d_qk, r.end[0], r.end[1], finish, ahead, largest);
  score_steps<2, 3>(x, k, q, d_qk, r.end[1], r.end[2], finish, ahead, largest);
}

/// Scores to probabilities in place; maximum and sum move on; `correction` is the factor for O.
HWY_NOINLINE void softmax_step(const ForwardScratch& x, size_t panel, const BlockRange& range,
                               const V (&largest)[kVectors], V (&correction)[kVectors]) {
  const F f;
  const V lowest = hn::Set(f, -std::numeric_limits<float>::infinity());
  for (size_t v = 0; v < kVectors; ++v) {
    float* maximum = x.maximum + panel * kPanel + v * kLanes;
    float* sum = x.sum + panel * kPanel + v * kLanes;
    const V before = hn::Load(f, maximum);
    const V m = hn::Max(before, largest[v]);
    hn::Store(m, f, maximum);
    // A lane that has seen no key yet: subtract 0 instead of -inf, so that exp2(-inf) = 0 stands.
    const V subtract = hn::IfThenZeroElse(hn::Eq(m, lowest), m);
    correction[v] = exp2(f, hn::Sub(before, subtract));
    // Sums of a block start at 0 and are added as a whole, here and in accumulate_output: a chain
    // over 100,000 keys one by one was off by 240 units of roundoff.
    V total = hn::Zero(f);
    float* s = x.s + v * kLanes;
#pragma GCC unroll 4
    for (size_t j = range.begin[v]; j < range.end[v]; ++j) {
      const V p = exp2(f, hn::Sub(hn::Load(f, s + j * kPanel), subtract));
      total = hn::Add(total, p);
      hn::Store(p, f, s + j * kPanel);
    }
    hn::Store(hn::MulAdd(hn::Load(f, sum), correction[v], total), f, sum);
  }
}

/// O^T of a panel: rescaled (or started, if fresh), plus V^T P^T over a range of the block.
HWY_NOINLINE void accumulate_output(const ForwardScratch& x, const float* v, float* o, size_t d_v,
                                    const BlockRange& r, bool fresh,
                                    const V (&correction)[kVectors], Prefetch& ahead) {
  const F f;
  for (size_t c = 0; c < d_v; c += kStep) {
    ahead.step();
    Accumulators acc;
    float* tile = o + c * kPanel;
    clear(acc);
    multiply_rows<0, 1>(v, x.keys, c, x.s, r.begin[0], r.begin[1], acc);
    multiply_rows<0, 2>(v, x.keys, c, x.s, r.begin[1], r.begin[2], acc);
    multiply_rows<0, 3>(v, x.keys, c, x.s, r.begin[2], r.end[0], acc);
    multiply_rows<1, 3>(v, x.keys, c, x.s, r.end[0], r.end[1], acc);
    multiply_rows<2, 3>(v, x.keys, c, x.s, r.end[1], r.end[2], acc);
    if (!fresh) {
      for (size_t m = 0; m < kStep; ++m) {
        for (size_t i = 0; i < kVectors; ++i) {
          const V before = hn::Load(f, tile + m * kPanel + i * kLanes);
          acc.c[m][i] = hn::MulAdd(before, correction[i], acc.c[m][i]);
        }
      }
    }
    store(acc, tile);
  }
}

inline constexpr float kNone = -std::numeric_limits<float>::infinity();
/// The factor of a row that sees no key, whose O is 0.
inline constexpr float kEmptyRow = -1.0f;

/// LSE of one row to the caller's tensor, or its state to the merge of key splits; returns the
/// factor that its O has yet to take.
inline float finish_lane(const ForwardTask& task, const ForwardScratch& x, size_t panel,
                         const PanelMask& mask, const PackedRow& r, size_t lane) {
  const size_t at = panel * kPanel + lane;
  RowState state{x.maximum[at], x.sum[at], x.top[at]};
  state.seen = !mask.visible_of(r.i).empty() && !(task.score.has_pairs() && state.top == kNone);
  if (task.states.data != nullptr) {
    task.states.at(r.i, r.g) = state;
    return state.seen ? 1.0f : kEmptyRow;
  }
  const float sink = task.sinks.data == nullptr ? kNoSink : task.sinks.at(r.g);
  WholeRow row(state);
  const auto factor = static_cast<float>(row.add_sink(sink));
  const auto kept = static_cast<float>(task.dropout.scale);  // 1 without dropout
  if (task.lse.data != nullptr) {
    task.lse.at(r.i, r.g) = state.seen ? row.lse(task.score.bias.data != nullptr) : sink;
  }
  return state.seen ? kept * (factor / static_cast<float>(row.sum)) : kEmptyRow;
}

/// O / sum and LSE of one panel to the caller's tensors.
HWY_NOINLINE void finish_panel(const ForwardTask& task, const ForwardScratch& x, size_t panel,
                               const PanelMask& mask) {
  const F f;
  const size_t d_v = static_cast<size_t>(task.d_v);
  float* o = x.o + panel * hwy::RoundUpTo(d_v, kStep) * kPanel;
  HWY_ALIGN float inverse[kPanel];
  std::fill_n(inverse, kPanel, kEmptyRow);
  PackedRow r(mask.first_row, task.group);
  for (size_t lane = 0; lane < mask.count; ++lane, r.advance(task.group)) {
    inverse[lane] = finish_lane(task, x, panel, mask, r, lane);
  }
  for (size_t v = 0; v < kVectors; ++v) {
    const V factor = hn::Load(f, inverse + v * kLanes);
    const auto empty = hn::Eq(factor, hn::Set(f, kEmptyRow));
    for (size_t c = 0; c < d_v; ++c) {
      float* place = o + c * kPanel + v * kLanes;
      hn::Store(hn::IfThenZeroElse(empty, hn::Mul(hn::Load(f, place), factor)), f, place);
    }
  }
  unpack_panel(o, d_v, task.o, task.group, mask.first_row, mask.count);
}

/// Whether scores go to the softmax as the product left them, and their largest with them.
HWY_INLINE bool untouched(const ScoreRule& score, const BlockRange& range) {
  return score.plain && range.full() && !score.has_pairs();
}

/// Scores q.k of one panel and block, with their largest per lane, to probabilities: what comes
/// between the two products. `finished`: the products took in all that makes scores.
HWY_INLINE void make_probabilities(const ForwardTask& task, const ForwardScratch& x, size_t panel,
                                   const PanelMask& mask, const Maybe<PanelPairs>& pairs,
                                   bool finished, std::int64_t k0, const BlockRange& range,
                                   V (&largest)[kVectors], V (&correction)[kVectors]) {
  if (!finished && pairs) {
    modify_pair_scores(task.score, mask, *pairs, k0, x.keys, range, x.s, x.top + panel * kPanel,
                       largest);
  } else if (!finished) {
    modify_scores(task.score, mask, k0, range, x.s, largest);
  }
  softmax_step(x, panel, range, largest, correction);
  if (task.dropout.active()) drop_probabilities(task.dropout, mask, k0, range, x.s);
}

/// One panel against one packed block of keys that begins at k0.
HWY_INLINE void forward_step(const ForwardTask& task, const ForwardScratch& x, const float* block,
                             size_t panel, const PanelMask& mask, std::int64_t k0, BlockRange range,
                             bool fresh, Prefetch& ahead) {
  const size_t d_qk = static_cast<size_t>(task.d_qk);
  const size_t d_v = static_cast<size_t>(task.d_v);
  const float* q = x.q + panel * d_qk * kPanel;
  const ScoreRule& score = task.score;
  const bool finished = score.plain;  // by the products
  V largest[kVectors];
  V correction[kVectors];
  Maybe<PanelPairs> pairs;
  if (score.has_pairs()) {
    pairs.emplace(score, mask);
    if (fresh && finished) pairs->prefetch(k0, range);
  }
  Maybe<LaneValues> edges;
  if (!range.full()) {
    range = mask.trimmed(range, k0);
    if (finished) edges.emplace(score, mask, k0);
  }
  ahead.spread((range.last - range.first + d_v) / kStep);
  const auto multiply = [&](auto finish) HWY_ATTR {
    score_products(x, block, q, d_qk, range, finish, ahead, largest);
  };
  if (!finished) {
    multiply(Products{pairs, k0, range});
  } else if (pairs) {
    multiply(SeenPairs(*pairs, edges, k0, range, x.keys, x.top + panel * kPanel));
  } else {
    multiply(Edges{edges, range});
  }
  make_probabilities(task, x, panel, mask, pairs, finished, k0, range, largest, correction);
  accumulate_output(x, block + x.keys * hwy::RoundUpTo(d_qk, kChunk),
                    x.o + panel * hwy::RoundUpTo(d_v, kStep) * kPanel, d_v, range, fresh,
                    correction, ahead);
}

void forward_item(const ForwardTask& task, std::byte* memory) {
  const size_t d_qk = static_cast<size_t>(task.d_qk);
  const size_t d_v = static_cast<size_t>(task.d_v);
  const ForwardScratch x(task.tiles, d_qk, d_v, memory);
  const auto panels = static_cast<size_t>(
      (task.last_row - task.first_row + std::int64_t{kPanel} - 1) / std::int64_t{kPanel});
  PanelMask masks[kMaxPanels];
  std::int64_t begin = task.last_key;
  std::int64_t end = task.first_key;
  for (size_t p = 0; p < panels; ++p) {
    masks[p] =
        PanelMask(task.rule, task.group, task.first_row + static_cast<std::int64_t>(p * kPanel),
                  task.last_row, task.first_key, task.last_key);
    std::fill_n(x.maximum + p * kPanel, kPanel, -std::numeric_limits<float>::infinity());
    std::fill_n(x.sum + p * kPanel, kPanel, 0.0f);
    std::fill_n(x.top + p * kPanel, kPanel, kNone);
    if (masks[p].any.empty()) continue;
    begin = std::min(begin, masks[p].any.begin);
    end = std::max(end, masks[p].any.end);
  }
  bool fresh[kMaxPanels];
  std::fill_n(fresh, panels, true);
  const Operand o{task.o.data, task.o.dtype, task.o.row, task.o.head, task.o.dim};
  // Blocks lie on one grid for all items, which therefore can share what is packed.
  if (begin < end) begin = begin / task.tiles.keys * task.tiles.keys;
  const size_t block_floats = packed_floats(task.tiles, task.d_qk, task.d_v);
  for (std::int64_t k0 = begin; k0 < end; k0 += task.tiles.keys) {
    const std::int64_t next = std::min(k0 + task.tiles.keys, end);
    const std::int64_t next_count = std::min<std::int64_t>(task.tiles.keys, end - next);
    const auto count = static_cast<size_t>(next - k0);
    const float* block = x.block;
    if (task.packed_keys == nullptr) {
      pack_keys(task, k0 / task.tiles.keys, x.block);
    } else {
      block = task.packed_keys + static_cast<size_t>(k0 / task.tiles.keys) * block_floats;
    }
    // What the next block will read, in equal shares before each panel's products.
    const Operand packed = contiguous_rows(block + block_floats, kPackedRow);
    const auto packed_rows =
        next_count == 0 ? 0 : static_cast<std::int64_t>(block_floats / kPackedRow);
    for (size_t p = 0; p < panels; ++p) {
      const BlockRange range = masks[p].in_block(k0, count);
      if (range.first >= range.last) continue;
      if (fresh[p]) {
        pack_panel(task.q, task.group, masks[p].first_row, masks[p].count, d_qk,
                   task.score.prescale, x.q + p * d_qk * kPanel);
      }
      const auto part = [&](std::int64_t rows, size_t i) {
        return rows * static_cast<std::int64_t>(i) / static_cast<std::int64_t>(panels);
      };
      Prefetch ahead;
      if (task.packed_keys != nullptr) {
        ahead.add(packed, 1, part(packed_rows, p), part(packed_rows, p + 1), kPackedRow);
      } else {
        const std::int64_t first = next + part(next_count, p);
        const std::int64_t last = next + part(next_count, p + 1);
        ahead.add(task.k, 1, first, last, d_qk);
        ahead.add(task.v, 1, first, last, d_v);
      }
      if (p + 1 < panels && fresh[p + 1]) {
        ahead.add(task.q, task.group, masks[p + 1].first_row,
                  masks[p + 1].first_row + static_cast<std::int64_t>(masks[p + 1].count), d_qk);
      }
      if (masks[p].any.end <= next) {
        ahead.add(o, task.group, masks[p].first_row,
                  masks[p].first_row + static_cast<std::int64_t>(masks[p].count), d_v);
      }
      forward_step(task, x, block, p, masks[p], k0, range, fresh[p], ahead);
      fresh[p] = false;
      // Its last block: O goes out while the next panel's products run.
      if (masks[p].any.end <= next) finish_panel(task, x, p, masks[p]);
    }
  }
  for (size_t p = 0; p < panels; ++p) {
    if (fresh[p]) finish_panel(task, x, p, masks[p]);
  }
}

size_t forward_scratch_bytes(const Tiles& tiles, std::int64_t d_qk, std::int64_t d_v) {
  return ForwardScratch(tiles, static_cast<size_t>(d_qk), static_cast<size_t>(d_v), nullptr).bytes;
}

}  // namespace HWY_NAMESPACE
}  // namespace abacist::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
