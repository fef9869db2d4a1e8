// expects: nodiscard
#include <abacist/abacist.hpp>

int main() {
#if MUST_NOT_COMPILE
  abacist::validate({});
#else
  return abacist::validate({}) ? 1 : 0;
#endif
}
