// Operands with an element for every (query, key) pair: bias and boolean mask, read as they lie
// (keys contiguous, or any stride) and turned so that queries lie in the lanes. Included once per
// instruction set.
#if defined(ABACIST_CPU_SIMD_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ABACIST_CPU_SIMD_PAIRS_INL_H_
#undef ABACIST_CPU_SIMD_PAIRS_INL_H_
#else
#define ABACIST_CPU_SIMD_PAIRS_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <limits>

#include "cpu/simd/gemm-inl.h"
#include "cpu/simd/kernels.hpp"
#include "cpu/simd/pack-inl.h"
#include "cpu/simd/scores-inl.h"

HWY_BEFORE_NAMESPACE();
namespace abacist::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Keys that are read at a time, a cache line of floats, and that scores are made of.
inline constexpr size_t kKeysRead = 16;
inline constexpr size_t kKeys = 4;
using Words = hn::Vec<hn::RebindToUnsigned<F>>;

#if HWY_TARGET == HWY_SCALAR
HWY_INLINE void turn(V*) {}
#else
/// 16 bytes, their bits in a vector of floats.
HWY_INLINE hn::Vec<F4> load_bytes(const std::byte* p) {
  const hn::Repartition<std::uint8_t, F4> bytes;
  return hn::BitCast(F4(), hn::LoadU(bytes, reinterpret_cast<const std::uint8_t*>(p)));
}

/// The same of rows[0], rows[4], ... from byte `at` on, one row a 128-bit block.
template <class D>
HWY_INLINE hn::Vec<D> load_blocks(D d, const void* const* rows, std::int64_t at) {
  if constexpr (hn::MaxLanes(d) <= 4) {
    return load_bytes(static_cast<const std::byte*>(rows[0]) + at);
  } else {
    const hn::Half<D> half;
    return hn::Combine(d, load_blocks(half, rows + hn::MaxLanes(half), at),
                       load_blocks(half, rows, at));
  }
}

/// Turns 4 x 4 elements in every 128-bit block of four vectors.
HWY_INLINE void turn_blocks(V* x) {
  const F f;
  const hn::Repartition<double, F> pairs;
  const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(f, x[0], x[1]));
  const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(f, x[2], x[3]));
  const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(f, x[0], x[1]));
  const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(f, x[2], x[3]));
  x[0] = hn::BitCast(f, hn::InterleaveLower(pairs, low01, low23));
  x[1] = hn::BitCast(f, hn::InterleaveUpper(pairs, low01, low23));
  x[2] = hn::BitCast(f, hn::InterleaveLower(pairs, high01, high23));
  x[3] = hn::BitCast(f, hn::InterleaveUpper(pairs, high01, high23));
}

/// Turns kLanes x kLanes elements: x[i] lane j goes to x[j] lane i.
HWY_INLINE void turn(V* x) {
  for (size_t i = 0; i < kLanes; i += 4) turn_blocks(x + i);
  const F f;
  for (size_t m = 0; m < 4; ++m) {
    if constexpr (kLanes == 8) {
      const V low = hn::ConcatLowerLower(f, x[4 + m], x[m]);
      x[4 + m] = hn::ConcatUpperUpper(f, x[4 + m], x[m]);
      x[m] = low;
    } else if constexpr (kLanes == 16) {
      const V even01 = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(x[4 + m]), x[m]);
      const V odd01 = hn::OddEvenBlocks(x[4 + m], hn::SwapAdjacentBlocks(x[m]));
      const V even23 = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(x[12 + m]), x[8 + m]);
      const V odd23 = hn::OddEvenBlocks(x[12 + m], hn::SwapAdjacentBlocks(x[8 + m]));
      x[m] = hn::ConcatLowerLower(f, even23, even01);
      x[4 + m] = hn::ConcatLowerLower(f, odd23, odd01);
      x[8 + m] = hn::ConcatUpperUpper(f, even23, even01);
      x[12 + m] = hn::ConcatUpperUpper(f, odd23, odd01);
    }
  }
}
#endif

/// The rows of one operand that a panel's lanes read.
class LaneRows {
 public:
  LaneRows(const PairOperand& x, const PanelMask& mask) : x_(x) {
    if (x.data == nullptr) return;
    same_ = x.row == 0 && (x.head == 0 || mask.group == 1);
    PackedRow r(mask.first_row, mask.group);
    const auto row = [&] {
      return static_cast<const std::byte*>(x.data) +
             (r.i * x.row + r.g * x.head) * size_of(x.dtype);
    };
    std::fill_n(rows_, kPanel, row());  // lanes without rows
    for (size_t lane = 1; lane < mask.count; ++lane) {
      r.advance(mask.group);
      rows_[lane] = row();
    }
  }

