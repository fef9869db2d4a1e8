// Dropout of probabilities: Philox-4x32-10 with one query in each lane (core/dropout.hpp has the
// scalar rule and the packing). Included once per instruction set.
#if defined(ABACIST_CPU_SIMD_DROPOUT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ABACIST_CPU_SIMD_DROPOUT_INL_H_
#undef ABACIST_CPU_SIMD_DROPOUT_INL_H_
#else
#define ABACIST_CPU_SIMD_DROPOUT_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "core/dropout.hpp"
#include "cpu/simd/gemm-inl.h"
#include "cpu/simd/kernels.hpp"
#include "cpu/simd/scores-inl.h"

HWY_BEFORE_NAMESPACE();
namespace abacist::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using U = hn::RebindToUnsigned<F>;
using VU = hn::Vec<U>;

/// Both halves of the 64-bit products of all lanes with one number.
HWY_INLINE void multiply_wide(VU a, std::uint32_t factor, VU& high, VU& low) {
  const U u;
#if HWY_TARGET == HWY_SCALAR
  const std::uint64_t product = std::uint64_t{hn::GetLane(a)} * factor;
  high = hn::Set(u, static_cast<std::uint32_t>(product >> 32));
  low = hn::Set(u, static_cast<std::uint32_t>(product));
#else
  const hn::RepartitionToWide<U> wide;
  const VU b = hn::Set(u, factor);
  const auto even = hn::MulEven(a, b);
  const auto odd = hn::MulEven(hn::BitCast(u, hn::ShiftRight<32>(hn::BitCast(wide, a))), b);
  low = hn::OddEven(hn::BitCast(u, hn::ShiftLeft<32>(odd)), hn::BitCast(u, even));
  high = hn::OddEven(hn::BitCast(u, odd), hn::BitCast(u, hn::ShiftRight<32>(even)));
#endif
}

/// What dropout says about the pairs of one panel.
class PanelDropout {
 public:
  PanelDropout(const core::DropoutRule& rule, const PanelMask& mask) : rule_(rule) {
    PackedRow r(mask.first_row, mask.group);
    for (size_t lane = 0; lane < kPanel; ++lane, r.advance(mask.group)) {
      const auto i = static_cast<std::uint64_t>(r.i);
      const std::uint64_t stream = rule.stream + static_cast<std::uint64_t>(r.g);
      row_[lane] = static_cast<std::uint32_t>(i);
      stream_[lane] = static_cast<std::uint32_t>(stream);
      high_[lane] = core::DropoutRule::high_word(stream, i, 0);
    }
  }

  /// The lanes of vector v that keep keys 4 * quad + m.
  HWY_INLINE void keeps(size_t v, std::uint64_t quad, hn::Mask<F> (&out)[4]) const {
    const U u;
    const F f;
    VU c[4] = {hn::Load(u, row_ + v * kLanes), hn::Set(u, static_cast<std::uint32_t>(quad)),
               hn::Load(u, stream_ + v * kLanes),
               hn::Or(hn::Load(u, high_ + v * kLanes),
                      hn::Set(u, core::DropoutRule::high_word(0, 0, quad)))};
    auto k0 = static_cast<std::uint32_t>(rule_.seed);
    auto k1 = static_cast<std::uint32_t>(rule_.seed >> 32);
    for (int round = 0; round < core::Philox::kRounds; ++round) {
      VU high0, low0, high1, low1;
      multiply_wide(c[0], core::Philox::kMultiply0, high0, low0);
      multiply_wide(c[2], core::Philox::kMultiply1, high1, low1);
      c[0] = hn::Xor(hn::Xor(high1, c[1]), hn::Set(u, k0));
      c[1] = low1;
      c[2] = hn::Xor(hn::Xor(high0, c[3]), hn::Set(u, k1));
      c[3] = low0;
      k0 += core::Philox::kWeyl0;
      k1 += core::Philox::kWeyl1;
    }
    // threshold 2^32 drops all: no word is above the largest.
    const bool all = rule_.threshold > 0xffffffffu;
    const VU threshold = hn::Set(u, static_cast<std::uint32_t>(rule_.threshold));
    for (size_t m = 0; m < 4; ++m) {
      const auto kept = all ? hn::Lt(c[m], c[m]) : hn::Not(hn::Lt(c[m], threshold));
      out[m] = hn::RebindMask(f, kept);
    }
  }

 private:
  core::DropoutRule rule_;
  HWY_ALIGN std::uint32_t row_[kPanel];
  HWY_ALIGN std::uint32_t stream_[kPanel];
  HWY_ALIGN std::uint32_t high_[kPanel];
};

/// Calls visit(v, key j of the block, lanes that keep it) for keys `range` of the block at k0.
template <class Visit>
HWY_INLINE void for_each_kept(const core::DropoutRule& rule, const PanelMask& mask, std::int64_t k0,
                              const BlockRange& range, const Visit& visit) {
  const PanelDropout dropout(rule, mask);
  const std::int64_t first = k0 + static_cast<std::int64_t>(range.first);
  const std::int64_t last = k0 + static_cast<std::int64_t>(range.last);
  for (size_t v = 0; v < kVectors; ++v) {
    for (std::int64_t quad = first / 4; quad * 4 < last; ++quad) {
      hn::Mask<F> kept[4];
      dropout.keeps(v, static_cast<std::uint64_t>(quad), kept);
      for (std::int64_t m = 0; m < 4; ++m) {
        const std::int64_t key = quad * 4 + m;
        if (key >= first && key < last) visit(v, static_cast<size_t>(key - k0), kept[m]);
      }
    }
  }
}

/// Dropped probabilities become 0; the rest are yet to be scaled.
HWY_NOINLINE void drop_probabilities(const core::DropoutRule& rule, const PanelMask& mask,
                                     std::int64_t k0, const BlockRange& range,
                                     float* HWY_RESTRICT p) {
  const F f;
  for_each_kept(rule, mask, k0, range, [&](size_t v, size_t j, hn::Mask<F> kept) HWY_ATTR {
    float* place = p + j * kPanel + v * kLanes;
    hn::Store(hn::IfThenElseZero(kept, hn::Load(f, place)), f, place);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace abacist::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
