// Masks and score modifications of one panel, included once per instruction set.
#if defined(ABACIST_CPU_SIMD_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ABACIST_CPU_SIMD_SCORES_INL_H_
#undef ABACIST_CPU_SIMD_SCORES_INL_H_
#else
#define ABACIST_CPU_SIMD_SCORES_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <type_traits>
#include <utility>

#include "core/mask.hpp"
#include "cpu/simd/gemm-inl.h"
#include "cpu/simd/kernels.hpp"
#include "cpu/simd/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace abacist::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Cuts aligned arrays out of a block of memory; with a null block it only counts.
struct Carver {
  std::byte* memory = nullptr;
  size_t used = 0;

  float* floats(size_t count) {
    float* result = memory == nullptr ? nullptr : reinterpret_cast<float*>(memory + used);
    used += hwy::RoundUpTo(count * sizeof(float), size_t{64});
    return result;
  }
};

/// std::optional for large things in inner loops: GCC fills the empty one with zeros, 1 KB a panel
/// and block.
template <class T>
class Maybe {
 public:
  template <class... Arguments>
  T& emplace(Arguments&&... arguments) {
    value_ = new (bytes_) T(std::forward<Arguments>(arguments)...);
    return *value_;
  }
  explicit operator bool() const { return value_ != nullptr; }
  const T& operator*() const { return *value_; }
  const T* operator->() const { return value_; }

 private:
  static_assert(std::is_trivially_destructible_v<T>);
  alignas(T) std::byte bytes_[sizeof(T)];
  T* value_ = nullptr;
};

/// Keys [first, last) of a block, multiples of kStep. Of vector v of the panel [begin[v], end[v]):
/// all of them, or what `trimmed` leaves. Keys [seen_first, seen_last) need no mask: every lane
/// sees them.
struct BlockRange {
  size_t first = 0, last = 0;
  size_t seen_first = 0, seen_last = 0;
  size_t begin[kVectors] = {};
  size_t end[kVectors] = {};

  bool every_lane_sees(size_t j, size_t count) const {
    return j >= seen_first && j + count <= seen_last;
  }
  bool full() const { return every_lane_sees(first, last - first); }
};

/// What the lanes of a panel see. Lane l is packed row first_row + l = i * group + g; lanes past
/// `count` hold nothing and count as seeing all.
struct PanelMask {
  core::MaskRule rule{};
  std::int64_t group = 1;
  std::int64_t first_row = 0;
  size_t count = 0;
  std::int64_t first_key = 0, last_key = 0;  ///< of the item
  core::Interval any{};                      ///< keys that some lane sees
  core::Interval all{};                      ///< keys that every lane sees

  PanelMask() = default;
  PanelMask(const core::MaskRule& mask_rule, std::int64_t group_size, std::int64_t row,
            std::int64_t last_row, std::int64_t key_begin, std::int64_t key_end)
      : rule(mask_rule),
        group(group_size),
        first_row(row),
        count(static_cast<size_t>(std::min(last_row - row, std::int64_t{kPanel}))),
        first_key(key_begin),
        last_key(key_end) {
    const core::Interval top = visible(first_row);
    const core::Interval bottom = visible(first_row + static_cast<std::int64_t>(count) - 1);
    any = {top.begin, bottom.end};
    all = {bottom.begin, top.end};
  }

  core::Interval visible(std::int64_t packed_row) const { return visible_of(packed_row / group); }

  /// What query row i sees of the item's keys.
  core::Interval visible_of(std::int64_t i) const {
    const core::Interval seen = rule.visible(i);
    return {std::max(seen.begin, first_key), std::min(seen.end, last_key)};
  }

  BlockRange in_block(std::int64_t k0, size_t keys) const {
    const std::int64_t first = std::max(any.begin - k0, std::int64_t{0});
    const std::int64_t last = std::min(any.end - k0, static_cast<std::int64_t>(keys));
    BlockRange range;
    if (first >= last) return range;
    range.first = static_cast<size_t>(first) / kStep * kStep;
    range.last = hwy::RoundUpTo(static_cast<size_t>(last), kStep);
    range.seen_first = static_cast<size_t>(std::max(all.begin - k0, std::int64_t{0}));
    range.seen_last = static_cast<size_t>(std::max(all.end - k0, std::int64_t{0}));
    std::fill_n(range.begin, kVectors, range.first);
    std::fill_n(range.end, kVectors, range.last);
    return range;
  }

  /// A range of `in_block` without the keys that no lane of a vector sees: begin and end ascend
  /// with v, and all vectors meet. Left as it is where they would not (windows narrower than a
  /// panel).
  BlockRange trimmed(const BlockRange& range, std::int64_t k0) const {
    const auto within = [&](std::int64_t key) {
      return static_cast<size_t>(std::clamp(key - k0, static_cast<std::int64_t>(range.first),
                                            static_cast<std::int64_t>(range.last)));
    };
    BlockRange cut = range;
    for (size_t v = 0; v < kVectors; ++v) {
      if (v * kLanes >= count) {
        cut.begin[v] = range.last;
        continue;
      }
      const auto lane = first_row + static_cast<std::int64_t>(v * kLanes);
      const auto last_lane =
          first_row + static_cast<std::int64_t>(std::min((v + 1) * kLanes, count));
      cut.begin[v] = within(visible(lane).begin) / kStep * kStep;
      cut.end[v] = hwy::RoundUpTo(within(visible(last_lane - 1).end), kStep);
    }
    return cut.begin[kVectors - 1] <= cut.end[0] ? cut : range;
  }
};