  /// Floats of keys [key, key + 16) in the lanes of vector v; 0 past the operand's end. Each row's
  /// line is read once: rows whole pages apart share a few lines of L1, and came from L2 for every
  /// four keys.
  HWY_INLINE void load(size_t v, std::int64_t key, V (&out)[kKeysRead]) const {
    const F f;
    const void* const* rows = rows_ + v * kLanes;
    if (!same_ && x_.key == 1 && key + std::int64_t{kKeysRead} <= x_.keys) {
      with_type(rows, x_.dtype, [&](const auto* type) HWY_ATTR {
        for (size_t first = 0; first < kKeysRead; first += kLanes) {
          for (size_t lane = 0; lane < kLanes; ++lane) {
            const auto* row = static_cast<decltype(type)>(rows[lane]);
            out[first + lane] = load_some(f, row + key + static_cast<std::int64_t>(first));
          }
          turn(out + first);
        }
      });
      return;
    }
    for (size_t m = 0; m < kKeysRead; ++m) {
      const std::int64_t j = key + static_cast<std::int64_t>(m);
      HWY_ALIGN float values[kLanes] = {};
      if (same_) {
        out[m] = hn::Set(f, j < x_.keys ? element(rows[0], j) : 0.0f);
        continue;
      }
      for (size_t lane = 0; lane < kLanes && j < x_.keys; ++lane) {
        values[lane] = element(rows[lane], j);
      }
      out[m] = hn::Load(f, values);
    }
  }

  /// Bytes of keys [key, key + 16): words[m] has those of keys key + 4 m ... in each lane's
  /// integer; 0 past the end.
  HWY_INLINE void load_words(size_t v, std::int64_t key, Words (&words)[kKeys]) const {
    const hn::RebindToUnsigned<F> u;
    const void* const* rows = rows_ + v * kLanes;
#if HWY_TARGET != HWY_SCALAR
    if (!same_ && x_.key == 1 && key + std::int64_t{kKeysRead} <= x_.keys) {
      V turned[kKeys];
      for (size_t m = 0; m < kKeys; ++m) turned[m] = load_blocks(F(), rows + m, key);
      turn_blocks(turned);
      for (size_t m = 0; m < kKeys; ++m) words[m] = hn::BitCast(u, turned[m]);
      return;
    }
#endif
    for (size_t m = 0; m < kKeys; ++m) {
      const std::int64_t j = key + static_cast<std::int64_t>(kKeys * m);
      HWY_ALIGN std::uint32_t values[kLanes];
      for (size_t lane = 0; lane < (same_ ? 1 : kLanes); ++lane) {
        values[lane] = bytes(rows[lane], j);
      }
      words[m] = same_ ? hn::Set(u, values[0]) : hn::Load(u, values);
    }
  }

  /// Asks for keys [key, key + count) to be brought to L2; to L1 they would displace the tiles (6%
  /// of the forward pass with a bias at d 64). Rows are pages apart: each is touched first, where
  /// the block before has been (bias at d 64: 85% of the plain pass, 80% without).
  void prefetch(std::int64_t key, std::int64_t count) const {
    if (x_.key != 1 || key >= x_.keys) return;
    const std::int64_t size = size_of(x_.dtype);
    const std::int64_t first = key * size;
    const std::int64_t last = std::min(key + count, x_.keys) * size - 1;
    const auto row = [&](size_t lane) { return static_cast<const char*>(rows_[lane]); };
    const size_t rows = same_ ? 1 : kPanel;
    for (size_t lane = 0; lane < rows; ++lane) {
      touch(row(lane) + std::max(first - 1, std::int64_t{0}));
    }
    for (size_t lane = 0; lane < rows; ++lane) {
      if (lane > 0 && rows_[lane] == rows_[lane - 1]) continue;
      for (std::int64_t at = first; at < last; at += 64) __builtin_prefetch(row(lane) + at, 0, 2);
      __builtin_prefetch(row(lane) + last, 0, 2);
    }
  }

 private:
  float element(const void* row, std::int64_t j) const {
    const std::int64_t at = j * x_.key;
    if (x_.dtype == DType::bf16) return load1(static_cast<const hwy::bfloat16_t*>(row) + at);
    if (x_.dtype == DType::f16) return load1(static_cast<const hwy::float16_t*>(row) + at);
    return static_cast<const float*>(row)[at];
  }

