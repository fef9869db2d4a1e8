// exp2 and tanh on vectors, included once per instruction set.
#if defined(ABACIST_CPU_SIMD_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ABACIST_CPU_SIMD_MATH_INL_H_
#undef ABACIST_CPU_SIMD_MATH_INL_H_
#else
#define ABACIST_CPU_SIMD_MATH_INL_H_
#endif

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace abacist::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// 2^x for x <= 127.5. Relative error below 1.5 ulp; exactly 1 at 0; 0 below -126 (no subnormals:
/// they are slow, and far below the rounding of a sum that holds a 1); NaN gives NaN. Minimax
/// polynomial of degree 5 on [-1/2, 1/2] with constant term 1, fitted for this file.
template <class D, class Vector = hn::Vec<D>>
HWY_INLINE Vector exp2(D f, Vector x) {
  const hn::RebindToSigned<D> i;
  // Adding 1.5 * 2^23 rounds x to an integer n in the low mantissa bits; the 127 more makes them
  // the biased exponent of 2^n.
  const Vector magic = hn::Set(f, 12582912.0f + 127.0f);
  const Vector shifted = hn::Add(x, magic);
  const Vector r = hn::Sub(x, hn::Sub(shifted, magic));
  Vector p = hn::Set(f, 0.00132647273f);
  p = hn::MulAdd(p, r, hn::Set(f, 0.00967151279f));
  p = hn::MulAdd(p, r, hn::Set(f, 0.0555073374f));
  p = hn::MulAdd(p, r, hn::Set(f, 0.240222421f));
  p = hn::MulAdd(p, r, hn::Set(f, 0.693146978f));
  p = hn::MulAdd(p, r, hn::Set(f, 1.0f));
  const Vector power = hn::BitCast(f, hn::ShiftLeft<23>(hn::BitCast(i, shifted)));
  // A floating-point product, not an integer addition to the exponent: it keeps any NaN a NaN. The
  // comparison is false for NaN, too.
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(f, -126.0f)), hn::Mul(p, power));
}

/// tanh x; relative error below 4 ulp; NaN gives NaN.
/// Odd minimax polynomial up to 0.6, beyond it 1 - 2 / (e^2x + 1).
template <class D, class Vector = hn::Vec<D>>
HWY_INLINE Vector tanh(D f, Vector x) {
  const Vector a = hn::Abs(x);
  const Vector z = hn::Mul(x, x);
  Vector p = hn::Set(f, -0.00589511951f);
  p = hn::MulAdd(p, z, hn::Set(f, 0.0207959413f));
  p = hn::MulAdd(p, z, hn::Set(f, -0.0537838221f));
  p = hn::MulAdd(p, z, hn::Set(f, 0.13331924f));
  p = hn::MulAdd(p, z, hn::Set(f, -0.33333298f));
  const Vector small = hn::MulAdd(hn::Mul(p, z), x, x);
  // At 10 the result is 1 to the last bit; the bound keeps exp2 in its domain (NaN stays in `a`).
  const Vector bounded = hn::IfThenElse(hn::Gt(a, hn::Set(f, 10.0f)), hn::Set(f, 10.0f), a);
  const Vector e = exp2(f, hn::Mul(bounded, hn::Set(f, 2.885390082f)));  // 2 log2(e)
  const Vector one = hn::Set(f, 1.0f);
  const Vector big = hn::Sub(one, hn::Div(hn::Set(f, 2.0f), hn::Add(e, one)));
  return hn::IfThenElse(hn::Lt(a, hn::Set(f, 0.6f)), small, hn::CopySign(big, x));
}

}  // namespace HWY_NAMESPACE
}  // namespace abacist::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
