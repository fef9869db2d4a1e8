#pragma once

#include "abacist/export.hpp"
#include "abacist/version.h"

namespace abacist {

/// "0.1.0" of the library that is loaded (the macros are those of the headers).
ABACIST_API const char* version() noexcept;

/// The instruction sets that the CPU backend was built for and this processor has, best first,
/// comma-separated: "avx512,avx2,portable".
ABACIST_API const char* cpu_targets() noexcept;

}  // namespace abacist
