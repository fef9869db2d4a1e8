// The CPU backend: FlashAttention-2's algorithm on SIMD units, float32 accumulation.
#pragma once

#include "core/backend.hpp"

namespace abacist::cpu {

extern const core::Implementation kImplementation;

}  // namespace abacist::cpu
