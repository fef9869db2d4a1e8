// Scores with a boolean mask or a bias: what the products take in while they are in registers, and
// a pass of its own for the rest. Included once per instruction set.
#if defined(ABACIST_CPU_SIMD_PAIR_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ABACIST_CPU_SIMD_PAIR_SCORES_INL_H_
#undef ABACIST_CPU_SIMD_PAIR_SCORES_INL_H_
#else
#define ABACIST_CPU_SIMD_PAIR_SCORES_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "cpu/simd/gemm-inl.h"
#include "cpu/simd/kernels.hpp"
#include "cpu/simd/pairs-inl.h"
#include "cpu/simd/scores-inl.h"

HWY_BEFORE_NAMESPACE();
namespace abacist::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// A score in base-2 units. The product may leave float's range (a bias of -3.4e38 is a finite
/// number): it stops at the lowest one. -inf and NaN stay.
HWY_INLINE V to_base2(V s) {
  const F f;
  const V lowest = hn::Set(f, std::numeric_limits<float>::lowest());
  const V product = hn::Mul(s, hn::Set(f, kLog2E));
  const auto below = hn::And(hn::Lt(product, lowest), hn::Ge(s, lowest));
  return hn::IfThenElse(below, lowest, product);
}

/// What plain scores of a panel and a block take in where a boolean mask or mask edges hide pairs:
/// a bit a pair, applied while scores are in registers. Sixteen keys are turned right before their
/// products (d 64, share of the plain forward pass: 0.89 with a pass of its own over the scores ->
/// 0.93).
class SeenPairs {
 public:
  static constexpr bool kScores = true;

  /// `top` as `modify_pair_scores` has it: any number for lanes that see a key.
  SeenPairs(const PanelPairs& pairs, const Maybe<LaneValues>& edges, std::int64_t k0,
            const BlockRange& range, size_t block_keys, float* top)
      : pairs_(pairs),
        edges_(edges),
        range_(range),
        k0_(k0),
        distance_(static_cast<std::int64_t>(block_keys)),
        top_(top) {}

  /// Before the products of keys from j on.
  template <size_t first, size_t last>
  HWY_INLINE void before(size_t j) {
    for (size_t v = first; v < last; ++v) {
      if (j < ready_[v]) continue;
      ready_[v] = j + kKeysRead;
      const size_t count = std::min(kKeysRead, range_.end[v] - j);
      if (range_.every_lane_sees(j, count)) {
        turn_bytes<true>(v, j, count);
      } else {
        turn_bytes<false>(v, j, count);
      }
    }
  }

  /// Products to scores.
  template <size_t first, size_t last>
  HWY_INLINE void finish(size_t j, Accumulators& acc) const {
    const F f;
    const V hidden = hn::Set(f, -std::numeric_limits<float>::infinity());
    for (size_t v = first; v < last; ++v) {
      const auto* bits = seen_[v] + (j + kKeysRead - ready_[v]);
      for (size_t m = 0; m < kStep; ++m) {
        acc.c[m][v] = hn::IfThenElse(hn::LoadMaskBits(f, bits[m]), acc.c[m][v], hidden);
      }
    }
  }

 private:
  /// Keys [j, j + count) of vector v.
  template <bool kInner>
  HWY_NOINLINE void turn_bytes(size_t v, size_t j, size_t count) {
    const F f;
    const V hidden = hn::Set(f, -std::numeric_limits<float>::infinity());
    const std::int64_t key = k0_ + static_cast<std::int64_t>(j);
    pairs_.visible().prefetch_after(v, key, distance_);
    Words words[kKeys];
    pairs_.load_bytes(v, key, words);
    LaneVectors lane;
    if constexpr (!kInner) lane = LaneVectors(*edges_, v);
    auto any = hn::Lt(hidden, hidden);  // none so far
    for (size_t m = 0; m < count; ++m) {
      auto seen = byte_set(words[m / kKeys], m % kKeys);
      if constexpr (!kInner) {
        seen = hn::And(seen, lane.sees(hn::Set(f, static_cast<float>(j + m))));
      }
      any = hn::Or(any, seen);
      hn::StoreMaskBits(f, seen, seen_[v][m]);
    }
    float* top = top_ + v * kLanes;
    hn::Store(hn::IfThenElse(any, hn::Zero(f), hn::Load(f, top)), f, top);
  }

  const PanelPairs& pairs_;
  const Maybe<LaneValues>& edges_;
  const BlockRange& range_;
  std::int64_t k0_;
  std::int64_t distance_;
  float* top_;
  size_t ready_[kVectors] = {};                     // keys before it are turned
  std::uint8_t seen_[kVectors][kKeysRead][8] = {};  // LoadMaskBits may read 8 bytes
};

