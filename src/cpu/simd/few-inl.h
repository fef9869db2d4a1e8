// Forward pass of an item with few query rows (a decode step): each key and value is read once, as
// it lies, and meets all rows while it is in a register. Nothing is packed: at one row, packing and
// idle lanes cost several times what reading the cache does.
//
// Scores are dot products along the head dimension, put where `forward_item` has them (row r in
// lane r of a panel), so that masks, scores beyond plain ones, softmax and dropout are shared with
// it. O is kept by rows: O[r][c] += P[r][key] V[key][c].
//
// Slow memory per item: Q, O, LSE once; K and V of the visible keys once.
#if defined(ABACIST_CPU_SIMD_FEW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ABACIST_CPU_SIMD_FEW_INL_H_
#undef ABACIST_CPU_SIMD_FEW_INL_H_
#else
#define ABACIST_CPU_SIMD_FEW_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "cpu/simd/forward-inl.h"
#include "cpu/simd/gemm-inl.h"
#include "cpu/simd/kernels.hpp"
#include "cpu/simd/pack-inl.h"
#include "cpu/simd/scores-inl.h"

HWY_BEFORE_NAMESPACE();
namespace abacist::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Rows at most: as many sums as stay in registers.
inline constexpr size_t kFewRows = kPanel >= 8 ? 8 : 2;

/// Where the rows lie: in the block of the scratch of `forward_item`, which has at least as many
/// keys as there are rows. Widths are whole vectors.
struct FewScratch {
  size_t width_qk, width_v;
  float* q;  // [rows][width_qk], prescaled
  float* o;  // [rows][width_v]

  FewScratch(const ForwardScratch& x, size_t d_qk, size_t d_v)
      : width_qk(hwy::RoundUpTo(d_qk, kLanes)),
        width_v(hwy::RoundUpTo(d_v, kLanes)),
        q(x.block),
        o(x.block + x.keys * hwy::RoundUpTo(d_qk, kChunk)) {}
};

/// Rows of K or V of one block as contiguous floats or as they lie.
template <class T>
struct BlockRows {
  static constexpr std::int64_t kAhead = 12;

  KeyRows<T> rows;
  const Operand& x;
  size_t depth;
  HWY_ALIGN float copy[kMaxHeadDim + kLanes];

  BlockRows(const Operand& operand, const T* data, size_t d)
      : rows(operand, data), x(operand), depth(d) {
    std::fill(copy, copy + kMaxHeadDim + kLanes, 0.0f);
  }

  /// Calls body(row) with a row that can be read in whole vectors.
  template <class Body>
  HWY_INLINE void with(std::int64_t j, const Body& body) {
    const T* row = rows(j);
    if (x.pages.ids == nullptr && x.dim == 1) {
      // Rows of one head lie far apart; the hardware does not follow.
      const char* ahead = reinterpret_cast<const char*>(row + kAhead * x.row);
      for (size_t at = 0; at < depth * sizeof(T); at += 64) __builtin_prefetch(ahead + at, 0, 3);
    }
    if (row != nullptr && x.dim == 1 && depth % kLanes == 0) return body(row);
    if (row == nullptr) {
      std::fill_n(copy, depth, 0.0f);
    } else {
      load_row(row, x.dim, depth, copy);
    }
    body(static_cast<const float*>(copy));
  }
};

/// Scores of keys [first, last) of the block against kRows rows.
template <size_t kRows>
HWY_NOINLINE void few_scores(const ForwardTask& task, const FewScratch& few, std::int64_t k0,
                             size_t first, size_t last, float* HWY_RESTRICT s) {
  const F f;
  with_type(task.k.data, task.k.dtype, [&](const auto* data) HWY_ATTR {
    BlockRows keys(task.k, data, static_cast<size_t>(task.d_qk));
    for (size_t j = first; j < last; ++j) {
      keys.with(k0 + static_cast<std::int64_t>(j), [&](const auto* row) HWY_ATTR {
        V sums[kRows];
        for (V& sum : sums) sum = hn::Zero(f);
#pragma GCC unroll 4
        for (size_t c = 0; c < few.width_qk; c += kLanes) {
          const V key = load_some(f, row + c);
          for (size_t r = 0; r < kRows; ++r) {
            sums[r] = hn::MulAdd(key, hn::Load(f, few.q + r * few.width_qk + c), sums[r]);
          }
        }
        for (size_t r = 0; r < kRows; ++r) {
          s[j * kPanel + r] = hn::GetLane(hn::SumOfLanes(f, sums[r]));
        }
      });
    }
  });
}

