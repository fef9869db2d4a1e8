#pragma once

#include <cuda_runtime_api.h>

namespace abacist::testing {

/// Enqueues a kernel that writes to an address that is none.
void enqueue_fault(cudaStream_t stream);

}  // namespace abacist::testing
