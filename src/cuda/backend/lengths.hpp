// Checks lengths that lie in device memory, where only a kernel reads them.
#pragma once

#include <cstdint>

#include "abacist/plan.hpp"

namespace abacist::cuda {

struct Lengths {
  const std::int32_t* cu_q = nullptr;  ///< device, [b + 1]; all of them may be null: not checked
  const std::int32_t* cu_k = nullptr;  ///< device, [b + 1]
  const std::int32_t* keys = nullptr;  ///< device, [b]
  std::int64_t b = 0;
  std::int64_t total_q = 0, total_k = 0;
  std::int64_t most_q = 0, most_k = 0;  ///< of one sequence
};

/// Loads the check onto the current device; a cudaError_t.
int load_length_check();

/// Enqueues a check that sets `*status` (device) to DeviceFault bits; a cudaError_t.
int enqueue_length_check(const Lengths& lengths, std::uint32_t* status, Stream stream);

}  // namespace abacist::cuda
