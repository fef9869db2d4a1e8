// Aligned memory of the host, as core::Memory wants it.
#pragma once

#include <cstdlib>
#include <string>

#include "abacist/plan.hpp"
#include "core/geometry.hpp"

namespace abacist::core {

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

}  // namespace abacist::core
