// Checks that need pointers: alignment, overlap, values of host arrays, workspace.
#pragma once

#include "abacist/plan.hpp"
#include "core/geometry.hpp"

namespace abacist::api {

Status check_tensors(const core::Resolved& resolved, const ForwardTensors& tensors);
Status check_tensors(const core::Resolved& resolved, const BackwardTensors& tensors);
Status check_workspace(const PlanInfo& info, const Workspace& workspace);

}  // namespace abacist::api
