// Tiles in and out: any strides and storage types to the packed float layouts and back.
#if defined(ABACIST_CPU_SIMD_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ABACIST_CPU_SIMD_PACK_INL_H_
#undef ABACIST_CPU_SIMD_PACK_INL_H_
#else
#define ABACIST_CPU_SIMD_PACK_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/numeric.hpp"
#include "cpu/simd/gemm-inl.h"
#include "cpu/simd/kernels.hpp"

HWY_BEFORE_NAMESPACE();
namespace abacist::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F4 = hn::CappedTag<float, 4>;        // one lane on the portable target
using F16 = hn::CappedTag<float, kChunk>;  // a cache line, or what a vector holds of it

HWY_INLINE float load1(const float* p) { return *p; }
HWY_INLINE float load1(const hwy::bfloat16_t* p) { return core::bf16_to_float(p->bits); }
HWY_INLINE float load1(const hwy::float16_t* p) {
  std::uint16_t bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return core::f16_to_float(bits);
}

/// As many consecutive elements as `f` has lanes, as floats.
template <class D>
HWY_INLINE hn::Vec<D> load_some(D f, const float* p) {
  return hn::LoadU(f, p);
}
template <class D>
HWY_INLINE hn::Vec<D> load_some(D f, const hwy::bfloat16_t* p) {
  return hn::PromoteTo(f, hn::LoadU(hn::Rebind<hwy::bfloat16_t, D>(), p));
}
template <class D>
HWY_INLINE hn::Vec<D> load_some(D f, const hwy::float16_t* p) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Set(f, load1(p));  // Highway's emulation reads NaN and infinity as finite numbers
#else
  return hn::PromoteTo(f, hn::LoadU(hn::Rebind<hwy::float16_t, D>(), p));
#endif
}

/// One row of `depth` elements, `dim` apart, as contiguous floats.
template <class T>
HWY_INLINE void load_row(const T* HWY_RESTRICT source, std::int64_t dim, size_t depth,
                         float* HWY_RESTRICT row) {
  const F16 f;
  size_t k = 0;
  if (dim == 1) {
    for (; k + hn::MaxLanes(f) <= depth; k += hn::MaxLanes(f)) {
      hn::StoreU(load_some(f, source + k), f, row + k);
    }
  }
  for (; k < depth; ++k) row[k] = load1(source + static_cast<std::int64_t>(k) * dim);
}

/// Calls `body` with the operand's data as the type that its dtype names.
template <class Body>
HWY_INLINE void with_type(const void* data, DType dtype, const Body& body) {
  if (dtype == DType::bf16) {
    body(static_cast<const hwy::bfloat16_t*>(data));
  } else if (dtype == DType::f16) {
    body(static_cast<const hwy::float16_t*>(data));
  } else {
    body(static_cast<const float*>(data));
  }
}

/// The rows of one head of K or V, wherever they lie. Made for rows that ascend: a page is looked
/// up once.
template <class T>
class KeyRows {
 public:
  KeyRows(const Operand& x, const T* data) : x_(x), data_(data) {}

  /// Row j; null in an invalid page, and where no query looks.
  HWY_INLINE const T* operator()(std::int64_t j) {
    if (x_.pages.ids == nullptr) return data_ + j * x_.row;
    if (j < first_ || j >= first_ + x_.pages.size) find(j);
    const bool seen = j >= x_.pages.seen.begin && j < x_.pages.seen.end;
    return page_ == nullptr || !seen ? nullptr : page_ + (j - first_) * x_.row;
  }

 private:
  HWY_NOINLINE void find(std::int64_t j) {
    const std::int64_t number = j / x_.pages.size;
    first_ = number * x_.pages.size;
    page_ = nullptr;
    // No id is read of a page that no query sees a key of.
    if (first_ >= x_.pages.seen.end || first_ + x_.pages.size <= x_.pages.seen.begin) return;
    const std::int64_t id = x_.pages.ids[number];
    if (id >= 0 && id < x_.pages.count) page_ = data_ + id * x_.pages.stride;
  }

  const Operand& x_;
  const T* data_;
  std::int64_t first_ = -(std::int64_t{1} << 60);
  const T* page_ = nullptr;
};

/// Loads a byte of a page, so that prefetches of the page are heeded: Zen 4 drops those of a page
/// that its first-level TLB does not know.
HWY_INLINE void touch(const void* p) { static_cast<void>(*static_cast<const volatile char*>(p)); }

