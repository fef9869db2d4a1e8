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

using F4 = hn::CappedTag<float, 4>;  // one lane on the portable target
inline constexpr size_t kFour = hn::MaxLanes(F4());

HWY_INLINE float load1(const float* p) { return *p; }
HWY_INLINE float load1(const hwy::bfloat16_t* p) { return core::bf16_to_float(p->bits); }
HWY_INLINE float load1(const hwy::float16_t* p) {
  std::uint16_t bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return core::f16_to_float(bits);
}

/// kFour consecutive elements as floats.
HWY_INLINE hn::Vec<F4> load4(const float* p) { return hn::LoadU(F4(), p); }
HWY_INLINE hn::Vec<F4> load4(const hwy::bfloat16_t* p) {
  return hn::PromoteTo(F4(), hn::LoadU(hn::Rebind<hwy::bfloat16_t, F4>(), p));
}
HWY_INLINE hn::Vec<F4> load4(const hwy::float16_t* p) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Set(F4(), load1(p));  // Highway's emulation reads NaN and infinity as finite numbers
#else
  return hn::PromoteTo(F4(), hn::LoadU(hn::Rebind<hwy::float16_t, F4>(), p));
#endif
}

/// One row of `depth` elements, `dim` apart, as contiguous floats.
template <class T>
HWY_INLINE void load_row(const T* HWY_RESTRICT source, std::int64_t dim, size_t depth,
                         float* HWY_RESTRICT row) {
  size_t k = 0;
  if (dim == 1) {
    for (; k + kFour <= depth; k += kFour) hn::StoreU(load4(source + k), F4(), row + k);
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

/// Asks for packed rows [first, last), r = i * group + g, of `depth` elements each, to be brought
/// to L2.
HWY_INLINE void prefetch_rows(const Operand& x, std::int64_t group, std::int64_t first,
                              std::int64_t last, size_t depth) {
  if (x.dim != 1) return;
  const std::int64_t size = size_of(x.dtype);
  const auto bytes = static_cast<std::int64_t>(depth) * size;
  for (std::int64_t r = first; r < last; ++r) {
    const char* row =
        static_cast<const char*>(x.data) + ((r / group) * x.row + (r % group) * x.head) * size;
    for (std::int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
  }
}

/// Interleaves four float rows: out[k * 4 + m] = row_m[k].
HWY_INLINE void interleave4(const float* r0, const float* r1, const float* r2, const float* r3,
                            size_t depth, float* HWY_RESTRICT out) {
  size_t k = 0;
  for (; k + kFour <= depth; k += kFour) {
    hn::StoreInterleaved4(hn::LoadU(F4(), r0 + k), hn::LoadU(F4(), r1 + k), hn::LoadU(F4(), r2 + k),
                          hn::LoadU(F4(), r3 + k), F4(), out + 4 * k);
  }
  for (; k < depth; ++k) {
    out[4 * k] = r0[k];
    out[4 * k + 1] = r1[k];
    out[4 * k + 2] = r2[k];
    out[4 * k + 3] = r3[k];
  }
}

/// Packs rows [first, first + count) of head 0 into groups of four: element (row m, k) at
/// out[(m / 4) * depth * 4 + k * 4 + m % 4]. Rows up to the next multiple of kStep are zero.
/// `staging` holds 4 * depth floats.
HWY_INLINE void pack_rows(const Operand& x, std::int64_t first, size_t count, size_t depth,
                          float* HWY_RESTRICT out, float* HWY_RESTRICT staging) {
  const size_t padded = hwy::RoundUpTo(count, kStep);
  with_type(x.data, x.dtype, [&](const auto* data) HWY_ATTR {
    for (size_t m = 0; m < padded; m += kGroup) {
      const float* rows[kGroup];
      for (size_t j = 0; j < kGroup; ++j) {
        rows[j] = staging + j * depth;
        if (m + j >= count) {
          std::fill_n(staging + j * depth, depth, 0.0f);
          continue;
        }
        const auto* source = data + (first + static_cast<std::int64_t>(m + j)) * x.row;
        if constexpr (std::is_same_v<decltype(source), const float*>) {
          if (x.dim == 1) {
            rows[j] = source;
            continue;
          }
        }
        load_row(source, x.dim, depth, staging + j * depth);
      }
      interleave4(rows[0], rows[1], rows[2], rows[3], depth, out + m * depth);
    }
  });
}

/// Packs columns: element (column c, row j) at out[(c / 4) * stride * 4 + j * 4 + c % 4] for rows
/// [first, first + count). Columns up to the next multiple of kStep, and rows up to the next
/// multiple of kStep, are zero. `staging` holds `depth` rounded up to kStep floats.
HWY_INLINE void pack_columns(const Operand& x, std::int64_t first, size_t count, size_t depth,
                             size_t stride, float* HWY_RESTRICT out, float* HWY_RESTRICT staging) {
  const size_t padded = hwy::RoundUpTo(depth, kStep);
  const size_t rows = hwy::RoundUpTo(count, kStep);
  with_type(x.data, x.dtype, [&](const auto* data) HWY_ATTR {
    for (size_t j = 0; j < rows; ++j) {
      const float* row = staging;
      if (j >= count) {
        std::fill_n(staging, padded, 0.0f);
      } else {
        const auto* source = data + (first + static_cast<std::int64_t>(j)) * x.row;
        if constexpr (std::is_same_v<decltype(source), const float*>) {
          if (x.dim == 1 && depth == padded) row = source;
        }
        if (row == staging) {
          load_row(source, x.dim, depth, staging);
          std::fill_n(staging + depth, padded - depth, 0.0f);
        }
      }
      for (size_t c = 0; c < padded; c += kGroup) {
        for (size_t m = 0; m < kGroup; m += kFour) {
          hn::StoreU(hn::LoadU(F4(), row + c + m), F4(), out + c * stride + j * kGroup + m);
        }
      }
    }
  });
}

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
HWY_INLINE void pack_panel(const Operand& x, std::int64_t group, std::int64_t first, size_t count,
                           size_t depth, float factor, float* HWY_RESTRICT out) {
  constexpr size_t kChunk = 16;
  HWY_ALIGN float chunk[kPanel * kChunk];
  with_type(x.data, x.dtype, [&](const auto* data) HWY_ATTR {
    decltype(data) rows[kPanel];
    for (size_t lane = 0; lane < kPanel; ++lane) {
      const std::int64_t r = first + static_cast<std::int64_t>(lane);
      rows[lane] = lane < count ? data + (r / group) * x.row + (r % group) * x.head : nullptr;
    }
    for (size_t k = 0; k < depth; k += kChunk) {
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

}  // namespace HWY_NAMESPACE
}  // namespace abacist::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
