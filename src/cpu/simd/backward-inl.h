// Backward pass of one work item: dK and dV of a block of keys, and the block's part of dQ
// (FlashAttention-2, Dao 2023, algorithm 2), with P recomputed from Q, K and LSE:
//   P = exp(S - LSE), dP = dO V^T, dS = P o (dP - D) [o (1 - tanh^2) under softcap],
//   dV = P^T dO, dK = scale dS^T Q, dQ = scale dS K,   D = rowsum(dO o O) - dLSE.
//
// Five products per pair of tiles. Scores have queries in the lanes (as in the forward pass): S^T,
// dP^T and dQ^T are `multiply`; dK and dV have head dimensions in the lanes (`accumulate_rows`) and
// read P and dS as they lie. Of Q and dO a tile is packed both ways.
//
// dQ is summed over key blocks in ascending order: an item adds to a row tile only when the block
// before it in its chain has (`turns`). Items are started in that order too, so whatever an item
// waits for is already running or done; one thread alone never waits. Where heads are few, their
// key blocks take turns in several chains, whose sums are added at the end.
//
// Slow memory per item: K, V, dK, dV of its keys once; Q, dO, LSE, D and the dQ sums of the rows
// that see them. FLOPs: 2 (3 d_qk + 2 d_v) per visible pair, plus the masked part of edge steps.
#if defined(ABACIST_CPU_SIMD_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ABACIST_CPU_SIMD_BACKWARD_INL_H_
#undef ABACIST_CPU_SIMD_BACKWARD_INL_H_
#else
#define ABACIST_CPU_SIMD_BACKWARD_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numbers>

#include "cpu/parallel.hpp"
#include "cpu/simd/gemm-inl.h"
#include "cpu/simd/gradients-inl.h"
#include "cpu/simd/kernels.hpp"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/pack-inl.h"
#include "cpu/simd/scores-inl.h"

HWY_BEFORE_NAMESPACE();
namespace abacist::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Where an item's tiles lie in the thread's scratch. Widths of rows are padded to whole vectors.
struct BackwardScratch {
  size_t keys, panels, width_qk, width_v;
  float* k;          // [chunks of d_qk][keys][kChunk]
  float* v;          // [chunks of d_v][keys][kChunk]
  float* dk;         // [keys][width_qk]
  float* dv;         // [keys][width_v]
  float* q;          // [panels][d_qk][kPanel], prescaled
  float* d_o;        // [panels][d_v][kPanel]
  float* q_rows;     // [panels * kPanel][width_qk]
  float* d_o_rows;   // [panels * kPanel][width_v]
  float* p;          // [panels][keys][kPanel]: scores, then probabilities
  float* ds;         // [panels][keys][kPanel]
  float* slope;      // [keys][kPanel]: derivative of softcap
  float* staging;    // two rows
  float* bias_sums;  // [keys][kPanel] or [group][keys]; null unless a bias is summed over rows
  size_t bytes;

  BackwardScratch(const Tiles& tiles, size_t d_qk, size_t d_v, size_t bias_sum_count,
                  std::byte* memory)
      : keys(static_cast<size_t>(tiles.keys)),
        panels(static_cast<size_t>(tiles.rows) / kPanel),
        width_qk(hwy::RoundUpTo(d_qk, kLanes)),
        width_v(hwy::RoundUpTo(d_v, kLanes)) {
    const size_t rows = panels * kPanel;
    Carver carver{memory};
    k = carver.floats(keys * hwy::RoundUpTo(d_qk, kChunk));
    v = carver.floats(keys * hwy::RoundUpTo(d_v, kChunk));
    dk = carver.floats(keys * width_qk);
    dv = carver.floats(keys * width_v);
    q = carver.floats(rows * d_qk);
    d_o = carver.floats(rows * d_v);
    q_rows = carver.floats(rows * width_qk);
    d_o_rows = carver.floats(rows * width_v);
    p = carver.floats(keys * rows);
    ds = carver.floats(keys * rows);
    slope = carver.floats(keys * kPanel);
    staging = carver.floats(2 * std::max(d_qk, d_v));
    bias_sums = bias_sum_count > 0 ? carver.floats(bias_sum_count) : nullptr;
    bytes = carver.used;
  }
};

