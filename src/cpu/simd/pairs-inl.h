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

/// Keys that are read at a time.
inline constexpr size_t kKeys = 4;

/// 4 elements of each of kLanes / 4 rows, one row a 128-bit block: rows[0], rows[4], ...
template <class T>
HWY_INLINE V load_blocks(const T* const* rows, std::int64_t key) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Set(F(), load1(rows[0] + key));
#else
  const F f;
  if constexpr (kLanes == 4) {
    return load_some(F4(), rows[0] + key);
  } else if constexpr (kLanes == 8) {
    return hn::Combine(f, load_some(F4(), rows[4] + key), load_some(F4(), rows[0] + key));
  } else {
    const hn::Half<F> half;
    return hn::Combine(
        f, hn::Combine(half, load_some(F4(), rows[12] + key), load_some(F4(), rows[8] + key)),
        hn::Combine(half, load_some(F4(), rows[4] + key), load_some(F4(), rows[0] + key)));
  }
#endif
}

/// out[m] = element key + m of the kLanes rows.
template <class T>
HWY_INLINE void load_transposed(const T* const* rows, std::int64_t key, V (&out)[kKeys]) {
#if HWY_TARGET == HWY_SCALAR
  for (size_t m = 0; m < kKeys; ++m) out[m] = load_blocks(rows, key + static_cast<std::int64_t>(m));
#else
  const F f;
  const hn::Repartition<double, F> pairs;
  const V r0 = load_blocks(rows, key);
  const V r1 = load_blocks(rows + 1, key);
  const V r2 = load_blocks(rows + 2, key);
  const V r3 = load_blocks(rows + 3, key);
  const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(f, r0, r1));
  const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(f, r2, r3));
  const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(f, r0, r1));
  const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(f, r2, r3));
  out[0] = hn::BitCast(f, hn::InterleaveLower(pairs, low01, low23));
  out[1] = hn::BitCast(f, hn::InterleaveUpper(pairs, low01, low23));
  out[2] = hn::BitCast(f, hn::InterleaveLower(pairs, high01, high23));
  out[3] = hn::BitCast(f, hn::InterleaveUpper(pairs, high01, high23));
#endif
}

/// The rows of one operand that a panel's lanes read.
class LaneRows {
 public:
  LaneRows(const PairOperand& x, const PanelMask& mask) : x_(x) {
    same_ = x.row == 0 && (x.head == 0 || mask.group == 1);
    for (size_t lane = 0; lane < kPanel; ++lane) {
      const std::int64_t r =
          mask.first_row + static_cast<std::int64_t>(lane < mask.count ? lane : 0);
      rows_[lane] = static_cast<const std::byte*>(x.data) +
                    ((r / mask.group) * x.row + (r % mask.group) * x.head) * size_of(x.dtype);
    }
  }

