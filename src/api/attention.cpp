// One-line calls, and the problem that tensors pose.
#include "abacist/attention.hpp"

#include <cstdlib>
#include <memory>
#include <new>

#include "api/validate.hpp"

namespace abacist {
namespace {

struct Free {
  void operator()(void* memory) const { std::free(memory); }  // NOLINT(cppcoreguidelines-no-malloc)
};

template <class Tensors>
Status plan_and_run(const Tensors& tensors, const Options& options, const PlanOptions& plan_options,
                    const RunOptions& run_options) {
  const auto planned = plan(make_problem(tensors, options), plan_options);
  if (!planned) return planned.error();
  const std::size_t bytes = planned->info().workspace_bytes;
  if (bytes == 0 || run_options.workspace.data != nullptr) {
    return planned->run(tensors, run_options);
  }
  const std::size_t rounded =
      (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  const std::unique_ptr<void, Free> memory(std::aligned_alloc(kWorkspaceAlignment, rounded));
  if (!memory) {
    return Error{ErrorCode::out_of_memory, "workspace",
                 "could not allocate " + std::to_string(rounded) + " bytes"};
  }
  RunOptions with_workspace = run_options;
  with_workspace.workspace = {memory.get(), rounded};
  return planned->run(tensors, with_workspace);
}

/// The operands that both passes have.
template <class Tensors>
Problem shared_problem(Pass pass, const Tensors& t, const Options& options) {
  Problem problem{pass, {}, options};
  Operands& x = problem.operands;
  x.q = t.q;
  x.k = t.k;
  x.v = t.v;
  x.o = t.o;
  x.lse = t.lse;
  x.alibi_slopes = t.alibi_slopes;
  x.cu_seqlens_q = t.cu_seqlens_q;
  x.cu_seqlens_k = t.cu_seqlens_k;
  return problem;
}

}  // namespace

Problem make_problem(const ForwardTensors& t, const Options& options) {
  return shared_problem(Pass::forward, t, options);
}

Problem make_problem(const BackwardTensors& t, const Options& options) {
  Problem problem = shared_problem(Pass::backward, t, options);
  Operands& x = problem.operands;
  x.d_o = t.d_o;
  x.d_lse = t.d_lse;
  x.dq = t.dq;
  x.dk = t.dk;
  x.dv = t.dv;
  return problem;
}

Status forward(const ForwardTensors& tensors, const Options& options,
               const PlanOptions& plan_options, const RunOptions& run_options) {
  return plan_and_run(tensors, options, plan_options, run_options);
}

Status backward(const BackwardTensors& tensors, const Options& options,
                const PlanOptions& plan_options, const RunOptions& run_options) {
  return plan_and_run(tensors, options, plan_options, run_options);
}

}  // namespace abacist
