// expects: (could not convert|conversion from .*Result|no viable conversion)
#include <abacist/abacist.hpp>

int main() {
#if MUST_NOT_COMPILE
  const abacist::Plan plan = abacist::plan({});
#else
  const auto plan = abacist::plan({});
#endif
  return plan ? 1 : 0;
}
