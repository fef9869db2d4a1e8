#include "cpu/simd/target.hpp"

#include <hwy/highway.h>
#include <hwy/targets.h>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <string_view>

#include "abacist/version.hpp"
#include "cpu/simd/kernels.hpp"

namespace abacist::cpu {
namespace {

constexpr Target kTargets[] = {Target::avx512, Target::avx2, Target::neon, Target::portable};

std::int64_t highway_bit(Target target) {
  switch (target) {
    case Target::avx512:
      return HWY_AVX3;
    case Target::avx2:
      return HWY_AVX2;
    case Target::portable:
      return HWY_SCALAR | HWY_EMU128;
    case Target::neon:
      return HWY_NEON;
  }
  return 0;
}

}  // namespace

const char* to_string(Target target) {
  switch (target) {
    case Target::avx512:
      return "avx512";
    case Target::avx2:
      return "avx2";
    case Target::portable:
      return "portable";
    case Target::neon:
      return "neon";
  }
  return "unknown";
}

bool is_available(Target target) {
  // Highway asks the processor anew each time, which takes 15 us in a virtual machine.
  static const std::int64_t supported = hwy::SupportedTargets();
  if (kernels(target) == nullptr) return false;
  return target == Target::portable || (supported & highway_bit(target)) != 0;
}

Result<Target> choose_target() {
  const char* forced = std::getenv("ABACIST_CPU_TARGET");
  const bool any = forced == nullptr || *forced == '\0';
  for (const Target target : kTargets) {
    if (is_available(target) && (any || std::string_view(forced) == to_string(target)))
      return target;
  }
  return Error{ErrorCode::invalid_argument, "ABACIST_CPU_TARGET",
               "is \"" + std::string(any ? "" : forced) + "\", must be one of " + cpu_targets()};
}

}  // namespace abacist::cpu

namespace abacist {

const char* cpu_targets() noexcept {
  // Fixed memory: the first call may come when there is no other.
  static const auto names = [] {
    std::array<char, 64> text{};
    std::size_t used = 0;
    for (const cpu::Target target : cpu::kTargets) {
      if (!cpu::is_available(target)) continue;
      if (used > 0) text[used++] = ',';
      for (const char* c = cpu::to_string(target); *c != '\0'; ++c) text[used++] = *c;
    }
    return text;
  }();
  return names.data();
}

}  // namespace abacist
