// Puts the splits of a forward pass together. Host code only.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "arguments.hpp"

namespace abacist::cuda::sm90 {

// Enqueues what makes O and LSE of the partial results at `arguments.workspace`.
cudaError_t launch_merge(const ForwardArguments& arguments, int splits, cudaStream_t stream);

// What that reads at most: its loads come in groups, and a sum and maximum is a sector of 32 bytes.
int64_t merge_read_bytes(const ForwardGeometry& g, int splits);

// Loads the kernel onto the current device.
cudaError_t load_merge(ForwardType type);

}  // namespace abacist::cuda::sm90