/// O of kRows rows: rescaled, plus P V over keys [first, last) of the block.
template <size_t kRows>
HWY_NOINLINE void few_output(const ForwardTask& task, const FewScratch& few, std::int64_t k0,
                             size_t first, size_t last, const float* HWY_RESTRICT s,
                             const float* correction) {
  const F f;
  with_type(task.v.data, task.v.dtype, [&](const auto* data) HWY_ATTR {
    BlockRows values(task.v, data, static_cast<size_t>(task.d_v));
    for (size_t r = 0; r < kRows; ++r) {
      const V factor = hn::Set(f, correction[r]);
      for (size_t c = 0; c < few.width_v; c += kLanes) {
        float* place = few.o + r * few.width_v + c;
        hn::Store(hn::Mul(hn::Load(f, place), factor), f, place);
      }
    }
    for (size_t j = first; j < last; ++j) {
      values.with(k0 + static_cast<std::int64_t>(j), [&](const auto* row) HWY_ATTR {
        V p[kRows];
        for (size_t r = 0; r < kRows; ++r) p[r] = hn::Set(f, s[j * kPanel + r]);
        for (size_t c = 0; c < few.width_v; c += kLanes) {
          const V value = load_some(f, row + c);
          for (size_t r = 0; r < kRows; ++r) {
            float* place = few.o + r * few.width_v + c;
            hn::Store(hn::MulAdd(p[r], value, hn::Load(f, place)), f, place);
          }
        }
      });
    }
  });
}

/// One block of keys that begins at k0 and holds `count`.
template <size_t kRows>
HWY_INLINE void few_step(const ForwardTask& task, const ForwardScratch& x, const FewScratch& few,
                         const PanelMask& mask, std::int64_t k0, size_t count) {
  const F f;
  const BlockRange range = mask.in_block(k0, count);
  if (range.first >= range.last) return;
  const size_t last = std::min(range.last, count);
  if (task.score.has_pairs()) prefetch_pairs(task.score, mask, k0, range);
  few_scores<kRows>(task, few, k0, range.first, last, x.s);
  std::fill(x.s + last * kPanel, x.s + range.last * kPanel, 0.0f);
  V largest[kVectors];
  V correction[kVectors];
  for (size_t v = 0; v < kVectors && untouched(task.score, range); ++v) {
    largest[v] = hn::Set(f, -std::numeric_limits<float>::infinity());
    for (size_t j = range.first; j < range.last; ++j) {
      largest[v] = hn::Max(largest[v], hn::Load(f, x.s + j * kPanel + v * kLanes));
    }
  }
  make_probabilities(task, x, 0, mask, k0, range, largest, correction);
  HWY_ALIGN float factors[kPanel];
  for (size_t v = 0; v < kVectors; ++v) hn::Store(correction[v], f, factors + v * kLanes);
  few_output<kRows>(task, few, k0, range.first, last, x.s, factors);
}

template <size_t kRows>
void forward_few(const ForwardTask& task, std::byte* memory) {
  const size_t d_qk = static_cast<size_t>(task.d_qk);
  const size_t d_v = static_cast<size_t>(task.d_v);
  const ForwardScratch x(task.tiles, d_qk, d_v, memory);
  const FewScratch few(x, d_qk, d_v);
  const PanelMask mask(task.rule, task.group, task.first_row, task.last_row, task.first_key,
                       task.last_key);
  std::fill_n(x.maximum, kPanel, -std::numeric_limits<float>::infinity());
  std::fill_n(x.sum, kPanel, 0.0f);
  std::fill_n(x.top, kPanel, kNone);
  std::fill_n(x.s, x.keys * kPanel, 0.0f);  // lanes without rows stay finite
  std::fill_n(few.q, kRows * few.width_qk, 0.0f);
  std::fill_n(few.o, kRows * few.width_v, 0.0f);
  const auto offset = [&](const auto& operand, size_t lane) {
    const std::int64_t r = mask.first_row + static_cast<std::int64_t>(lane);
    return (r / task.group) * operand.row + (r % task.group) * operand.head;
  };
  with_type(task.q.data, task.q.dtype, [&](const auto* data) HWY_ATTR {
    for (size_t lane = 0; lane < mask.count; ++lane) {
      float* row = few.q + lane * few.width_qk;
      load_row(data + offset(task.q, lane), task.q.dim, d_qk, row);
      for (size_t c = 0; c < d_qk; ++c) row[c] *= task.score.prescale;
    }
  });
  const std::int64_t keys = task.tiles.keys;
  for (std::int64_t k0 = mask.any.begin / keys * keys; k0 < mask.any.end && !mask.any.empty();
       k0 += keys) {
    few_step<kRows>(task, x, few, mask, k0, static_cast<size_t>(std::min(keys, mask.any.end - k0)));
  }
  for (size_t lane = 0; lane < mask.count; ++lane) {
    float* row = few.o + lane * few.width_v;
    const float factor =
        finish_lane(task, x, 0, mask,
                    PackedRow(mask.first_row + static_cast<std::int64_t>(lane), task.group), lane);
    for (size_t c = 0; c < d_v; ++c) row[c] = factor == kEmptyRow ? 0.0f : row[c] * factor;
    store_row(row, d_v, task.o, offset(task.o, lane));
  }
}

/// An item of any number of rows.
void forward_any(const ForwardTask& task, std::byte* memory) {
  const std::int64_t rows = task.last_row - task.first_row;
  if (rows <= 1) return forward_few<1>(task, memory);
  if (rows <= 2) return forward_few<2>(task, memory);
  if constexpr (kFewRows > 2) {
    if (rows <= 4) return forward_few<4>(task, memory);
    if (rows <= 8 && task.tiles.keys >= 8) return forward_few<8>(task, memory);
  }
  forward_item(task, memory);
}

}  // namespace HWY_NAMESPACE
}  // namespace abacist::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