/// Scores of keys [j, j + 16) of the block that begins at k0, of one vector, where nothing but a
/// bias is added, all that the lanes see far from the ends of float's range, so that no pair needs
/// a look of its own: false if one does. kAll: every lane sees them all.
template <bool kAll>
HWY_INLINE bool add_bias(const LaneRows& bias, size_t v, std::int64_t k0, size_t j,
                         const LaneVectors& lane, V scale, float* HWY_RESTRICT scores, V& most) {
  const F f;
  const V hidden = hn::Set(f, -std::numeric_limits<float>::infinity());
  float* place = scores + j * kPanel + v * kLanes;
  bool done = false;
  bias.with_lines(v, k0 + static_cast<std::int64_t>(j), [&](const V* added) HWY_ATTR {
    const auto sees = [&](size_t m) HWY_ATTR {
      const auto in_mask = lane.sees(hn::Set(f, static_cast<float>(j + m)));
      return hn::And(in_mask, hn::Not(hn::Eq(added[m], hidden)));
    };
    // Beyond 2e38, and of NaN, the sum of 1.7 s is not finite: one instruction a score, where a
    // comparison and its mask take two.
    V probe[2] = {hn::Zero(f), hn::Zero(f)};
    V s[kKeysRead];
    for (size_t m = 0; m < kKeysRead; ++m) {
      s[m] = hn::MulAdd(hn::Load(f, place + m * kPanel), scale, added[m]);
      if constexpr (!kAll) s[m] = hn::IfThenElseZero(sees(m), s[m]);
      probe[m % 2] = hn::MulAdd(s[m], hn::Set(f, 1.7f), probe[m % 2]);
    }
    const V infinite = hn::Set(f, std::numeric_limits<float>::infinity());
    if (!hn::AllTrue(f, hn::Lt(hn::Abs(hn::Add(probe[0], probe[1])), infinite))) return;
    for (size_t m = 0; m < kKeysRead; ++m) {
      if constexpr (!kAll) s[m] = hn::IfThenElse(sees(m), s[m], hidden);
      hn::Store(hn::Mul(s[m], hn::Set(f, kLog2E)), f, place + m * kPanel);
      most = hn::Max(most, s[m]);
    }
    done = true;
  });
  return done;
}

/// `modify_scores` where bias or boolean mask take part, in a pass of its own. `top` [kPanel] is
/// the running maximum of each lane in natural units, -inf as long as the lane has seen no key:
/// what a row sees is decided by the masks, never by the scores.
HWY_NOINLINE void modify_pair_scores(const ScoreRule& score, const PanelMask& mask,
                                     const PanelPairs& pairs, std::int64_t k0, size_t block_keys,
                                     const BlockRange& range, float* HWY_RESTRICT scores,
                                     float* HWY_RESTRICT top, V (&largest)[kVectors]) {
  const F f;
  Maybe<LaneValues> lanes;
  if (score.slopes != nullptr || !range.full()) lanes.emplace(score, mask, k0);
  const V hidden = hn::Set(f, -std::numeric_limits<float>::infinity());
  const V lowest = hn::Set(f, std::numeric_limits<float>::lowest());
  const V scale = hn::Set(f, score.postscale);
  const bool chained = score.softcap > 0.0f || score.slopes != nullptr;
  const bool simple = pairs.has_bias() && !pairs.has_bytes() && !chained;
  for (size_t v = 0; v < kVectors; ++v) {
    const LaneVectors lane = lanes ? LaneVectors(*lanes, v) : LaneVectors{};
    V most = hidden;
    const auto add_simply = [&](size_t j) HWY_ATTR {
      const bool whole = j + kKeysRead <= range.end[v];
      if (!simple || !(whole || (lanes && j + kKeysRead <= block_keys))) return false;
      const bool inner = whole && range.every_lane_sees(j, kKeysRead);
      if (inner && add_bias<true>(pairs.bias(), v, k0, j, lane, scale, scores, most)) return true;
      return add_bias<false>(pairs.bias(), v, k0, j, lane, scale, scores, most);
    };
    pairs.for_each(v, k0, range, add_simply, [&](size_t j, const V* added) HWY_ATTR {
      float* four = scores + j * kPanel + v * kLanes;
      for (size_t m = 0; m < kKeys; ++m) {
        const V key = hn::Set(f, static_cast<float>(j + m));
        V s = hn::Load(f, four + m * kPanel);
        if (chained) {
          V derivative;
          s = hn::Add(chain(score, s, lane, key, derivative), added[m]);
        } else if (!score.plain) {  // rounded as in add_bias; plain products are in base-2 units
          s = hn::MulAdd(s, scale, added[m]);
        }
        auto seen = hn::Not(hn::Eq(added[m], hidden));
        if (!range.full()) seen = hn::And(seen, lane.sees(key));
        hn::Store(hn::IfThenElse(seen, score.plain ? s : to_base2(s), hidden), f,
                  four + m * kPanel);
        // NaN and -inf count as the lowest number here: the row has seen a key.
        const V counted = hn::IfThenElse(hn::Gt(s, lowest), s, lowest);
        most = hn::Max(most, hn::IfThenElse(seen, counted, hidden));
      }
    });
    hn::Store(hn::Max(most, hn::Load(f, top + v * kLanes)), f, top + v * kLanes);
    largest[v] = score.plain ? most : to_base2(most);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace abacist::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
