// All kernels, once per instruction set, and the table of them.
#include "cpu/simd/kernels.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/kernels.cpp"
#include <hwy/foreach_target.h>
// After foreach_target: included once per target.
#include "cpu/simd/backward-inl.h"
#include "cpu/simd/few-inl.h"
#include "cpu/simd/forward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace abacist::cpu {
namespace HWY_NAMESPACE {

std::int64_t fma_burst(std::int64_t steps, float* sink) {
  const F f;
  // Run-time values, so that nothing folds; they keep the chains near 1.
  const V factor = hn::Set(f, 0.5f + *sink);
  const V addend = hn::Set(f, 0.5f);
  Accumulators acc;
  clear(acc);
  for (std::int64_t step = 0; step < steps; ++step) {
    for (size_t m = 0; m < kStep; ++m) {
      for (size_t v = 0; v < kVectors; ++v) acc.c[m][v] = hn::MulAdd(acc.c[m][v], factor, addend);
    }
  }
  V total = hn::Zero(f);
  for (size_t m = 0; m < kStep; ++m) {
    for (size_t v = 0; v < kVectors; ++v) total = hn::Add(total, acc.c[m][v]);
  }
  *sink = hn::GetLane(total);
  return steps * static_cast<std::int64_t>(2 * kStep * kPanel);
}

constexpr Kernels kernel_table(Target target) {
  return {.target = target,
          .panel_rows = static_cast<int>(kPanel),
          .key_step = static_cast<int>(kStep),
          .few_rows = static_cast<int>(kFewRows),
          .forward_scratch_bytes = forward_scratch_bytes,
          .forward = forward_any,
          .packed_floats = packed_floats,
          .pack_keys = pack_keys,
          .backward_scratch_bytes = backward_scratch_bytes,
          .backward_prepare = backward_prepare,
          .backward = backward_item,
          .backward_finish = backward_finish,
          .fma_burst = fma_burst};
}

}  // namespace HWY_NAMESPACE
}  // namespace abacist::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace abacist::cpu {

const Kernels* kernels(Target target) {
#if HWY_TARGETS & HWY_AVX3
  static constexpr Kernels kAvx512 = N_AVX3::kernel_table(Target::avx512);
  if (target == Target::avx512) return &kAvx512;
#endif
#if HWY_TARGETS & HWY_AVX2
  static constexpr Kernels kAvx2 = N_AVX2::kernel_table(Target::avx2);
  if (target == Target::avx2) return &kAvx2;
#endif
// Highway's fallback for x86-64 without the above: scalar code, or vectors emulated by the compiler
// (GCC from 12.3 on).
#if HWY_TARGETS & HWY_SCALAR
  static constexpr Kernels kPortable = N_SCALAR::kernel_table(Target::portable);
  if (target == Target::portable) return &kPortable;
#elif HWY_TARGETS & HWY_EMU128
  static constexpr Kernels kPortable = N_EMU128::kernel_table(Target::portable);
  if (target == Target::portable) return &kPortable;
#endif
#if HWY_TARGETS & HWY_NEON
  static constexpr Kernels kNeon = N_NEON::kernel_table(Target::neon);
  if (target == Target::neon) return &kNeon;
#endif
  return nullptr;
}

}  // namespace abacist::cpu
#endif  // HWY_ONCE
