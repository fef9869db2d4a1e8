// The CUDA backend: the Hopper forward kernel behind the planner.
#pragma once

#include "core/backend.hpp"

namespace abacist::cuda {

extern const core::Implementation kImplementation;

}  // namespace abacist::cuda
