// expects: (no viable conversion|conversion from .*BasicTensor<const void>)
#include <abacist/abacist.hpp>

int main() {
#if MUST_NOT_COMPILE
  const abacist::ConstTensor from;
#else
  const abacist::Tensor from;
#endif
  const abacist::Tensor to = from;
  return to.rank;
}
