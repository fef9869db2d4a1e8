// expects: (invalid conversion from 'const void\*'|no matching constructor)
#include <abacist/abacist.hpp>

int main() {
  const auto spec = abacist::contiguous(abacist::DType::f32, {1, 1, 1, 1});
#if MUST_NOT_COMPILE
  const float o[] = {0.0f};
#else
  float o[] = {0.0f};
#endif
  const abacist::Tensor output(o, spec);
  return output.rank - 4;
}
