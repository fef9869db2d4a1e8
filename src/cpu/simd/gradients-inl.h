// The backward pass beyond plain scores: probabilities and score gradients where a bias or a
// boolean mask or dropout takes part, and the gradient of the bias. Included once per instruction
// set.
#if defined(ABACIST_CPU_SIMD_GRADIENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ABACIST_CPU_SIMD_GRADIENTS_INL_H_
#undef ABACIST_CPU_SIMD_GRADIENTS_INL_H_
#else
#define ABACIST_CPU_SIMD_GRADIENTS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "cpu/parallel.hpp"
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

/// P = 2^(s - lse), at most 1: the float LSE of a large score may be less than the score itself by
/// more than exp2 can take. NaN stays NaN.
HWY_INLINE V probability(V s, V lse) {
  const F f;
  const V x = hn::Sub(s, lse);
  return exp2(f, hn::IfThenZeroElse(hn::Gt(x, hn::Zero(f)), x));
}

/// The probability of a pair that does not see each other: a zero that `is_hidden` knows again.
inline constexpr float kHidden = -0.0f;
HWY_INLINE hn::Mask<F> is_hidden(V p) {
  const F f;
  const hn::RebindToUnsigned<F> u;
  return hn::RebindMask(f, hn::Eq(hn::BitCast(u, p), hn::Set(u, 0x80000000u)));
}

/// Scores to probabilities in place, as `modify_pair_scores` makes scores; with softcap its
/// derivative into `slope`.
HWY_NOINLINE void pair_probabilities(const ScoreRule& score, const PanelMask& mask, std::int64_t k0,
                                     const BlockRange& range, const float* lse,
                                     float* HWY_RESTRICT p, float* HWY_RESTRICT slope) {
  const F f;
  const LaneValues lanes(score, mask, k0);
  const PanelPairs pairs(score, mask);
  const V hidden = hn::Set(f, -std::numeric_limits<float>::infinity());
  const V none = hn::Set(f, kHidden);
  for (size_t v = 0; v < kVectors; ++v) {
    const LaneVectors lane(lanes, v);
    const V subtract = hn::Load(f, lse + v * kLanes);
    pairs.for_each(v, k0, range, [&](size_t j, const V* added) HWY_ATTR {
      for (size_t m = 0; m < kKeys; ++m) {
        const V key = hn::Set(f, static_cast<float>(j + m));
        const size_t place = (j + m) * kPanel + v * kLanes;
        V s = hn::Load(f, p + place);
        if (!score.plain) {
          V derivative;
          s = chain(score, s, lane, key, derivative);
          if (score.softcap > 0.0f) hn::Store(derivative, f, slope + place);
          if (pairs.has_bias()) s = hn::Add(s, added[m]);
          s = to_base2(s);
        }
        auto seen = hn::Not(hn::Eq(added[m], hidden));
        if (!range.full()) seen = hn::And(seen, lane.sees(key));
        hn::Store(hn::IfThenElse(seen, probability(s, subtract), none), f, p + place);
      }
    });
  }
}

/// The item's turn to add to the bias gradient of row tile `t`, if others add there, too. Tiles
/// descend, and with packed heads the next one may begin inside the last query row of this one:
/// then whoever comes before must have left that one as well.
inline void begin_bias_turn(const BiasGradient& x, std::int64_t t) {
  if (x.turns == nullptr) return;
  wait_until(x.turns[t], x.before);
  if (x.rows_split && t > 0) wait_until(x.turns[t - 1], x.before);
}
inline void end_bias_turn(const BiasGradient& x, std::int64_t t) {
  if (x.turns != nullptr) {
    std::atomic_ref<std::int64_t>(x.turns[t]).store(x.own, std::memory_order_release);
  }
}

/// Adds the score gradients of one panel to the bias gradient: rows one after the other.
inline void add_bias_rows(const BiasGradient& x, const PanelMask& mask, std::int64_t k0,
                          const BlockRange& range, const float* HWY_RESTRICT ds) {
  const auto end = static_cast<size_t>(
      std::min<std::int64_t>(static_cast<std::int64_t>(range.last), mask.rule.len_k - k0));
  constexpr size_t kRows = kPanel % 4 == 0 ? 4 : 1;
  HWY_ALIGN float block[16];
  PackedRow at(mask.first_row, mask.group);
  for (size_t lane = 0; lane < mask.count; lane += kRows) {
    float* rows[kRows] = {};
    for (size_t r = 0; r < kRows && lane + r < mask.count; ++r, at.advance(mask.group)) {
      rows[r] = x.data + at.i * x.row + at.g * x.head + k0 * x.key;
    }
    for (size_t j = range.first; j < end; j += 4) {
      if constexpr (kRows == 4) {
        transpose4(ds + j * kPanel + lane, kPanel, 1.0f, block, 4);
      } else {
        for (size_t m = 0; m < 4; ++m) block[m] = ds[(j + m) * kPanel + lane];
      }
      for (size_t r = 0; r < kRows && lane + r < mask.count; ++r) {
        float* to = rows[r] + static_cast<std::int64_t>(j) * x.key;
        const size_t count = std::min<size_t>(4, end - j);
        if (count == 4 && x.key == 1 && kRows == 4) {
          const auto sum = hn::Add(hn::LoadU(F4(), to), hn::Load(F4(), block + r * 4));
          hn::StoreU(sum, F4(), to);
          continue;
        }
        for (size_t m = 0; m < count; ++m) {
          to[static_cast<std::int64_t>(m) * x.key] += block[r * 4 + m];
        }
      }
    }
  }
}