  /// Floats of keys [key, key + 4) in the lanes of vector v; 0 past the operand's end.
  HWY_INLINE void load(size_t v, std::int64_t key, V (&out)[kKeys]) const {
    const F f;
    const void* const* rows = rows_ + v * kLanes;
    const bool whole = x_.key == 1 && key + std::int64_t{kKeys} <= x_.keys;
    if (whole && !same_) {
      if (x_.dtype == DType::f32) {
        load_transposed(reinterpret_cast<const float* const*>(rows), key, out);
      } else if (x_.dtype == DType::bf16) {
        load_transposed(reinterpret_cast<const hwy::bfloat16_t* const*>(rows), key, out);
      } else {
        load_transposed(reinterpret_cast<const hwy::float16_t* const*>(rows), key, out);
      }
      return;
    }
    for (size_t m = 0; m < kKeys; ++m) {
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

  /// Bytes of keys [key, key + 4): of each lane its four in one integer; 0 past the end.
  HWY_INLINE hn::Vec<hn::RebindToUnsigned<F>> load_bytes(size_t v, std::int64_t key) const {
    const hn::RebindToUnsigned<F> u;
    const void* const* rows = rows_ + v * kLanes;
    const bool whole = x_.key == 1 && key + std::int64_t{kKeys} <= x_.keys;
    if (same_) return hn::Set(u, bytes(rows[0], key, whole));
    HWY_ALIGN std::uint32_t values[kLanes];
    for (size_t lane = 0; lane < kLanes; ++lane) values[lane] = bytes(rows[lane], key, whole);
    return hn::Load(u, values);
  }

  /// Asks for keys [key, key + count) to be brought to L2; to L1 they would displace the tiles (6%
  /// of the forward pass with a bias at d 64).
  void prefetch(std::int64_t key, std::int64_t count) const {
    if (x_.key != 1) return;
    const std::int64_t size = size_of(x_.dtype);
    const std::int64_t last = (std::min(key + count, x_.keys) - 1) * size;
    for (size_t lane = 0; lane < (same_ ? 1 : kPanel); ++lane) {
      if (lane > 0 && rows_[lane] == rows_[lane - 1]) continue;
      const char* row = static_cast<const char*>(rows_[lane]);
      for (std::int64_t at = key * size; at < last; at += 64) __builtin_prefetch(row + at, 0, 2);
      if (last >= 0) __builtin_prefetch(row + last, 0, 2);
    }
  }

 private:
  float element(const void* row, std::int64_t j) const {
    const std::int64_t at = j * x_.key;
    if (x_.dtype == DType::bf16) return load1(static_cast<const hwy::bfloat16_t*>(row) + at);
    if (x_.dtype == DType::f16) return load1(static_cast<const hwy::float16_t*>(row) + at);
    return static_cast<const float*>(row)[at];
  }

  std::uint32_t bytes(const void* row, std::int64_t key, bool whole) const {
    const auto* data = static_cast<const std::uint8_t*>(row);
    std::uint32_t four = 0;
    if (whole) {
      __builtin_memcpy(&four, data + key, sizeof(four));
      return four;
    }
    for (std::int64_t m = 0; m < std::int64_t{kKeys} && key + m < x_.keys; ++m) {
      four |= std::uint32_t{data[(key + m) * x_.key]} << (8 * m);
    }
    return four;
  }

  PairOperand x_;
  bool same_;
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

  /// What is to be added to the scores of keys [key, key + 4); -inf hides.
  HWY_INLINE void load(size_t v, std::int64_t key, V (&out)[kKeys]) const {
    for (size_t m = 0; m < kKeys; ++m) out[m] = hn::Zero(F());
    if (has_bias_) bias_.load(v, key, out);
    if (has_visible_) hide(visible_, v, key, out);
    if (has_valid_) hide(valid_, v, key, out);
  }

  void prefetch(std::int64_t key, size_t count) const {
    if (has_bias_) bias_.prefetch(key, static_cast<std::int64_t>(count));
    if (has_visible_) visible_.prefetch(key, static_cast<std::int64_t>(count));
  }

 private:
  HWY_INLINE static void hide(const LaneRows& seen, size_t v, std::int64_t key, V (&out)[kKeys]) {
    const F f;
    const hn::RebindToUnsigned<F> u;
    const V hidden = hn::Set(f, -std::numeric_limits<float>::infinity());
    const auto bytes = seen.load_bytes(v, key);
    for (size_t m = 0; m < kKeys; ++m) {
      const auto wanted = hn::Set(u, 0xffu << (8 * m));
      const auto unseen = hn::Eq(hn::And(bytes, wanted), hn::Zero(u));
      out[m] = hn::IfThenElse(hn::RebindMask(f, unseen), hidden, out[m]);
    }
  }

  bool has_bias_, has_visible_, has_valid_;
  LaneRows bias_, visible_, valid_;
};

inline void prefetch_pairs(const ScoreRule& score, const PanelMask& mask, std::int64_t k0,
                           const BlockRange& range) {
  PanelPairs(score, mask)
      .prefetch(k0 + static_cast<std::int64_t>(range.first), range.last - range.first);
}

/// A score in base-2 units. The product may leave float's range (a bias of -3.4e38 is a finite
/// number): it stops at the lowest one. -inf and NaN stay.
HWY_INLINE V to_base2(V s) {
  const F f;
  const V lowest = hn::Set(f, std::numeric_limits<float>::lowest());
  const V product = hn::Mul(s, hn::Set(f, kLog2E));
  const auto below = hn::And(hn::Lt(product, lowest), hn::Ge(s, lowest));
  return hn::IfThenElse(below, lowest, product);
}

/// `modify_pair_scores` for one kind of scores: with a bias or without, and with nothing else to do
/// to a product but its scale (kSimple). Specialised: a mask [1, 1, 1, s_k] then costs the forward
/// pass 7% at d 64 instead of 12% (AVX-512).
template <bool kBias, bool kSimple>
HWY_NOINLINE void pair_scores(const ScoreRule& score, const PanelMask& mask, std::int64_t k0,
                              const BlockRange& range, float* HWY_RESTRICT scores,
                              float* HWY_RESTRICT top, V (&largest)[kVectors]) {
  const F f;
  const LaneValues lanes(score, mask, k0);
  const PanelPairs pairs(score, mask);
  const V hidden = hn::Set(f, -std::numeric_limits<float>::infinity());
  const V lowest = hn::Set(f, std::numeric_limits<float>::lowest());
  const V scale = hn::Set(f, score.postscale);
  constexpr bool kNatural = kBias || !kSimple;  // else the products are in base-2 units
  for (size_t v = 0; v < kVectors; ++v) {
    const LaneVectors lane(lanes, v);
    V most = hidden;
    for (size_t j = range.first; j < range.last; j += kKeys) {
      V bias[kKeys];
      pairs.load(v, k0 + static_cast<std::int64_t>(j), bias);
      for (size_t m = 0; m < kKeys; ++m) {
        const V key = hn::Set(f, static_cast<float>(j + m));
        float* place = scores + (j + m) * kPanel + v * kLanes;
        V s = hn::Load(f, place);
        if constexpr (!kSimple) {
          V derivative;
          s = chain(score, s, lane, key, derivative);
          if constexpr (kBias) s = hn::Add(s, bias[m]);
        } else if constexpr (kBias) {
          s = hn::MulAdd(s, scale, bias[m]);
        }
        auto seen = hn::Not(hn::Eq(bias[m], hidden));
        if (!range.full) seen = hn::And(seen, lane.sees(key));
        hn::Store(hn::IfThenElse(seen, kNatural ? to_base2(s) : s, hidden), f, place);
        // NaN and -inf count as the lowest number here: the row has seen a key.
        const V counted = hn::IfThenElse(hn::Gt(s, lowest), s, lowest);
        most = hn::Max(most, hn::IfThenElse(seen, counted, hidden));
      }
    }
    hn::Store(hn::Max(most, hn::Load(f, top + v * kLanes)), f, top + v * kLanes);
    largest[v] = kNatural ? to_base2(most) : most;
  }
}

/// `modify_scores` where bias or boolean mask take part. `top` [kPanel] is the running maximum of
/// each lane in natural units, -inf as long as the lane has seen no key: what a row sees is decided
/// by the masks, never by the scores.
inline void modify_pair_scores(const ScoreRule& score, const PanelMask& mask, std::int64_t k0,
                               const BlockRange& range, float* HWY_RESTRICT scores,
                               float* HWY_RESTRICT top, V (&largest)[kVectors]) {
  const bool simple = score.softcap == 0.0f && score.slopes == nullptr;
  if (score.bias.data != nullptr) {
    if (simple) return pair_scores<true, true>(score, mask, k0, range, scores, top, largest);
    return pair_scores<true, false>(score, mask, k0, range, scores, top, largest);
  }
  if (score.plain) return pair_scores<false, true>(score, mask, k0, range, scores, top, largest);
  pair_scores<false, false>(score, mask, k0, range, scores, top, largest);
}

}  // namespace HWY_NAMESPACE
}  // namespace abacist::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
