// expects: discards .*qualifier
#include <abacist/abacist.h>

int main(void) {
#if MUST_NOT_COMPILE
  static const float data[1];
#else
  static float data[1];
#endif
  const int64_t shape[] = {1};
  return abacist_contiguous(data, ABACIST_F32, 1, shape).rank - 1;
}