/// Rows that will be packed soon, asked for (to L2) a few at a time between products: a burst of
/// requests would itself wait for memory (4% of the forward pass at d 128). Each page is touched:
/// rows of one head lie pages apart (causal forward, d 64, 16 heads of 8k: 175 -> 187 GFLOP/s).
/// Rows that another thread may be writing must not be: `written`.
class Prefetch {
 public:
  /// Packed rows [first, last), r = i * group + g, of `depth` elements each.
  void add(const Operand& x, std::int64_t group, std::int64_t first, std::int64_t last,
           size_t depth, bool written = false) {
    if (first < last && x.dim == 1 && x.pages.ids == nullptr)
      spans_[count_++] = {&x, group, first, last, depth, written};
  }

  /// The rows added so far will be spread over `steps` calls of `step`.
  void spread(size_t steps) {
    std::int64_t rows = 0;
    for (size_t i = 0; i < count_; ++i) rows += spans_[i].last - spans_[i].first;
    const auto calls = static_cast<std::int64_t>(std::max(steps, size_t{1}));
    rows_per_step_ = (rows + calls - 1) / calls;
  }

  HWY_INLINE void step() {
    if (count_ > 0) rows();
  }

 private:
  struct Span {
    const Operand* x;
    std::int64_t group, first, last;
    size_t depth;
    bool written;
  };

  HWY_NOINLINE void rows() {
    for (std::int64_t i = 0; i < rows_per_step_ && count_ > 0; ++i) {
      Span& span = spans_[count_ - 1];
      row(span);
      if (++span.first == span.last) --count_;
    }
  }

  HWY_INLINE void row(const Span& span) {
    const Operand& x = *span.x;
    const std::int64_t size = size_of(x.dtype);
    const auto bytes = static_cast<std::int64_t>(span.depth) * size;
    const std::int64_t i = span.group == 1 ? span.first : span.first / span.group;
    const char* at = static_cast<const char*>(x.data) +
                     (i * x.row + (span.first - i * span.group) * x.head) * size;
    const auto page = reinterpret_cast<std::uintptr_t>(at) / kPage;
    if (!span.written && page != touched_) touch(at);
    touched_ = page;
    for (std::int64_t offset = 0; offset < bytes; offset += 64) {
      __builtin_prefetch(at + offset, 0, 2);
    }
  }

  Span spans_[4];
  size_t count_ = 0;
  std::int64_t rows_per_step_ = 0;
  static constexpr std::uintptr_t kPage = 4096;
  std::uintptr_t touched_ = 0;
};

/// Of a packed block, for Prefetch: a block is a whole number of such rows.
inline constexpr size_t kPackedRow = 64;

/// Rows of `width` floats as an operand.
HWY_INLINE Operand contiguous_rows(const float* rows, size_t width) {
  return {rows, DType::f32, static_cast<std::int64_t>(width), 0, 1};
}

/// Packs rows [first, first + count) of head 0 in chunks: element (row j, column c) at
/// out[c / kChunk * rows * kChunk + j * kChunk + c % kChunk]. Rows from count up to the next
/// multiple of kStep are zero, and so are columns from `depth` to the end of their chunk.
HWY_NOINLINE void pack_chunks(const Operand& x, std::int64_t first, size_t count, size_t depth,
                              size_t rows, float* HWY_RESTRICT out) {
  const size_t padded = hwy::RoundUpTo(count, kStep);
  const F16 f;
  with_type(x.data, x.dtype, [&](const auto* data) HWY_ATTR {
    KeyRows source_row(x, data);
    for (size_t j = 0; j < count; ++j) {
      const auto* source = source_row(first + static_cast<std::int64_t>(j));
      float* place = out + j * kChunk;
      if (source == nullptr) {
        for (size_t c = 0; c < depth; c += kChunk, place += rows * kChunk) {
          std::fill_n(place, kChunk, 0.0f);
        }
        continue;
      }
      size_t c = 0;
      if (x.dim == 1) {
        for (; c + kChunk <= depth; c += kChunk, place += rows * kChunk) {
          for (size_t i = 0; i < kChunk; i += hn::MaxLanes(f)) {
            hn::StoreU(load_some(f, source + c + i), f, place + i);
          }
        }
      }
      for (; c < depth; c += kChunk, place += rows * kChunk) {
        const size_t n = std::min(kChunk, depth - c);
        load_row(source + static_cast<std::int64_t>(c) * x.dim, x.dim, n, place);
        std::fill(place + n, place + kChunk, 0.0f);
      }
    }
  });
  for (size_t j = count; j < padded; ++j) {
    for (size_t c = 0; c < depth; c += kChunk) {
      std::fill_n(out + c * rows + j * kChunk, kChunk, 0.0f);
    }
  }
}

