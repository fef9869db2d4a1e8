// expects: (incomplete type|storage size)
#include <abacist/abacist.h>

int main(void) {
#if MUST_NOT_COMPILE
  abacist_plan plan;
  return sizeof plan == 1;
#else
  abacist_plan* plan = NULL;
  return plan != NULL;
#endif
}
