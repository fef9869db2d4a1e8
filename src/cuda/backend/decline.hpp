// Which problems the Hopper forward kernel does not take, and why. Needs neither GPU nor CUDA.
#pragma once

#include <optional>

#include "core/geometry.hpp"
#include "cuda/backend/device.hpp"

namespace abacist::cuda {

/// The reason of everything that neither pointers nor the GPU decide; empty if none.
std::optional<Error> decline(const core::Resolved& resolved);

/// The reason why this GPU is not one for the kernels; empty if it is.
std::optional<Error> decline(const DeviceFacts& device);

}  // namespace abacist::cuda