#if HWY_TARGET == HWY_SCALAR
HWY_INLINE void turn(V*) {}
#else
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

/// out[m * stride + 0..3] = column m of the 4 x 4 block whose rows lie `width` floats apart, times
/// factor.
HWY_INLINE void transpose4(const float* HWY_RESTRICT block, size_t width, float factor,
                           float* HWY_RESTRICT out, size_t stride) {
#if HWY_TARGET != HWY_SCALAR
  const F4 f;
  const auto scale = hn::Set(f, factor);
  const auto r0 = hn::Mul(hn::Load(f, block), scale);
  const auto r1 = hn::Mul(hn::Load(f, block + width), scale);
  const auto r2 = hn::Mul(hn::Load(f, block + 2 * width), scale);
  const auto r3 = hn::Mul(hn::Load(f, block + 3 * width), scale);
  const auto low01 = hn::InterleaveLower(f, r0, r1);
  const auto low23 = hn::InterleaveLower(f, r2, r3);
  const auto high01 = hn::InterleaveUpper(f, r0, r1);
  const auto high23 = hn::InterleaveUpper(f, r2, r3);
  hn::StoreU(hn::ConcatLowerLower(f, low23, low01), f, out);
  hn::StoreU(hn::ConcatUpperUpper(f, low23, low01), f, out + stride);
  hn::StoreU(hn::ConcatLowerLower(f, high23, high01), f, out + 2 * stride);
  hn::StoreU(hn::ConcatUpperUpper(f, high23, high01), f, out + 3 * stride);
#else
  for (size_t m = 0; m < 4; ++m) {
    for (size_t r = 0; r < 4; ++r) out[m * stride + r] = block[r * width + m] * factor;
  }
#endif
}

/// Packs query rows into a panel: element (k, lane) at out[k * kPanel + lane], times `factor`. Row
/// `lane` is packed row first + lane = i * group + g; lanes past `count` are zero. Sixteen elements
/// of every row at a time: the part of `out` that they fill stays in L1.
HWY_NOINLINE void pack_panel(const Operand& x, std::int64_t group, std::int64_t first, size_t count,
                             size_t depth, float factor, float* HWY_RESTRICT out) {
  HWY_ALIGN float chunk[kPanel * kChunk];
  with_type(x.data, x.dtype, [&](const auto* data) HWY_ATTR {
    decltype(data) rows[kPanel];
    for (size_t lane = 0; lane < kPanel; ++lane) {
      const std::int64_t r = first + static_cast<std::int64_t>(lane);
      rows[lane] = lane < count ? data + (r / group) * x.row + (r % group) * x.head : nullptr;
    }
    const F f;
    const size_t turned = x.dim == 1 ? depth / kLanes * kLanes : 0;
    for (size_t v = 0; v < kVectors; ++v) {
      for (size_t k = 0; k < turned; k += kLanes) {
        V values[kLanes];
        for (size_t i = 0; i < kLanes; ++i) {
          const auto* row = rows[v * kLanes + i];
          values[i] = row == nullptr ? hn::Zero(f) : load_some(f, row + k);
        }
        turn(values);
        for (size_t i = 0; i < kLanes; ++i) {
          hn::Store(hn::Mul(values[i], hn::Set(f, factor)), f, out + (k + i) * kPanel + v * kLanes);
        }
      }
    }
    for (size_t k = turned; k < depth; k += kChunk) {
      const size_t n = std::min(kChunk, depth - k);
      for (size_t lane = 0; lane < kPanel; ++lane) {
        float* row = chunk + lane * kChunk;
        if (rows[lane] == nullptr) {
          std::fill_n(row, n, 0.0f);
        } else {
          load_row(rows[lane] + static_cast<std::int64_t>(k) * x.dim, x.dim, n, row);
        }
      }
      float* part = out + k * kPanel;
      const size_t whole = kPanel % 4 == 0 ? n / 4 * 4 : 0;
      for (size_t lane = 0; lane < kPanel && whole > 0; lane += 4) {
        for (size_t m = 0; m < whole; m += 4) {
          transpose4(chunk + lane * kChunk + m, kChunk, factor, part + m * kPanel + lane, kPanel);
        }
      }
      for (size_t m = whole; m < n; ++m) {
        for (size_t lane = 0; lane < kPanel; ++lane) {
          part[m * kPanel + lane] = chunk[lane * kChunk + m] * factor;
        }
      }
    }
  });
}