/// Floats of the sums over rows that an item keeps for the gradient of a bias.
inline size_t bias_sum_count(const Tiles& tiles, std::int64_t group) {
  const size_t sums = std::max(kPanel, static_cast<size_t>(group));
  return sums * static_cast<size_t>(tiles.keys);
}

inline BackwardScratch scratch_of(const BackwardHead& head, std::byte* memory) {
  const bool sums = head.d_bias.data != nullptr && head.d_bias.rows_summed;
  return {head.tiles, static_cast<size_t>(head.d_qk), static_cast<size_t>(head.d_v),
          sums ? bias_sum_count(head.tiles, head.group) : 0, memory};
}

/// P^T of one panel over keys [range) into p, 0 where a lane does not see; with softcap, its
/// derivative into x.slope.
HWY_NOINLINE void recompute_probabilities(const BackwardHead& head, const BackwardScratch& x,
                                          const PanelMask& mask, std::int64_t k0,
                                          const BlockRange& range, const float* q, const float* lse,
                                          float* p, Prefetch& ahead) {
  const F f;
  const size_t d_qk = static_cast<size_t>(head.d_qk);
  const bool pairs = head.score.has_pairs();
  const bool simple = head.score.plain && range.full() && !pairs;
  for (size_t j = range.first; j < range.last; j += kStep) {
    ahead.step();
    Accumulators acc;
    multiply_columns(x.k, x.keys, j, q, d_qk, acc);
    store(acc, p + j * kPanel);
    if (!simple) continue;
    // Through memory (L1): unrolled over the accumulators, 24 exp2 would not fit the registers.
    for (size_t v = 0; v < kVectors; ++v) {
      const V subtract = hn::Load(f, lse + v * kLanes);
      float* s = p + j * kPanel + v * kLanes;
#pragma GCC unroll 8
      for (size_t m = 0; m < kStep; ++m) {
        hn::Store(probability(hn::Load(f, s + m * kPanel), subtract), f, s + m * kPanel);
      }
    }
  }
  if (simple) return;
  if (pairs) return pair_probabilities(head.score, mask, k0, range, lse, p, x.slope);
  const LaneValues lanes(head.score, mask, k0);
  for (size_t v = 0; v < kVectors; ++v) {
    const LaneVectors lane(lanes, v);
    const V subtract = hn::Load(f, lse + v * kLanes);
    for (size_t j = range.first; j < range.last; ++j) {
      const V key = hn::Set(f, static_cast<float>(j));
      V s = hn::Load(f, p + j * kPanel + v * kLanes);
      if (!head.score.plain) {
        V derivative;
        s = modify(head.score, s, lane, key, derivative);
        hn::Store(derivative, f, x.slope + j * kPanel + v * kLanes);
      }
      const V e = probability(s, subtract);
      hn::Store(range.full() ? e : hn::IfThenElse(lane.sees(key), e, hn::Set(f, kHidden)), f,
                p + j * kPanel + v * kLanes);
    }
  }
}