  std::uint32_t bytes(const void* row, std::int64_t key) const {
    const auto* data = static_cast<const std::uint8_t*>(row);
    std::uint32_t four = 0;
    if (x_.key == 1 && key + std::int64_t{kKeys} <= x_.keys) {
      __builtin_memcpy(&four, data + key, sizeof(four));
      return four;
    }
    for (std::int64_t m = 0; m < std::int64_t{kKeys} && key + m < x_.keys; ++m) {
      four |= std::uint32_t{data[(key + m) * x_.key]} << (8 * m);
    }
    return four;
  }

  PairOperand x_;
  bool same_ = false;
  const void* rows_[kPanel];
};

/// What bias and boolean mask say about the pairs of one panel.
class PanelPairs {
 public:
  PanelPairs(const ScoreRule& score, const PanelMask& mask)
      : has_bias_(score.bias.data != nullptr),
        has_visible_(score.visible.data != nullptr),
        has_valid_(score.valid.data != nullptr),
        bias_(score.bias, mask),
        visible_(score.visible, mask),
        valid_(score.valid, mask) {}

  bool has_bias() const { return has_bias_; }

  /// Calls body(j, added) for the keys j = first, first + 4, ... of the block that begins at k0:
  /// added[m] is what the score of key j + m gets, -inf hides.
  template <class Body>
  HWY_INLINE void for_each(size_t v, std::int64_t k0, const BlockRange& range,
                           const Body& body) const {
    for (size_t j = range.begin[v]; j < range.end[v]; j += kKeysRead) {
      V added[kKeysRead];
      Words visible[kKeys], valid[kKeys];
      const std::int64_t key = k0 + static_cast<std::int64_t>(j);
      if (has_bias_) {
        bias_.load(v, key, added);
      } else {
        for (V& value : added) value = hn::Zero(F());
      }
      if (has_visible_) visible_.load_words(v, key, visible);
      if (has_valid_) valid_.load_words(v, key, valid);
      for (size_t i = 0; i < kKeys && j + i * kKeys < range.end[v]; ++i) {
        V* four = added + i * kKeys;
        if (has_visible_) hide(visible[i], four);
        if (has_valid_) hide(valid[i], four);
        body(j + i * kKeys, four);
      }
    }
  }

  /// Asks for the pairs of a block that begins at k0.
  void prefetch(std::int64_t k0, const BlockRange& range) const {
    const std::int64_t key = k0 + static_cast<std::int64_t>(range.first);
    const auto count = static_cast<std::int64_t>(range.last - range.first);
    if (has_bias_) bias_.prefetch(key, count);
    if (has_visible_) visible_.prefetch(key, count);
  }

 private:
  HWY_INLINE static void hide(Words bytes, V* added) {
    const F f;
    const hn::RebindToUnsigned<F> u;
    const V hidden = hn::Set(f, -std::numeric_limits<float>::infinity());
    for (size_t m = 0; m < kKeys; ++m) {
      const auto wanted = hn::Set(u, 0xffu << (8 * m));
      const auto unseen = hn::Eq(hn::And(bytes, wanted), hn::Zero(u));
      added[m] = hn::IfThenElse(hn::RebindMask(f, unseen), hidden, added[m]);
    }
  }

  bool has_bias_, has_visible_, has_valid_;
  LaneRows bias_, visible_, valid_;
};

/// A score in base-2 units. The product may leave float's range (a bias of -3.4e38 is a finite
/// number): it stops at the lowest one. -inf and NaN stay.
HWY_INLINE V to_base2(V s) {
  const F f;
  const V lowest = hn::Set(f, std::numeric_limits<float>::lowest());
  const V product = hn::Mul(s, hn::Set(f, kLog2E));
  const auto below = hn::And(hn::Lt(product, lowest), hn::Ge(s, lowest));
  return hn::IfThenElse(below, lowest, product);
}

