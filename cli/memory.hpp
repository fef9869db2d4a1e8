// Aligned memory, and how much of it this process took.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace abacist::cli {

/// Memory aligned to kWorkspaceAlignment, not initialised, never null. Throws UserError when it is
/// not to be had, also when the kernel would hand it out and then end the process for using it.
std::shared_ptr<void> allocate(std::int64_t bytes);

/// The largest resident set of this process so far, inputs mapped from files included.
std::int64_t peak_memory_bytes();

}  // namespace abacist::cli
