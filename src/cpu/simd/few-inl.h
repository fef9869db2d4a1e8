// Forward pass of an item with few query rows (a decode step): each key and value is read once, as
// it lies, and meets all rows while it is in a register. Nothing is packed: at one row, packing and
// idle lanes cost several times what reading the cache does.
//
// An item has as many key/value heads as a panel has lanes for. In [b, s, h, d] and in pages the
// rows of all heads of a key lie side by side, those of one head pages apart: one head an item read
// 10.7 GB/s of K and V where all eight read 38 (Zen 4, f32, d 128, 32,768 keys; a copy 34: decision
// 002, which has later runs, too).
//
// Scores are dot products along the head dimension, put where `forward_item` has them (a row
// in a lane of a panel), so that masks, scores beyond plain ones, softmax and dropout are shared
// with it. O is kept by rows: O[r][c] += P[r][key] V[key][c].
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
#include <optional>
#include <type_traits>

#include "cpu/simd/forward-inl.h"
#include "cpu/simd/gemm-inl.h"
#include "cpu/simd/kernels.hpp"
#include "cpu/simd/pack-inl.h"
#include "cpu/simd/scores-inl.h"

HWY_BEFORE_NAMESPACE();
namespace abacist::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Rows of one key/value head at most: as many sums as stay in registers.
inline constexpr size_t kFewRows = kPanel >= 8 ? 8 : 2;

/// Keys that meet the rows of a head together: Q is loaded, and O loaded and stored, once for all.
template <size_t kRows>
inline constexpr size_t kTogether = std::clamp((kStep == 8 ? size_t{16} : size_t{8}) / kRows,
                                               size_t{1}, size_t{4});

/// The rows of all heads of an item: row r of key/value head h is `lanes[h * kRows + r]` of the
/// panel, and row h * kRows + r of `q` and `o`. Widths are whole vectors; rows up to kRows are 0.
struct FewRows {
  size_t heads, rows;
  size_t width_qk, width_v;
  float* q;  // [heads][kRows][width_qk], prescaled
  float* o;  // [heads][kRows][width_v]
  size_t lanes[kPanel];

  FewRows(const ForwardTask& task, const ForwardScratch& x, size_t padded_rows)
      : heads(static_cast<size_t>(task.kv_heads)),
        rows(static_cast<size_t>(task.last_row - task.first_row) / heads),
        width_qk(hwy::RoundUpTo(static_cast<size_t>(task.d_qk), kLanes)),
        width_v(hwy::RoundUpTo(static_cast<size_t>(task.d_v), kLanes)),
        q(x.q),
        o(x.o) {
    const size_t group = static_cast<size_t>(task.group) / heads;
    // A lone head's tile may begin at any of its rows; several heads come with all of theirs.
    for (size_t h = 0; h < heads; ++h) {
      for (size_t r = 0; r < rows; ++r) {
        lanes[h * padded_rows + r] =
            heads == 1 ? r : r / group * heads * group + h * group + r % group;
      }
    }
  }
};

/// Rows of K or V as contiguous floats or as they lie, those of some keys at a time.
template <class T>
struct FewKeys {
  /// Asked for to L2: 16 KiB ahead read 20% more a second than 4 KiB did, 32 KiB less. To L1 it was
  /// a third less.
  static constexpr std::int64_t kBytesAhead = 16384;

  KeyRows<T> rows;
  KeyRows<T> rows_ahead;
  const Operand& x;
  size_t depth;
  std::int64_t last;        ///< of the item
  std::int64_t keys_ahead;  ///< whose rows are asked for
  HWY_ALIGN float copy[4][kMaxHeadDim + kLanes];

  FewKeys(const Operand& operand, const T* data, size_t d, size_t heads, std::int64_t last_key)
      : rows(operand, data),
        rows_ahead(operand, data),
        x(operand),
        depth(d),
        last(last_key),
        keys_ahead(std::clamp(kBytesAhead / static_cast<std::int64_t>(heads * d * sizeof(T)),
                              std::int64_t{4}, std::int64_t{32})) {
    for (auto& row : copy) std::fill_n(row, hwy::RoundUpTo(d, kLanes), 0.0f);
  }