/// Sums over rows: `sums` [keys][kPanel] where all lanes go to one element, else [group][keys].
inline bool one_sum(const BiasGradient& x, std::int64_t group) { return group == 1 || x.head == 0; }

inline void sum_bias_rows(const BiasGradient& x, const PanelMask& mask, size_t keys,
                          const BlockRange& range, const float* HWY_RESTRICT ds,
                          float* HWY_RESTRICT sums) {
  const F f;
  for (size_t j = range.first; j < range.last; ++j) {
    const float* from = ds + j * kPanel;
    if (one_sum(x, mask.group)) {
      float* to = sums + j * kPanel;
      for (size_t v = 0; v < kVectors; ++v) {
        const size_t at = v * kLanes;
        hn::Store(hn::Add(hn::Load(f, to + at), hn::Load(f, from + at)), f, to + at);
      }
      continue;
    }
    for (size_t lane = 0; lane < mask.count; ++lane) {
      const auto g =
          static_cast<size_t>((mask.first_row + static_cast<std::int64_t>(lane)) % mask.group);
      sums[g * keys + j] += from[lane];
    }
  }
}

/// The item's sums over rows, to the bias gradient; `count` keys from k0 on.
inline void finish_bias_rows(const BiasGradient& x, std::int64_t group, std::int64_t k0,
                             size_t keys, size_t count, const float* sums) {
  begin_bias_turn(x, 0);
  for (std::int64_t g = 0; g < (one_sum(x, group) ? 1 : group); ++g) {
    for (size_t j = 0; j < count; ++j) {
      float sum = 0.0f;
      if (one_sum(x, group)) {
        for (size_t lane = 0; lane < kPanel; ++lane) sum += sums[j * kPanel + lane];
      } else {
        sum = sums[static_cast<size_t>(g) * keys + j];
      }
      x.data[g * x.head + (k0 + static_cast<std::int64_t>(j)) * x.key] += sum;
    }
  }
  end_bias_turn(x, 0);
}

/// dS of a panel from dP, which `ds` holds: P o (dP - D), 0 where a pair does not see each other,
/// whatever dP is there.
HWY_NOINLINE void pair_gradients(const BlockRange& range, const float* d, const float* p,
                                 float* HWY_RESTRICT ds) {
  const F f;
  for (size_t v = 0; v < kVectors; ++v) {
    const V subtract = hn::Load(f, d + v * kLanes);
    for (size_t j = range.first; j < range.last; ++j) {
      const size_t place = j * kPanel + v * kLanes;
      const V probability = hn::Load(f, p + place);
      const V value = hn::Mul(probability, hn::Sub(hn::Load(f, ds + place), subtract));
      hn::Store(hn::IfThenZeroElse(is_hidden(probability), value), f, ds + place);
    }
  }
}

/// The same under dropout: dP is 0 where P was dropped, else scaled. P becomes what V was
/// multiplied with.
HWY_NOINLINE void drop_gradients(const core::DropoutRule& rule, const PanelMask& mask,
                                 std::int64_t k0, const BlockRange& range, const float* d,
                                 float* HWY_RESTRICT p, float* HWY_RESTRICT ds) {
  const F f;
  const V scale = hn::Set(f, static_cast<float>(rule.scale));
  for_each_kept(rule, mask, k0, range, [&](size_t v, size_t j, hn::Mask<F> kept) HWY_ATTR {
    const size_t place = j * kPanel + v * kLanes;
    const V probability = hn::Load(f, p + place);
    const V dp = hn::IfThenElseZero(kept, hn::Mul(hn::Load(f, ds + place), scale));
    const V value = hn::Mul(probability, hn::Sub(dp, hn::Load(f, d + v * kLanes)));
    hn::Store(hn::IfThenZeroElse(is_hidden(probability), value), f, ds + place);
    hn::Store(hn::IfThenElseZero(kept, hn::Mul(probability, scale)), f, p + place);
  });
}

/// dS o slope, the derivative of softcap.
HWY_NOINLINE void cap_gradients(const BlockRange& range, const float* slope,
                                float* HWY_RESTRICT ds) {
  const F f;
  for (size_t at = range.first * kPanel; at < range.last * kPanel; at += kLanes) {
    hn::Store(hn::Mul(hn::Load(f, ds + at), hn::Load(f, slope + at)), f, ds + at);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace abacist::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
