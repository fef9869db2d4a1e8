// The float64 oracle: O(N^2), plain loops, its own masking code. Runs only when asked for.
#pragma once

#include "core/backend.hpp"

namespace abacist::reference {

extern const core::Implementation kImplementation;

}  // namespace abacist::reference
