// Register-tile matrix products, included once per instruction set.
//
// Every product of attention here has the form C[m][lane] (+)= sum_k A[m][k] * B[k][lane]: A is
// read by scalar broadcasts, B and C by vectors. Queries lie in the lanes, so that the softmax over
// keys is vertical: no horizontal reduction anywhere (softmax of a lane touches that lane only).
#if defined(ABACIST_CPU_SIMD_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ABACIST_CPU_SIMD_GEMM_INL_H_
#undef ABACIST_CPU_SIMD_GEMM_INL_H_
#else
#define ABACIST_CPU_SIMD_GEMM_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>

HWY_BEFORE_NAMESPACE();
namespace abacist::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using V = hn::Vec<F>;
inline constexpr size_t kLanes = hn::MaxLanes(F());

// 32 registers: 8 x 3 accumulators + 3 of B + 1 broadcast; 16 registers: 4 x 3 + 3 + 1. Both spans
// divide 64 and 128, so that no head dimension in use wastes a row (6 x 2 would waste 3%).
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
inline constexpr size_t kStep = 8;
#else
inline constexpr size_t kStep = 4;
#endif
inline constexpr size_t kVectors = 3;
inline constexpr size_t kPanel = kVectors * kLanes;  // rows of B and C: floats

/// K and V are packed in chunks of 16 columns, a cache line of each row: [columns / 16][rows][16].
/// Packing copies whole lines, and both products below read it with constant offsets.
inline constexpr size_t kChunk = 16;

struct Accumulators {
  V c[kStep][kVectors];

  HWY_INLINE Accumulators() {
  }  // GCC compiles an implicit one without the target's attributes (NEON)
};

HWY_INLINE void clear(Accumulators& acc) {
  const F f;
  for (size_t m = 0; m < kStep; ++m) {
    for (size_t v = 0; v < kVectors; ++v) acc.c[m][v] = hn::Zero(f);
  }
}

/// acc[m][:] += sum over k in [0, depth) of a[m * row + k * column] * b[k * kPanel + :]; b aligned.
/// Here and below, of vectors [first, last) of the panel only.
template <size_t row, size_t column, size_t first = 0, size_t last = kVectors>
HWY_INLINE void multiply(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, size_t depth,
                         Accumulators& acc) {
  const F f;
#pragma GCC unroll 4
  for (size_t k = 0; k < depth; ++k) {
    V values[kVectors];
    for (size_t v = first; v < last; ++v) values[v] = hn::Load(f, b + k * kPanel + v * kLanes);
    for (size_t m = 0; m < kStep; ++m) {
      const V scalar = hn::Set(f, a[m * row + k * column]);
      for (size_t v = first; v < last; ++v) {
        acc.c[m][v] = hn::MulAdd(scalar, values[v], acc.c[m][v]);
      }
    }
  }
}

/// Sums over columns (S = K Q, dP = V dO): acc[m][:] = sum over c of x(j + m, c) * b[c * kPanel +
/// :], x packed in chunks of `rows` rows.
template <size_t first = 0, size_t last = kVectors>
HWY_INLINE void multiply_columns(const float* HWY_RESTRICT x, size_t rows, size_t j,
                                 const float* HWY_RESTRICT b, size_t columns, Accumulators& acc) {
  clear(acc);
  for (size_t c = 0; c < columns; c += kChunk) {
    multiply<kChunk, 1, first, last>(x + c * rows + j * kChunk, b + c * kPanel,
                                     std::min(kChunk, columns - c), acc);
  }
}

/// Sums over rows (O = V P, dQ = K dS): acc[m][:] += sum over j in [j0, j1) of x(j, c + m) * b[j *
/// kPanel + :].
template <size_t first = 0, size_t last = kVectors>
HWY_INLINE void multiply_rows(const float* HWY_RESTRICT x, size_t rows, size_t c,
                              const float* HWY_RESTRICT b, size_t j0, size_t j1,
                              Accumulators& acc) {
  if (j0 >= j1) return;
  multiply<1, kChunk, first, last>(x + c / kChunk * kChunk * rows + c % kChunk + j0 * kChunk,
                                   b + j0 * kPanel, j1 - j0, acc);
}

