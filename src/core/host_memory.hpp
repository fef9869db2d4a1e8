// Aligned memory of the host, as core::Memory wants it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>

#include "abacist/plan.hpp"
#include "core/geometry.hpp"

namespace abacist::core {

struct Draft;

inline Result<void*> host_allocate(std::size_t bytes, const Resolved&, const RunOptions&) {
  const std::size_t rounded =
      (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  void* const memory = std::aligned_alloc(kWorkspaceAlignment, rounded);
  if (memory != nullptr) return memory;
  return Error{ErrorCode::out_of_memory, "workspace",
               "could not allocate " + std::to_string(rounded) + " bytes"};
}

inline Status host_release(void* memory, const Resolved&, const RunOptions&) {
  std::free(memory);
  return {};
}

/// Plan::device_status on the host: what a run of a paged plan noted in the first word of its
/// workspace.
inline Status host_status(const Resolved& resolved, const Draft&, const RunOptions& options) {
  if (*static_cast<const std::uint32_t*>(options.workspace.data) == 0) return {};
  return Error{ErrorCode::invalid_argument, "block_table",
               "has page ids outside [0, pages = " + std::to_string(resolved.geometry.pages) +
                   "); their keys were skipped"};
}

}  // namespace abacist::core
