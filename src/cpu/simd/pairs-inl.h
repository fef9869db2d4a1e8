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

#if HWY_TARGET != HWY_SCALAR
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
#endif

/// The rows of one operand that a panel's lanes read.
class LaneRows {
 public:
  LaneRows(const PairOperand& x, const PanelMask& mask) : x_(x) {
    if (x.data == nullptr) return;
    same_ = x.row == 0 && (x.head == 0 || mask.group == 1);
    const std::int64_t size = size_of(x.dtype);
    PackedRow r(mask.first_row, mask.group);
    const auto* row = static_cast<const std::byte*>(x.data) + (r.i * x.row + r.g * x.head) * size;
    const std::int64_t next_head = x.head * size;
    const std::int64_t next_row = x.row * size - (mask.group - 1) * next_head;
    std::fill_n(rows_, kPanel, row);  // lanes without rows
    for (size_t lane = 1; lane < mask.count; ++lane) {
      r.advance(mask.group);
      row += r.g == 0 ? next_row : next_head;
      rows_[lane] = row;
    }
  }

  /// Calls body(values) with the floats of keys [key, key + 16) in the lanes of vector v; false if
  /// they don't lie in whole lines. Each row's line is read once: rows whole pages apart share a
  /// few lines of L1, and came from L2 for every four keys. (`body` is inlined into each way of
  /// reading: values that ways meet with go through memory.)
  template <class Body>
  HWY_INLINE bool with_lines(size_t v, std::int64_t key, const Body& body) const {
    const F f;
    const void* const* rows = rows_ + v * kLanes;
    if (same_ || x_.key != 1 || key + std::int64_t{kKeysRead} > x_.keys) return false;
    with_type(rows, x_.dtype, [&](const auto* type) HWY_ATTR {
      V values[kKeysRead];
      for (size_t first = 0; first < kKeysRead; first += kLanes) {
        for (size_t lane = 0; lane < kLanes; ++lane) {
          const auto* row = static_cast<decltype(type)>(rows[lane]);
          values[first + lane] = load_some(f, row + key + static_cast<std::int64_t>(first));
        }
        turn(values + first);
      }
      body(values);
    });
    return true;
  }

