// Instruction sets: which exist, which one a plan uses.
#pragma once

#include <cstdint>
#include <string>

#include "abacist/status.hpp"

namespace abacist::cpu {

/// Better ones first; `portable` is scalar code, for processors without any of the others.
enum class Target : std::uint8_t { avx512, avx2, neon, portable };

const char* to_string(Target target);

/// Built in and present on this processor.
bool is_available(Target target);

/// The best available target, or the one that ABACIST_CPU_TARGET forces (an error if it is unknown
/// or not available).
Result<Target> choose_target();

}  // namespace abacist::cpu