/// dS^T of one panel over keys [range) into ds.
HWY_NOINLINE void score_gradients(const BackwardHead& head, const BackwardScratch& x,
                                  const PanelMask& mask, std::int64_t k0, const BlockRange& range,
                                  const float* d_o, const float* d, float* p, float* ds,
                                  Prefetch& ahead) {
  const F f;
  const size_t d_v = static_cast<size_t>(head.d_v);
  const bool capped = head.score.softcap > 0.0f;
  const bool dropout = head.dropout.active();
  const bool late = head.score.has_pairs() || dropout;
  for (size_t j = range.first; j < range.last; j += kStep) {
    ahead.step();
    Accumulators acc;
    multiply_columns(x.v, x.keys, j, d_o, d_v, acc);
    if (late) {
      store(acc, ds + j * kPanel);
      continue;
    }
#pragma GCC unroll 3
    for (size_t v = 0; v < kVectors; ++v) {
      const V subtract = hn::Load(f, d + v * kLanes);
#pragma GCC unroll 8
      for (size_t m = 0; m < kStep; ++m) {
        const size_t place = (j + m) * kPanel + v * kLanes;
        V value = hn::Mul(hn::Load(f, p + place), hn::Sub(acc.c[m][v], subtract));
        if (capped) value = hn::Mul(value, hn::Load(f, x.slope + place));
        acc.c[m][v] = value;
      }
    }
    store(acc, ds + j * kPanel);
  }
  if (late) {
    if (dropout) {
      drop_gradients(head.dropout, mask, k0, range, d, p, ds);
    } else {
      pair_gradients(range, d, p, ds);
    }
    if (head.d_bias.data != nullptr) {
      if (head.d_bias.rows_summed) {
        sum_bias_rows(head.d_bias, mask, x.keys, range, ds, x.bias_sums);
      } else {
        add_bias_rows(head.d_bias, mask, k0, range, ds);
      }
    }
    if (capped) cap_gradients(range, x.slope, ds);
    return;
  }
  if (range.full()) return;
  const LaneValues lanes(head.score, mask, k0);
  for (size_t v = 0; v < kVectors; ++v) {
    const LaneVectors lane(lanes, v);
    for (size_t j = range.first; j < range.last; ++j) {
      float* place = ds + j * kPanel + v * kLanes;
      const V key = hn::Set(f, static_cast<float>(j));
      hn::Store(hn::IfThenElseZero(lane.sees(key), hn::Load(f, place)), f, place);
    }
  }
}

/// dQ^T of one panel: started, or added to what earlier key blocks left.
HWY_NOINLINE void accumulate_dq(const BackwardScratch& x, size_t d_qk, const BlockRange& range,
                                bool start, const float* ds, float* dq_sum) {
  const F f;
  const size_t whole = d_qk / kStep * kStep;
  for (size_t c = 0; c < d_qk; c += kStep) {
    Accumulators acc;
    clear(acc);
    multiply_rows(x.k, x.keys, c, ds, range.first, range.last, acc);
    const size_t count = c < whole ? kStep : d_qk - whole;
    for (size_t m = 0; m < kStep; ++m) {
      if (m >= count) break;
      for (size_t v = 0; v < kVectors; ++v) {
        float* place = dq_sum + (c + m) * kPanel + v * kLanes;
        const V value = start ? acc.c[m][v] : hn::Add(hn::Load(f, place), acc.c[m][v]);
        hn::Store(value, f, place);
      }
    }
  }
}

/// scale * dQ of one panel to the caller's tensor; scales dq_sum.
HWY_NOINLINE void finish_dq(const BackwardHead& head, const PanelMask& mask, float* dq_sum) {
  const F f;
  const size_t d_qk = static_cast<size_t>(head.d_qk);
  HWY_ALIGN float live[kPanel];  // 0: the row is empty
  for (size_t lane = 0; lane < kPanel; ++lane) {
    const std::int64_t r = mask.first_row + static_cast<std::int64_t>(lane);
    live[lane] = lane < mask.count && !mask.visible(r).empty() ? 1.0f : 0.0f;
  }
  const V scale = hn::Set(f, head.scale);
  for (size_t v = 0; v < kVectors; ++v) {
    const auto empty = hn::Eq(hn::Load(f, live + v * kLanes), hn::Zero(f));
    for (size_t c = 0; c < d_qk; ++c) {
      float* place = dq_sum + c * kPanel + v * kLanes;
      hn::Store(hn::IfThenZeroElse(empty, hn::Mul(hn::Load(f, place), scale)), f, place);
    }
  }
  unpack_panel(dq_sum, d_qk, head.dq, head.group, mask.first_row, mask.count);
}

/// Rows [first, first + count) as rows of `width` floats; rows past count, rows that see no key,
/// and the padding are zero.
HWY_NOINLINE void pack_wide_rows(const Operand& x, const PanelMask& mask, size_t depth,
                                 size_t width, float* HWY_RESTRICT out) {
  with_type(x.data, x.dtype, [&](const auto* data) HWY_ATTR {
    for (size_t lane = 0; lane < kPanel; ++lane) {
      float* row = out + lane * width;
      const std::int64_t r = mask.first_row + static_cast<std::int64_t>(lane);
      size_t filled = 0;
      if (lane < mask.count && !mask.visible(r).empty()) {
        load_row(data + (r / mask.group) * x.row + (r % mask.group) * x.head, x.dim, depth, row);
        filled = depth;
      }
      std::fill(row + filled, row + width, 0.0f);
    }
  });
}