template <size_t first = 0, size_t last = kVectors>
HWY_INLINE void store(const Accumulators& acc, float* HWY_RESTRICT c) {
  const F f;
  for (size_t m = 0; m < kStep; ++m) {
    for (size_t v = first; v < last; ++v) hn::Store(acc.c[m][v], f, c + m * kPanel + v * kLanes);
  }
}

// The second form has keys in the rows and head dimensions in the lanes: C[j][c] += sum_i A[i][j] *
// B[i][c] (dV = P^T dO, dK = dS^T Q). A is a panel [j][kPanel] as `multiply` leaves it, read along
// i.

/// The same address under a name of its own: the compiler does not merge loads of the two.
HWY_INLINE const float* renamed(const float* p) {
  asm volatile("" : "+r"(p));
  return p;
}

/// acc[m][v] += sum over i in [0, kPanel) of a[m * kPanel + i] * b[i * stride + v * kLanes].
///
/// With AVX-512, every second row's broadcasts are memory operands of its FMAs: fewer instructions
/// for more loads. Beside a busy hyperthread 1% of the backward pass, alone nothing; in `multiply`
/// 2% more, but there it costs 1 to 2% on Zen 4.
template <size_t kCount>
HWY_INLINE void multiply_panel(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b,
                               size_t stride, V (&acc)[kStep][kCount]) {
  const F f;
  constexpr bool kEmbeds = HWY_TARGET == HWY_AVX3;
  const float* names[kCount];
  for (size_t v = 0; v < kCount; ++v) names[v] = kEmbeds && v > 0 ? renamed(a) : a;
#pragma GCC unroll 4
  for (size_t i = 0; i < kPanel; ++i) {
    V row[kCount];
    for (size_t v = 0; v < kCount; ++v) row[v] = hn::Load(f, b + i * stride + v * kLanes);
    for (size_t m = 0; m < kStep; ++m) {
      const V scalar = hn::Set(f, a[m * kPanel + i]);
      for (size_t v = 0; v < kCount; ++v) {
        const bool embedded = kEmbeds && m % 2 == 1;
        acc[m][v] =
            hn::MulAdd(embedded ? hn::Set(f, names[v][m * kPanel + i]) : scalar, row[v], acc[m][v]);
      }
    }
  }
}

/// c[j][:] += A^T B for keys [j0, j1), kCount vectors of columns; `panels` panels of A,
/// `panel_stride` floats apart, follow each other in i.
template <size_t kCount>
HWY_NOINLINE void accumulate_columns(const float* HWY_RESTRICT a, size_t panels,
                                     size_t panel_stride, const float* HWY_RESTRICT b,
                                     size_t stride, size_t j0, size_t j1, float* HWY_RESTRICT c) {
  const F f;
  for (size_t j = j0; j < j1; j += kStep) {
    V acc[kStep][kCount];
    for (size_t m = 0; m < kStep; ++m) {
      for (size_t v = 0; v < kCount; ++v) {
        acc[m][v] = hn::Zero(f);
      }
    }
    for (size_t p = 0; p < panels; ++p) {
      multiply_panel<kCount>(a + p * panel_stride + j * kPanel, b + p * kPanel * stride, stride,
                             acc);
    }
    for (size_t m = 0; m < kStep; ++m) {
      for (size_t v = 0; v < kCount; ++v) {
        float* place = c + (j + m) * stride + v * kLanes;
        hn::Store(hn::Add(hn::Load(f, place), acc[m][v]), f, place);
      }
    }
  }
}

/// The same over all `stride` columns (a multiple of kLanes). Three vectors at a time; a remainder
/// of four goes as two and two: a single vector would be bound by the loads of A.
HWY_INLINE void accumulate_rows(const float* a, size_t panels, size_t panel_stride, const float* b,
                                size_t stride, size_t j0, size_t j1, float* c) {
  size_t left = stride / kLanes;
  const auto advance = [&](size_t vectors) {
    b += vectors * kLanes;
    c += vectors * kLanes;
    left -= vectors;
  };
  while (left >= 5 || left == 3) {
    accumulate_columns<3>(a, panels, panel_stride, b, stride, j0, j1, c);
    advance(3);
  }
  while (left >= 2) {
    accumulate_columns<2>(a, panels, panel_stride, b, stride, j0, j1, c);
    advance(2);
  }
  if (left == 1) accumulate_columns<1>(a, panels, panel_stride, b, stride, j0, j1, c);
}

}  // namespace HWY_NAMESPACE
}  // namespace abacist::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