  /// Calls body(h, row[kCount]) for each head with rows that can be read in whole vectors.
  template <size_t kCount, class Body>
  HWY_INLINE void with(std::int64_t j, size_t heads, const Body& body) {
    const T* own[kCount];
    const T* ahead[kCount];
    bool lies_well = x.dim == 1 && depth % kLanes == 0;
    for (size_t i = 0; i < kCount; ++i) {
      own[i] = rows(j + static_cast<std::int64_t>(i));
      lies_well = lies_well && own[i] != nullptr;
      const std::int64_t next = j + static_cast<std::int64_t>(i) + keys_ahead;
      ahead[i] = next < last && x.dim == 1 ? rows_ahead(next) : nullptr;
      if (ahead[i] != nullptr) touch(ahead[i]);
    }
    for (size_t h = 0; h < heads; ++h) {
      const std::int64_t offset = static_cast<std::int64_t>(h) * x.head;
      for (size_t i = 0; i < kCount; ++i) {
        if (ahead[i] == nullptr) continue;
        const char* place = reinterpret_cast<const char*>(ahead[i] + offset);
        for (size_t at = 0; at < depth * sizeof(T); at += 64) __builtin_prefetch(place + at, 0, 2);
      }
      if (lies_well) {
        const T* row[kCount];
        for (size_t i = 0; i < kCount; ++i) row[i] = own[i] + offset;
        body(h, row);
        continue;
      }
      const float* row[kCount];
      for (size_t i = 0; i < kCount; ++i) {
        row[i] = copy[i];
        if (own[i] == nullptr) {
          std::fill_n(copy[i], depth, 0.0f);
        } else {
          load_row(own[i] + offset, x.dim, depth, copy[i]);
        }
      }
      body(h, row);
    }
  }

  /// The same for keys [first, last), kCount at a time and then one by one: body(h, j, row).
  template <size_t kCount, class Body>
  HWY_INLINE void walk(std::int64_t k0, size_t first, size_t end, size_t heads, const Body& body) {
    size_t j = first;
    for (; j + kCount <= end; j += kCount) {
      with<kCount>(k0 + static_cast<std::int64_t>(j), heads,
                   [&](size_t h, const auto& row) HWY_ATTR { body(h, j, row); });
    }
    for (; j < end; ++j) {
      with<1>(k0 + static_cast<std::int64_t>(j), heads,
              [&](size_t h, const auto& row) HWY_ATTR { body(h, j, row); });
    }
  }
};

