// What an implementation offers to the planner. The registry (api/registry.cpp) is an ordered list
// of these; the first that serves wins.
#pragma once

#include <memory>

#include "abacist/plan.hpp"
#include "core/geometry.hpp"
#include "core/host_memory.hpp"

namespace abacist::core {

/// What an implementation's `plan` returns: the figures to show and its own private choices.
struct Draft {
  PlanInfo info{};
  std::shared_ptr<const void> choices{};
};

/// Tensors and workspace have been checked against the problem before `run` is called.
struct ForwardCall {
  const Resolved& resolved;
  const Draft& draft;
  const ForwardTensors& tensors;
  const RunOptions& options;
};
struct BackwardCall {
  const Resolved& resolved;
  const Draft& draft;
  const BackwardTensors& tensors;
  const RunOptions& options;
};

/// Where the one-line calls get their workspace, kWorkspaceAlignment-aligned.
struct Memory {
  Result<void*> (*allocate)(std::size_t bytes, const Resolved&, const RunOptions&);
  Status (*release)(void* memory, const Resolved&, const RunOptions&);
};

struct Implementation {
  const char* name;
  Backend backend;
  /// The draft, or an `unsupported` error that says why not.
  Result<Draft> (*plan)(const Resolved&, const PlanOptions&);
  Status (*forward)(const ForwardCall&);
  Status (*backward)(const BackwardCall&);
  Memory memory = {host_allocate, host_release};
  /// Plan::device_status; null where every operand is checked before a run.
  Status (*device_status)(const Resolved&, const Draft&, const RunOptions&) = nullptr;
};

}  // namespace abacist::core