/// Panels of a row tile that hold rows.
inline size_t panels_of(const BackwardHead& head, std::int64_t row_tile) {
  const std::int64_t rows =
      std::min<std::int64_t>(head.tiles.rows, head.rows - row_tile * head.tiles.rows);
  return hwy::DivCeil(static_cast<size_t>(rows), kPanel);
}

/// One row tile against the item's keys.
HWY_INLINE void backward_tile(const BackwardHead& head, const BackwardScratch& x,
                              std::int64_t key_block, std::int64_t row_tile) {
  const size_t d_qk = static_cast<size_t>(head.d_qk);
  const size_t d_v = static_cast<size_t>(head.d_v);
  const std::int64_t k0 = key_block * head.tiles.keys;
  const auto count =
      static_cast<size_t>(std::min<std::int64_t>(head.tiles.keys, head.rule.len_k - k0));
  const size_t panel_size = x.keys * kPanel;
  PanelMask masks[kMaxPanels];
  BlockRange ranges[kMaxPanels];
  size_t j0 = x.keys;
  size_t j1 = 0;
  size_t panels = 0;
  for (; panels < x.panels; ++panels) {
    const std::int64_t row =
        row_tile * head.tiles.rows + static_cast<std::int64_t>(panels * kPanel);
    if (row >= head.rows) break;
    masks[panels] = PanelMask(head.rule, head.group, row, head.rows, 0, head.rule.len_k);
    ranges[panels] = masks[panels].in_block(k0, count);
    if (ranges[panels].first >= ranges[panels].last) continue;
    j0 = std::min(j0, ranges[panels].first);
    j1 = std::max(j1, ranges[panels].last);
  }
  j0 = std::min(j0, j1);  // no panel sees the block: both 0
  const float* lse = head.lse_base2 + row_tile * head.tiles.rows;
  const float* d = head.d + row_tile * head.tiles.rows;
  const DqTurn turn = head.dq_turn(key_block, row_tile);
  float* dq_sum = head.dq_sum_of(turn.chain, row_tile);
  for (size_t i = 0; i < panels; ++i) {
    const PanelMask& mask = masks[i];
    const BlockRange& range = ranges[i];
    float* p = x.p + i * panel_size;
    float* ds = x.ds + i * panel_size;
    float* q_rows = x.q_rows + i * kPanel * x.width_qk;
    float* d_o_rows = x.d_o_rows + i * kPanel * x.width_v;
    pack_wide_rows(head.q, mask, d_qk, x.width_qk, q_rows);
    pack_wide_rows(head.d_o, mask, d_v, x.width_v, d_o_rows);
    if (range.first < range.last) {
      if (head.score.has_pairs()) PanelPairs(head.score, mask).prefetch(k0, range);
      pack_panel(contiguous_rows(q_rows, x.width_qk), 1, 0, kPanel, d_qk, head.score.prescale,
                 x.q + i * d_qk * kPanel);
      pack_panel(contiguous_rows(d_o_rows, x.width_v), 1, 0, kPanel, d_v, 1.0f,
                 x.d_o + i * d_v * kPanel);
      // For the tile that follows (tiles descend): packing it would wait for memory, 13% of the
      // time at d 128. And the sums of dQ, which this tile adds to at its end.
      Prefetch ahead;
      const std::int64_t next = mask.first_row - head.tiles.rows;
      const std::int64_t next_end = std::max<std::int64_t>(next + std::int64_t{kPanel}, 0);
      const Operand sums = contiguous_rows(dq_sum + i * kPanel * d_qk, kPanel);
      ahead.add(sums, 1, 0, head.d_qk, kPanel, true);
      ahead.add(head.q, head.group, std::max<std::int64_t>(next, 0), next_end, d_qk);
      ahead.add(head.d_o, head.group, std::max<std::int64_t>(next, 0), next_end, d_v);
      ahead.spread(2 * (range.last - range.first) / kStep);
      recompute_probabilities(head, x, mask, k0, range, x.q + i * d_qk * kPanel, lse + i * kPanel,
                              p, ahead);
      score_gradients(head, x, mask, k0, range, x.d_o + i * d_v * kPanel, d + i * kPanel, p, ds,
                      ahead);
    }
    // Keys that another panel of the tile sees and this one does not.
    for (float* panel : {p, ds}) {
      const size_t first = std::min(std::max(range.first, j0), j1);
      const size_t last = std::max(std::min(range.last, j1), first);
      std::fill(panel + j0 * kPanel, panel + first * kPanel, 0.0f);
      std::fill(panel + last * kPanel, panel + j1 * kPanel, 0.0f);
    }
  }
  if (head.d_bias.data != nullptr && !head.d_bias.rows_summed) {
    end_bias_turn(head.d_bias, row_tile);
  }
  accumulate_rows(x.p, panels, panel_size, x.d_o_rows, x.width_v, j0, j1, x.dv);
  accumulate_rows(x.ds, panels, panel_size, x.q_rows, x.width_qk, j0, j1, x.dk);

  int& turns = head.turns[row_tile * head.chains + turn.chain];
  wait_until(turns, turn.number);
  for (size_t i = 0; i < panels; ++i) {
    float* panel = dq_sum + i * kPanel * d_qk;
    if (ranges[i].first < ranges[i].last || turn.number == 0) {
      accumulate_dq(x, d_qk, ranges[i], turn.number == 0, x.ds + i * panel_size, panel);
    }
    if (head.chains == 1 && turn.last) finish_dq(head, masks[i], panel);
  }
  std::atomic_ref<int>(turns).store(turn.number + 1, std::memory_order_release);
}