#if HWY_TARGET != HWY_SCALAR
/// The 128-bit blocks of a vector, added up.
template <class D>
HWY_INLINE hn::Vec<F4> sum_of_blocks([[maybe_unused]] D d, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    return v;
  } else {
    const hn::Half<D> half;
    return sum_of_blocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

#endif

/// The sums of the lanes of four vectors, side by side: a tree over all four takes 13 instructions,
/// four sums one by one 28 or more.
HWY_INLINE hn::Vec<F4> sums_of_four(const V* v) {
#if HWY_TARGET == HWY_SCALAR
  return v[0];
#else
  const F f;
  const hn::Repartition<double, F> pairs;
  const V ab = hn::Add(hn::InterleaveLower(f, v[0], v[1]), hn::InterleaveUpper(f, v[0], v[1]));
  const V cd = hn::Add(hn::InterleaveLower(f, v[2], v[3]), hn::InterleaveUpper(f, v[2], v[3]));
  const auto lower = hn::InterleaveLower(pairs, hn::BitCast(pairs, ab), hn::BitCast(pairs, cd));
  const auto upper = hn::InterleaveUpper(pairs, hn::BitCast(pairs, ab), hn::BitCast(pairs, cd));
  const V blocks = hn::Add(hn::BitCast(f, lower), hn::BitCast(f, upper));
  return sum_of_blocks(f, blocks);
#endif
}

/// Scores of keys [first, last) of the block.
template <size_t kRows>
HWY_NOINLINE void few_scores(const ForwardTask& task, const FewRows& few, std::int64_t k0,
                             size_t first, size_t last, float* HWY_RESTRICT s) {
  const F f;
  with_type(task.k.data, task.k.dtype, [&](const auto* data) HWY_ATTR {
    FewKeys keys(task.k, data, static_cast<size_t>(task.d_qk), few.heads, task.last_key);
    keys.template walk<kTogether<kRows>>(
        k0, first, last, few.heads, [&](size_t h, size_t j, const auto& row) HWY_ATTR {
          constexpr size_t kCount = std::extent_v<std::remove_reference_t<decltype(row)>>;
          constexpr size_t kSums = hwy::RoundUpTo(kCount * kRows, 4);
          const float* q = few.q + h * kRows * few.width_qk;
          V sums[kSums];
          for (V& sum : sums) sum = hn::Zero(f);
          for (size_t c = 0; c < few.width_qk; c += kLanes) {
#pragma GCC unroll 4
            for (size_t i = 0; i < kCount; ++i) {
              const V key = load_some(f, row[i] + c);
#pragma GCC unroll 8
              for (size_t r = 0; r < kRows; ++r) {
                sums[i * kRows + r] =
                    hn::MulAdd(key, hn::Load(f, q + r * few.width_qk + c), sums[i * kRows + r]);
              }
            }
          }
          HWY_ALIGN float scores[kSums];
#pragma GCC unroll 4
          for (size_t n = 0; n < kSums; n += kLanes < 4 ? 1 : 4) {
            hn::Store(sums_of_four(sums + n), F4(), scores + n);
          }
          for (size_t i = 0; i < kCount; ++i) {
            for (size_t r = 0; r < few.rows; ++r) {
              s[(j + i) * kPanel + few.lanes[h * kRows + r]] = scores[i * kRows + r];
            }
          }
        });
  });
}

/// O: rescaled, plus P V over keys [first, last) of the block.
template <size_t kRows>
HWY_NOINLINE void few_output(const ForwardTask& task, const FewRows& few, std::int64_t k0,
                             size_t first, size_t last, const float* HWY_RESTRICT s,
                             const float* correction) {
  const F f;
  for (size_t h = 0; h < few.heads; ++h) {
    for (size_t r = 0; r < few.rows; ++r) {
      const V factor = hn::Set(f, correction[few.lanes[h * kRows + r]]);
      float* o = few.o + (h * kRows + r) * few.width_v;
      for (size_t c = 0; c < few.width_v; c += kLanes) {
        hn::Store(hn::Mul(hn::Load(f, o + c), factor), f, o + c);
      }
    }
  }
  with_type(task.v.data, task.v.dtype, [&](const auto* data) HWY_ATTR {
    FewKeys values(task.v, data, static_cast<size_t>(task.d_v), few.heads, task.last_key);
    values.template walk<kTogether<kRows>>(
        k0, first, last, few.heads, [&](size_t h, size_t j, const auto& row) HWY_ATTR {
          constexpr size_t kCount = std::extent_v<std::remove_reference_t<decltype(row)>>;
          float* o = few.o + h * kRows * few.width_v;
          V p[kCount][kRows];
#pragma GCC unroll 4
          for (size_t i = 0; i < kCount; ++i) {
#pragma GCC unroll 8
            for (size_t r = 0; r < kRows; ++r) {
              p[i][r] = r < few.rows ? hn::Set(f, s[(j + i) * kPanel + few.lanes[h * kRows + r]])
                                     : hn::Zero(f);
            }
          }
          for (size_t c = 0; c < few.width_v; c += kLanes) {
            V sums[kRows];
            for (size_t r = 0; r < kRows; ++r) sums[r] = hn::Load(f, o + r * few.width_v + c);
#pragma GCC unroll 4
            for (size_t i = 0; i < kCount; ++i) {
              const V value = load_some(f, row[i] + c);
#pragma GCC unroll 8
              for (size_t r = 0; r < kRows; ++r) sums[r] = hn::MulAdd(p[i][r], value, sums[r]);
            }
            for (size_t r = 0; r < kRows; ++r) hn::Store(sums[r], f, o + r * few.width_v + c);
          }
        });
  });
}

/// One block of keys that begins at k0 and holds `count`.
template <size_t kRows>
HWY_INLINE void few_step(const ForwardTask& task, const ForwardScratch& x, const FewRows& few,
                         const PanelMask& mask, std::int64_t k0, size_t count) {
  const F f;
  BlockRange range = mask.in_block(k0, count);
  if (range.first >= range.last) return;
  for (size_t v = hwy::DivCeil(mask.count, kLanes); v < kVectors; ++v) range.begin[v] = range.last;
  const size_t last = std::min(range.last, count);
  Maybe<PanelPairs> pairs;
  if (task.score.has_pairs()) pairs.emplace(task.score, mask).prefetch(k0, range);
  few_scores<kRows>(task, few, k0, range.first, last, x.s);
  std::fill(x.s + last * kPanel, x.s + range.last * kPanel, 0.0f);
  V largest[kVectors];
  V correction[kVectors];
  for (size_t v = 0; v < kVectors; ++v) {
    largest[v] = hn::Set(f, -std::numeric_limits<float>::infinity());
    for (size_t j = range.begin[v]; j < range.end[v] && untouched(task.score, range); ++j) {
      largest[v] = hn::Max(largest[v], hn::Load(f, x.s + j * kPanel + v * kLanes));
    }
  }
  make_probabilities(task, x, 0, mask, pairs, untouched(task.score, range), k0, range, largest,
                     correction);
  HWY_ALIGN float factors[kPanel];
  for (size_t v = 0; v < kVectors; ++v) hn::Store(correction[v], f, factors + v * kLanes);
  few_output<kRows>(task, few, k0, range.first, last, x.s, factors);
}

template <size_t kRows>
void forward_few(const ForwardTask& task, std::byte* memory) {
  const size_t d_qk = static_cast<size_t>(task.d_qk);
  const size_t d_v = static_cast<size_t>(task.d_v);
  const ForwardScratch x(task.tiles, d_qk, d_v, memory);
  const FewRows few(task, x, kRows);
  const PanelMask mask(task.rule, task.group, task.first_row, task.last_row, task.first_key,
                       task.last_key);
  std::fill_n(x.maximum, kPanel, -std::numeric_limits<float>::infinity());
  std::fill_n(x.sum, kPanel, 0.0f);
  std::fill_n(x.top, kPanel, kNone);
  std::fill_n(x.s, x.keys * kPanel, 0.0f);  // lanes without rows stay finite
  std::fill_n(few.q, few.heads * kRows * few.width_qk, 0.0f);
  std::fill_n(few.o, few.heads * kRows * few.width_v, 0.0f);
  const auto offset = [&](const auto& operand, size_t lane) {
    const std::int64_t r = mask.first_row + static_cast<std::int64_t>(lane);
    return (r / task.group) * operand.row + (r % task.group) * operand.head;
  };
  /// Calls body(lane, place in q and o) for every row.
  const auto for_each_row = [&](const auto& body) {
    for (size_t h = 0; h < few.heads; ++h) {
      for (size_t r = 0; r < few.rows; ++r) body(few.lanes[h * kRows + r], h * kRows + r);
    }
  };
  with_type(task.q.data, task.q.dtype, [&](const auto* data) HWY_ATTR {
    for_each_row([&](size_t lane, size_t place) HWY_ATTR {
      float* row = few.q + place * few.width_qk;
      load_row(data + offset(task.q, lane), task.q.dim, d_qk, row);
      for (size_t c = 0; c < d_qk; ++c) row[c] *= task.score.prescale;
    });
  });
  const std::int64_t keys = task.tiles.keys;
  for (std::int64_t k0 = mask.any.begin / keys * keys; k0 < mask.any.end && !mask.any.empty();
       k0 += keys) {
    few_step<kRows>(task, x, few, mask, k0, static_cast<size_t>(std::min(keys, mask.any.end - k0)));
  }
  for_each_row([&](size_t lane, size_t place) HWY_ATTR {
    float* row = few.o + place * few.width_v;
    const float factor =
        finish_lane(task, x, 0, mask,
                    PackedRow(mask.first_row + static_cast<std::int64_t>(lane), task.group), lane);
    for (size_t c = 0; c < d_v; ++c) row[c] = factor == kEmptyRow ? 0.0f : row[c] * factor;
    store_row(row, d_v, task.o, offset(task.o, lane));
  });
}

/// An item of any number of rows. Several key/value heads come with kFewRows rows each at most.
void forward_any(const ForwardTask& task, std::byte* memory) {
  const std::int64_t rows = (task.last_row - task.first_row) / task.kv_heads;
  if (rows <= 1) return forward_few<1>(task, memory);
  if (rows <= 2) return forward_few<2>(task, memory);
  if constexpr (kFewRows > 2) {
    if (rows <= 4) return forward_few<4>(task, memory);
    if (rows <= 8) return forward_few<8>(task, memory);
  }
  forward_item(task, memory);
}

}  // namespace HWY_NAMESPACE
}  // namespace abacist::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
