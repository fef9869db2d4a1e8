// Checks that need pointers: alignment, overlap, values of host arrays, workspace.
#pragma once

#include <span>
#include <string>

#include "abacist/plan.hpp"
#include "core/geometry.hpp"

namespace abacist::api {

struct NamedTensor {
  std::string name;
  ConstTensor tensor;
  bool output = false;
};

/// Pointers are present and aligned; no output shares memory with any other operand.
Status check_operands(std::span<const NamedTensor> all);

/// `workspace` is the part that the run uses; it must not share memory with any operand.
Status check_tensors(const core::Resolved& resolved, const ForwardTensors& tensors,
                     const Workspace& workspace);
Status check_tensors(const core::Resolved& resolved, const BackwardTensors& tensors,
                     const Workspace& workspace);
Status check_workspace(const PlanInfo& info, const Workspace& workspace);

}  // namespace abacist::api