void backward_finish(const BackwardHead& head, std::int64_t row_tile) {
  const F f;
  const core::Interval blocks = head.key_blocks(row_tile);
  if (blocks.empty()) return;  // backward_prepare has written the zeros
  const size_t panel_floats = kPanel * static_cast<size_t>(head.d_qk);
  float* sum = head.dq_sum_of(blocks.begin % head.chains, row_tile);
  const std::int64_t last = std::min(blocks.begin + head.chains, blocks.end);
  for (std::int64_t block = blocks.begin + 1; block < last; ++block) {
    const float* part = head.dq_sum_of(block % head.chains, row_tile);
    for (size_t i = 0; i < panel_floats * panels_of(head, row_tile); i += kLanes) {
      hn::Store(hn::Add(hn::Load(f, sum + i), hn::Load(f, part + i)), f, sum + i);
    }
  }
  for (size_t i = 0; i < panels_of(head, row_tile); ++i) {
    const std::int64_t row = row_tile * head.tiles.rows + static_cast<std::int64_t>(i * kPanel);
    const PanelMask mask(head.rule, head.group, row, head.rows, 0, head.rule.len_k);
    finish_dq(head, mask, sum + i * panel_floats);
  }
}

void backward_item(const BackwardHead& head, std::int64_t key_block, std::byte* memory) {
  const size_t d_qk = static_cast<size_t>(head.d_qk);
  const size_t d_v = static_cast<size_t>(head.d_v);
  const BackwardScratch x = scratch_of(head, memory);
  const std::int64_t k0 = key_block * head.tiles.keys;
  const auto count =
      static_cast<size_t>(std::min<std::int64_t>(head.tiles.keys, head.rule.len_k - k0));
  pack_chunks(head.k, k0, count, d_qk, x.keys, x.k);
  pack_chunks(head.v, k0, count, d_v, x.keys, x.v);
  std::fill_n(x.dk, x.keys * x.width_qk, 0.0f);
  std::fill_n(x.dv, x.keys * x.width_v, 0.0f);
  const BiasGradient& d_bias = head.d_bias;
  const bool by_rows = d_bias.data != nullptr && !d_bias.rows_summed;
  if (x.bias_sums != nullptr)
    std::fill_n(x.bias_sums, bias_sum_count(head.tiles, head.group), 0.0f);
  for (std::int64_t t = by_rows ? d_bias.tiles - 1 : head.row_tiles() - 1; t >= 0; --t) {
    // Every item takes every turn, so that who comes before whom does not depend on the mask.
    if (by_rows) begin_bias_turn(d_bias, t);
    const core::Interval blocks = t < head.row_tiles() ? head.key_blocks(t) : core::Interval{};
    if (key_block >= blocks.begin && key_block < blocks.end) {
      backward_tile(head, x, key_block, t);
    } else if (by_rows) {
      end_bias_turn(d_bias, t);
    }
  }
  if (x.bias_sums != nullptr) {
    finish_bias_rows(d_bias, head.group, k0, x.keys, count, x.bias_sums);
  }
  for (size_t j = 0; j < count; ++j) {
    const std::int64_t key = k0 + static_cast<std::int64_t>(j);
    for (size_t c = 0; c < d_qk; ++c) x.dk[j * x.width_qk + c] *= head.scale;
    store_row(x.dk + j * x.width_qk, d_qk, head.dk, key * head.dk.row);
    store_row(x.dv + j * x.width_v, d_v, head.dv, key * head.dv.row);
  }
}