/// Stores a contiguous row of floats as elements `dim` apart.
HWY_INLINE void store_row(const float* HWY_RESTRICT row, size_t depth, const Output& x,
                          std::int64_t offset) {
  if (x.dtype == DType::f32) {
    float* out = static_cast<float*>(x.data) + offset;
    if (x.dim == 1) {
      std::copy_n(row, depth, out);
      return;
    }
    for (size_t c = 0; c < depth; ++c) out[static_cast<std::int64_t>(c) * x.dim] = row[c];
    return;
  }
  auto* out = static_cast<std::uint16_t*>(x.data) + offset;
  if (x.dtype == DType::bf16) {
    for (size_t c = 0; c < depth; ++c) {
      out[static_cast<std::int64_t>(c) * x.dim] = core::float_to_bf16(row[c]);
    }
  } else {
    for (size_t c = 0; c < depth; ++c) {
      out[static_cast<std::int64_t>(c) * x.dim] = core::float_to_f16(row[c]);
    }
  }
}

/// Columns of a panel that go out as whole vectors of floats: how many there are, after writing.
HWY_INLINE size_t unpack_floats(const float* HWY_RESTRICT panel, size_t depth, const Output& x,
                                std::int64_t group, std::int64_t first, size_t count) {
  const F f;
  if (x.dtype != DType::f32 || x.dim != 1) return 0;
  const size_t turned = depth / kLanes * kLanes;
  for (size_t v = 0; v * kLanes < count; ++v) {
    const size_t lanes = std::min(count - v * kLanes, kLanes);
    float* rows[kLanes];
    for (size_t i = 0; i < lanes; ++i) {
      const std::int64_t r = first + static_cast<std::int64_t>(v * kLanes + i);
      rows[i] = static_cast<float*>(x.data) + (r / group) * x.row + (r % group) * x.head;
    }
    for (size_t c = 0; c < turned; c += kLanes) {
      V values[kLanes];
      for (size_t i = 0; i < kLanes; ++i) {
        values[i] = hn::Load(f, panel + (c + i) * kPanel + v * kLanes);
      }
      turn(values);
      for (size_t i = 0; i < lanes; ++i) hn::StoreU(values[i], f, rows[i] + c);
    }
  }
  return turned;
}

/// The reverse of pack_panel: element (c, lane) of the panel to element c of packed row first +
/// lane, for lanes below `count`. Four whole rows at a time; depth <= kMaxHeadDim.
HWY_NOINLINE void unpack_panel(const float* HWY_RESTRICT panel, size_t depth, const Output& x,
                               std::int64_t group, std::int64_t first, size_t count) {
  const size_t done = unpack_floats(panel, depth, x, group, first, count);
  if (done == depth) return;
  constexpr size_t kRow = kMaxHeadDim + 16;  // rows 4 KB apart would be in the way of each other
  HWY_ALIGN float rows[4][kRow];
  const size_t whole = kPanel % 4 == 0 ? depth / 4 * 4 : 0;
  for (size_t lane = 0; lane < count; lane += 4) {
    const size_t lanes = std::min(count - lane, size_t{4});
    for (size_t c = done; c < whole; c += 4) {
      transpose4(panel + c * kPanel + lane, kPanel, 1.0f, rows[0] + c, kRow);
    }
    for (size_t m = 0; m < lanes; ++m) {
      for (size_t c = std::max(done, whole); c < depth; ++c) {
        rows[m][c] = panel[c * kPanel + lane + m];
      }
      const std::int64_t r = first + static_cast<std::int64_t>(lane + m);
      store_row(
          rows[m] + done, depth - done, x,
          (r / group) * x.row + (r % group) * x.head + static_cast<std::int64_t>(done) * x.dim);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace abacist::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