/// Query row i and head g of packed row i * group + g. Walking lanes with it takes no division.
struct PackedRow {
  std::int64_t i, g;

  PackedRow(std::int64_t row, std::int64_t group) : i(row / group), g(row % group) {}
  void advance(std::int64_t group) {
    if (++g == group) ++i, g = 0;
  }
};

/// Per-lane numbers of a panel against the block that starts at key k0.
struct LaneValues {
  HWY_ALIGN float first[kPanel];     // first visible key of the block, relative
  HWY_ALIGN float last[kPanel];      // one past the last, relative
  HWY_ALIGN float position[kPanel];  // i + shift - k0
  HWY_ALIGN float slope[kPanel];     // ALiBi, natural units

  LaneValues(const ScoreRule& score, const PanelMask& mask, std::int64_t k0) {
    const auto relative = [k0](std::int64_t key) {
      return static_cast<float>(std::clamp<std::int64_t>(key - k0, -1, 1 << 20));
    };
    PackedRow r(mask.first_row, mask.group);
    for (size_t lane = 0; lane < mask.count; ++lane, r.advance(mask.group)) {
      const core::Interval seen = mask.visible_of(r.i);
      first[lane] = relative(seen.begin);
      last[lane] = seen.empty() ? -1.0f : relative(seen.end);
      position[lane] = static_cast<float>(r.i + mask.rule.shift - k0);
      slope[lane] = score.slopes == nullptr ? 0.0f : score.slopes[r.g * score.slopes_stride];
    }
    for (float* values : {first, last, position, slope}) {
      std::fill(values + mask.count, values + kPanel, values[0]);
    }
  }
};

/// One vector of LaneValues.
struct LaneVectors {
  V first, last, position, slope;

  /// Of lanes that see all.
  LaneVectors()
      : first(hn::Set(F(), -std::numeric_limits<float>::infinity())),
        last(hn::Neg(first)),
        position(hn::Zero(F())),
        slope(position) {}
  LaneVectors(const LaneValues& lanes, size_t v)
      : first(hn::Load(F(), lanes.first + v * kLanes)),
        last(hn::Load(F(), lanes.last + v * kLanes)),
        position(hn::Load(F(), lanes.position + v * kLanes)),
        slope(hn::Load(F(), lanes.slope + v * kLanes)) {}

  HWY_INLINE hn::Mask<F> sees(V key) const {
    return hn::And(hn::Ge(key, first), hn::Lt(key, last));
  }
};

inline constexpr float kLog2E = 1.44269504f;

/// The score chain of one vector: scale, softcap, ALiBi, in natural units. `derivative` is that of
/// softcap, 1 - tanh^2.
HWY_INLINE V chain(const ScoreRule& score, V s, const LaneVectors& lane, V key, V& derivative) {
  const F f;
  const V one = hn::Set(f, 1.0f);
  derivative = one;
  s = hn::Mul(s, hn::Set(f, score.postscale));
  if (score.softcap > 0.0f) {
    const V t = tanh(f, hn::Div(s, hn::Set(f, score.softcap)));
    derivative = hn::NegMulAdd(t, t, one);
    s = hn::Mul(t, hn::Set(f, score.softcap));
  }
  if (score.slopes != nullptr) {
    s = hn::NegMulAdd(lane.slope, hn::Abs(hn::Sub(lane.position, key)), s);
  }
  return s;
}

/// The same in base-2 units.
HWY_INLINE V modify(const ScoreRule& score, V s, const LaneVectors& lane, V key, V& derivative) {
  return hn::Mul(chain(score, s, lane, key, derivative), hn::Set(F(), kLog2E));
}

/// Hides scores of a product, while they are in registers, at a mask's edges.
template <size_t first, size_t last>
HWY_INLINE void hide_edges(const LaneValues& lanes, const BlockRange& range, size_t j,
                           Accumulators& acc) {
  if (range.every_lane_sees(j, kStep)) return;
  const F f;
  const V hidden = hn::Set(f, -std::numeric_limits<float>::infinity());
  for (size_t v = first; v < last; ++v) {
    const LaneVectors lane(lanes, v);
    for (size_t m = 0; m < kStep; ++m) {
      const V key = hn::Set(f, static_cast<float>(j + m));
      acc.c[m][v] = hn::IfThenElse(lane.sees(key), acc.c[m][v], hidden);
    }
  }
}

/// Scores of keys range of the block in place: the chain (unless plain), base-2 units, -inf where a
/// lane does not see; and the largest per lane anew.
inline void modify_scores(const ScoreRule& score, const PanelMask& mask, std::int64_t k0,
                          const BlockRange& range, float* HWY_RESTRICT scores,
                          V (&largest)[kVectors]) {
  const F f;
  const LaneValues lanes(score, mask, k0);
  const V hidden = hn::Set(f, -std::numeric_limits<float>::infinity());
  for (size_t v = 0; v < kVectors; ++v) {
    const LaneVectors lane(lanes, v);
    V most = hidden;
    for (size_t j = range.begin[v]; j < range.end[v]; ++j) {
      const V key = hn::Set(f, static_cast<float>(j));
      float* place = scores + j * kPanel + v * kLanes;
      V s = hn::Load(f, place);
      V derivative;
      if (!score.plain) s = modify(score, s, lane, key, derivative);
      if (!range.full()) s = hn::IfThenElse(lane.sees(key), s, hidden);
      hn::Store(s, f, place);
      most = hn::Max(most, s);
    }
    largest[v] = most;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace abacist::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