/// D of one row.
HWY_INLINE float row_product(const BackwardHead& head, std::int64_t i, std::int64_t g,
                             float* HWY_RESTRICT staging) {
  const size_t d_v = static_cast<size_t>(head.d_v);
  const auto load = [&](const Operand& x, float* row) HWY_ATTR {
    with_type(x.data, x.dtype, [&](const auto* data) HWY_ATTR {
      load_row(data + i * x.row + g * x.head, x.dim, d_v, row);
    });
  };
  load(head.o, staging);
  load(head.d_o, staging + d_v);
  double sum = 0.0;
  for (size_t c = 0; c < d_v; ++c) sum += double{staging[c]} * double{staging[d_v + c]};
  if (head.d_lse.data != nullptr) sum -= double{head.d_lse.at(i, g)};
  return static_cast<float>(sum);
}

/// -exp(sink - LSE) D of one row: its part of the sink's gradient. At most D in size, as P is at
/// most 1.
inline double sink_gradient(float sink, float lse, float d) {
  if (sink == kNoSink) return 0.0;
  const double x = double{sink} - double{lse};
  return -std::exp(x > 0.0 ? 0.0 : x) * double{d};
}

void backward_prepare(const BackwardHead& head, std::int64_t row_tile, std::byte* memory) {
  const BackwardScratch x = scratch_of(head, memory);
  std::fill_n(head.turns + row_tile * head.chains, head.chains, 0);
  const std::int64_t first = row_tile * head.tiles.rows;
  const bool sees_keys = !head.key_blocks(row_tile).empty();
  const bool sinks = head.sinks.data != nullptr;
  double* sink_sums = sinks ? head.sink_sums + row_tile * head.group : nullptr;
  if (sinks) std::fill_n(sink_sums, head.group, 0.0);
  for (std::int64_t r = first; r < first + head.tiles.rows; ++r) {
    head.lse_base2[r] = std::numeric_limits<float>::infinity();
    head.d[r] = 0.0f;
    if (r >= head.rows) continue;
    const std::int64_t i = r / head.group;
    const std::int64_t g = r % head.group;
    const bool empty = head.rule.visible(i).empty();
    if (!empty || sinks) {
      const float d = row_product(head, i, g, x.staging);
      if (!empty) head.d[r] = d;
      if (sinks) sink_sums[g] += sink_gradient(head.sinks.at(g), head.lse.at(i, g), d);
    }
    if (empty) {
      if (sees_keys) continue;  // finish_dq writes the zeros
      std::fill_n(x.staging, head.d_qk, 0.0f);
      store_row(x.staging, static_cast<size_t>(head.d_qk), head.dq,
                i * head.dq.row + g * head.dq.head);
      continue;
    }
    head.lse_base2[r] = static_cast<float>(double{head.lse.at(i, g)} / std::numbers::ln2);
  }
}

size_t backward_scratch_bytes(const Tiles& tiles, std::int64_t d_qk, std::int64_t d_v,
                              std::int64_t group_of_row_sums) {
  const size_t sums = group_of_row_sums > 0 ? bias_sum_count(tiles, group_of_row_sums) : 0;
  return BackwardScratch(tiles, static_cast<size_t>(d_qk), static_cast<size_t>(d_v), sums, nullptr)
      .bytes;
}

}  // namespace HWY_NAMESPACE
}  // namespace abacist::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