  /// The same floats however they lie; 0 past the operand's end.
  HWY_INLINE void load(size_t v, std::int64_t key, V (&out)[kKeysRead]) const {
    const F f;
    const void* const* rows = rows_ + v * kLanes;
    if (with_lines(v, key, [&](const V* values) HWY_ATTR {
          for (size_t m = 0; m < kKeysRead; ++m) out[m] = values[m];
        })) {
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

  /// Asks for keys [key, key + count) of lanes [first_lane, last_lane) to be brought to L2, at most
  /// a panel's products before they are read: to L1 they would displace the tiles (6% of the
  /// forward pass with a bias at d 64), and earlier than that rows that are a power of two apart
  /// displace each other (5%). Rows are pages apart: each is touched first, where the block before
  /// has been (bias at d 64: 85% of the plain pass, 80% without).
  void prefetch(std::int64_t key, std::int64_t count, size_t first_lane, size_t last_lane) const {
    if (x_.key != 1 || key >= x_.keys) return;
    const std::int64_t size = size_of(x_.dtype);
    const std::int64_t first = key * size;
    const std::int64_t last = std::min(key + count, x_.keys) * size - 1;
    const auto row = [&](size_t lane) { return static_cast<const char*>(rows_[lane]); };
    if (same_) last_lane = std::min(last_lane, size_t{1});
    for (size_t lane = first_lane; lane < last_lane; ++lane) {
      touch(row(lane) + std::max(first - 1, std::int64_t{0}));
    }
    for (size_t lane = first_lane; lane < last_lane; ++lane) {
      if (lane > 0 && rows_[lane] == rows_[lane - 1]) continue;
      const char* end = row(lane) + last;
      for (const char* at = row(lane) + first; at < end; at += 64) __builtin_prefetch(at, 0, 2);
      __builtin_prefetch(end, 0, 2);
    }
  }

  /// The same of vector v's rows, once a line: what lies `distance` keys after `key`, whose lines
  /// have just been read, so that no page needs a touch. For bytes, few lines a block: sixteen
  /// floats a row would be in the way of each other's lines.
  HWY_INLINE void prefetch_after(size_t v, std::int64_t key, std::int64_t distance) const {
    const std::int64_t at = key + distance;
    if (x_.key != 1 || same_ || at % 64 >= std::int64_t{kKeysRead} || at >= x_.keys) return;
    for (size_t lane = v * kLanes; lane < (v + 1) * kLanes; ++lane) {
      __builtin_prefetch(static_cast<const char*>(rows_[lane]) + at, 0, 2);
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

/// Lanes whose byte m (0 to 3) is not 0.
HWY_INLINE hn::Mask<F> byte_set(Words bytes, size_t m) {
  const hn::RebindToUnsigned<F> u;
  const auto byte = hn::And(bytes, hn::Set(u, 0xffu << (8 * m)));
  return hn::RebindMask(F(), hn::Ne(byte, hn::Zero(u)));
}

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
  /// Whether bytes say what is seen.
  bool has_bytes() const { return has_visible_ || has_valid_; }

  /// Biases of keys [key, key + 16), 0 without a bias.
  HWY_INLINE void load_bias(size_t v, std::int64_t key, V (&bias)[kKeysRead]) const {
    if (has_bias_) return bias_.load(v, key, bias);
    for (V& value : bias) value = hn::Zero(F());
  }

  /// Bytes of keys [key, key + 16), if there are any, four a word as `LaneRows::load_words` has
  /// them: not 0 where masks let the lane see.
  HWY_INLINE void load_bytes(size_t v, std::int64_t key, Words (&words)[kKeys]) const {
    if (!has_valid_) return visible_.load_words(v, key, words);
    valid_.load_words(v, key, words);
    if (!has_visible_) return;
    Words visible[kKeys];
    visible_.load_words(v, key, visible);
    for (size_t m = 0; m < kKeys; ++m) {  // valid bytes are 0 or 1
      words[m] = hn::And(visible[m], hn::Sub(hn::ShiftLeft<8>(words[m]), words[m]));
    }
  }

  /// Calls body(j, added) for the keys j = first, first + 4, ... of the block that begins at k0:
  /// added[m] is what the score of key j + m gets, -inf hides.
  template <class Body>
  HWY_INLINE void for_each(size_t v, std::int64_t k0, const BlockRange& range,
                           const Body& body) const {
    for_each(
        v, k0, range, [](size_t) { return false; }, body);
  }

  /// The same, without the 16 keys from j on where done(j) says so.
  template <class Done, class Body>
  HWY_INLINE void for_each(size_t v, std::int64_t k0, const BlockRange& range, const Done& done,
                           const Body& body) const {
    for (size_t j = range.begin[v]; j < range.end[v]; j += kKeysRead) {
      if (done(j)) continue;
      V added[kKeysRead];
      Words words[kKeys];
      const std::int64_t key = k0 + static_cast<std::int64_t>(j);
      load_bias(v, key, added);
      if (has_bytes()) load_bytes(v, key, words);
      for (size_t i = 0; i < kKeys && j + i * kKeys < range.end[v]; ++i) {
        V* four = added + i * kKeys;
        if (has_bytes()) hide(words[i], four);
        body(j + i * kKeys, four);
      }
    }
  }

  /// Asks for the pairs of a block that begins at k0: part `part` of `parts` of the lanes.
  void prefetch(std::int64_t k0, const BlockRange& range, size_t part = 0, size_t parts = 1) const {
    const std::int64_t key = k0 + static_cast<std::int64_t>(range.first);
    const auto count = static_cast<std::int64_t>(range.last - range.first);
    const size_t first = kPanel * part / parts;
    const size_t last = kPanel * (part + 1) / parts;
    if (has_bias_) bias_.prefetch(key, count, first, last);
    if (has_visible_) visible_.prefetch(key, count, first, last);
  }

  const LaneRows& bias() const { return bias_; }
  const LaneRows& visible() const { return visible_; }

 private:
  HWY_INLINE static void hide(Words bytes, V* added) {
    const V hidden = hn::Set(F(), -std::numeric_limits<float>::infinity());
    for (size_t m = 0; m < kKeys; ++m) {
      added[m] = hn::IfThenElse(byte_set(bytes, m), added[m], hidden);
    }
  }

  bool has_bias_, has_visible_, has_valid_;
  LaneRows bias_, visible_, valid_;
};

}  // namespace HWY_NAMESPACE
}  // namespace abacist::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
