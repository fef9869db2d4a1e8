// The plan of a problem on a GPU, as a function of the problem and of what is known of the GPU.
#pragma once

#include "core/backend.hpp"
#include "cuda/backend/device.hpp"
#include "cuda/sm90/forward/arguments.hpp"

namespace abacist::cuda {

/// What a run needs beside the tensors.
struct Choices {
  DeviceFacts device{};
  sm90::ForwardChoice launch{};
  std::size_t status_bytes = 0;  ///< of the workspace, at its start: the status word
};

/// Everything of the launch but what the tensors' addresses say: those are null, or, where only
/// their presence counts so far, not null.
sm90::ForwardArguments forward_arguments(const core::Resolved& resolved);

/// The draft, or an `unsupported` error with the reason.
Result<core::Draft> plan_on(const core::Resolved& resolved, const DeviceFacts& device);

}  // namespace abacist::cuda