/// Scores of four keys of one vector where nothing but a bias or a boolean mask is added, all of
/// them far from the ends of float's range, so that no pair needs a look of its own: false, and
/// nothing done, if one does. Without a bias, pairs that the mask hides may be among them.
template <bool kBias>
HWY_INLINE bool add_to_scores(float* HWY_RESTRICT place, const V* added, V scale, V& most) {
  const F f;
  // Beyond 2e38, and of NaN, the sum of 1.7 s is not finite: one instruction a score, where a
  // comparison and its mask take two.
  const V factor = hn::Set(f, 1.7f);
  V probe = hn::Zero(f);
  V s[kKeys];
  for (size_t m = 0; m < kKeys; ++m) {
    s[m] = hn::Load(f, place + m * kPanel);
    if constexpr (kBias) s[m] = hn::MulAdd(s[m], scale, added[m]);
    probe = hn::MulAdd(s[m], factor, probe);
  }
  const V infinite = hn::Set(f, std::numeric_limits<float>::infinity());
  if (!hn::AllTrue(f, hn::Lt(hn::Abs(probe), infinite))) return false;
  for (size_t m = 0; m < kKeys; ++m) {
    if constexpr (!kBias) s[m] = hn::Add(s[m], added[m]);
    hn::Store(kBias ? hn::Mul(s[m], hn::Set(f, kLog2E)) : s[m], f, place + m * kPanel);
    most = hn::Max(most, s[m]);
  }
  return true;
}

/// `modify_pair_scores` for one kind of scores: with a bias or without, and with nothing else to do
/// to a product but its scale (kSimple). Specialised: a mask [1, 1, 1, s_k] then costs the forward
/// pass 7% at d 64 instead of 12% (AVX-512).
template <bool kBias, bool kSimple>
HWY_NOINLINE void pair_scores(const ScoreRule& score, const PanelMask& mask,
                              const PanelPairs& pairs, std::int64_t k0, const BlockRange& range,
                              float* HWY_RESTRICT scores, float* HWY_RESTRICT top,
                              V (&largest)[kVectors]) {
  const F f;
  LaneValues lanes;
  if (!kSimple || !range.full()) lanes = LaneValues(score, mask, k0);
  const V hidden = hn::Set(f, -std::numeric_limits<float>::infinity());
  const V lowest = hn::Set(f, std::numeric_limits<float>::lowest());
  const V scale = hn::Set(f, score.postscale);
  constexpr bool kNatural = kBias || !kSimple;  // else the products are in base-2 units
  for (size_t v = 0; v < kVectors; ++v) {
    const LaneVectors lane(lanes, v);
    V most = hidden;
    pairs.for_each(v, k0, range, [&](size_t j, const V* added) HWY_ATTR {
      float* four = scores + j * kPanel + v * kLanes;
      if constexpr (kSimple) {
        const bool inner = range.every_lane_sees(j, kKeys);
        if (inner && add_to_scores<kBias>(four, added, scale, most)) return;
      }
      for (size_t m = 0; m < kKeys; ++m) {
        const V key = hn::Set(f, static_cast<float>(j + m));
        V s = hn::Load(f, four + m * kPanel);
        if constexpr (!kSimple) {
          V derivative;
          s = chain(score, s, lane, key, derivative);
          if constexpr (kBias) s = hn::Add(s, added[m]);
        } else if constexpr (kBias) {
          s = hn::MulAdd(s, scale, added[m]);
        }
        auto seen = hn::Not(hn::Eq(added[m], hidden));
        if (!range.full()) seen = hn::And(seen, lane.sees(key));
        hn::Store(hn::IfThenElse(seen, kNatural ? to_base2(s) : s, hidden), f, four + m * kPanel);
        // NaN and -inf count as the lowest number here: the row has seen a key.
        const V counted = hn::IfThenElse(hn::Gt(s, lowest), s, lowest);
        most = hn::Max(most, hn::IfThenElse(seen, counted, hidden));
      }
    });
    hn::Store(hn::Max(most, hn::Load(f, top + v * kLanes)), f, top + v * kLanes);
    largest[v] = kNatural ? to_base2(most) : most;
  }
}

/// `modify_scores` where bias or boolean mask take part. `top` [kPanel] is the running maximum of
/// each lane in natural units, -inf as long as the lane has seen no key: what a row sees is decided
/// by the masks, never by the scores.
inline void modify_pair_scores(const ScoreRule& score, const PanelMask& mask,
                               const PanelPairs& pairs, std::int64_t k0, const BlockRange& range,
                               float* HWY_RESTRICT scores, float* HWY_RESTRICT top,
                               V (&largest)[kVectors]) {
  const bool simple = score.softcap == 0.0f && score.slopes == nullptr;
  if (score.bias.data != nullptr) {
    if (simple) return pair_scores<true, true>(score, mask, pairs, k0, range, scores, top, largest);
    return pair_scores<true, false>(score, mask, pairs, k0, range, scores, top, largest);
  }
  if (score.plain)
    return pair_scores<false, true>(score, mask, pairs, k0, range, scores, top, largest);
  pair_scores<false, false>(score, mask, pairs, k0, range, scores, top, largest);
}

}  // namespace HWY_NAMESPACE
}  // namespace abacist::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
