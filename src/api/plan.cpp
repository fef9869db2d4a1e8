// The planner: validate, ask each implementation in order, keep the first that serves.
#include "abacist/plan.hpp"

#include <cstdlib>
#include <string_view>

#include "abacist/attention.hpp"
#include "api/caught.hpp"
#include "api/registry.hpp"
#include "api/tensors.hpp"
#include "api/validate.hpp"
#include "core/figures.hpp"

namespace abacist {

struct Plan::State {
  core::Resolved resolved{};
  core::Draft draft{};
  const core::Implementation* implementation = nullptr;
};

namespace {

/// The backend that the caller or the environment forces; `automatic` if none.
Result<Backend> forced_backend(const PlanOptions& options) {
  const char* name = std::getenv("ABACIST_BACKEND");
  if (name == nullptr || *name == '\0') return options.backend;
  for (const Backend backend :
       {Backend::automatic, Backend::cpu, Backend::reference, Backend::cuda}) {
    if (std::string_view(name) != to_string(backend)) continue;
    if (options.backend == Backend::automatic || options.backend == backend) return backend;
    // An explicit choice of the caller (an oracle beside the backend under test) stands.
    return options.backend;
  }
  return api::invalid("ABACIST_BACKEND", std::string("is \"") + name +
                                             "\", must be automatic, cpu, reference or cuda");
}

template <class Tensors>
Status run_checked(const Plan::State* state, const Tensors& tensors, const RunOptions& options,
                   Status (*run)(const Plan::State&, const Tensors&, const RunOptions&)) try {
  if (state == nullptr) return api::invalid("plan", "is empty, must come from plan()");
  const PlanInfo& info = state->draft.info;
  const Device device = state->resolved.problem.operands.q.device;
  if (options.stream != nullptr && device.type == DeviceType::cpu) {
    return api::invalid("stream", "is given, but the tensors are on the host");
  }
  if (Status s = api::check_workspace(info, options.workspace); !s) return s;
  const Workspace used{options.workspace.data, info.workspace_bytes};
  if (Status s = api::check_tensors(state->resolved, tensors, used); !s) return s;
  return run(*state, tensors, options);
} catch (...) {
  return api::caught();
}

}  // namespace

Result<Plan> plan(const Problem& problem, const PlanOptions& options) try {
  auto resolved = api::resolve(problem);
  if (!resolved) return resolved.error();
  const auto backend = forced_backend(options);
  if (!backend) return backend.error();
  if (options.threads < 0) {
    return api::invalid("threads", "is " + std::to_string(options.threads) +
                                       ", must be at least 0 (0: those of the arena)");
  }
  PlanOptions chosen = options;
  chosen.backend = backend.value();
  std::vector<std::string> declined;
  for (const core::Implementation* candidate : api::implementations()) {
    if (chosen.backend != Backend::automatic && chosen.backend != candidate->backend) continue;
    auto draft = candidate->plan(resolved.value(), chosen);
    if (!draft) {
      if (draft.error().code != ErrorCode::unsupported) return draft.error();
      declined.push_back(std::string(candidate->name) + ": " + draft.error().message);
      continue;
    }
    auto state = std::make_shared<Plan::State>();
    state->resolved = std::move(resolved).value();
    state->draft = std::move(draft).value();
    state->draft.info.operand_bytes = core::operand_bytes(state->resolved);
    state->draft.info.declined = std::move(declined);
    state->implementation = candidate;
    Plan result;
    result.state_ = std::move(state);
    return result;
  }
  std::string reasons;
  for (const std::string& reason : declined) reasons += (reasons.empty() ? "" : "; ") + reason;
  return Error{ErrorCode::unsupported, "", "no implementation serves: " + reasons};
} catch (...) {
  return api::caught();
}

const PlanInfo& Plan::info() const noexcept {
  static const PlanInfo kEmpty;
  return state_ ? state_->draft.info : kEmpty;
}
const Problem& Plan::problem() const noexcept {
  static const Problem kEmpty;
  return state_ ? state_->resolved.problem : kEmpty;
}

Status Plan::run(const ForwardTensors& tensors, const RunOptions& options) const {
  return run_checked<ForwardTensors>(
      state_.get(), tensors, options,
      [](const State& s, const ForwardTensors& t, const RunOptions& o) {
        return s.implementation->forward({s.resolved, s.draft, t, o});
      });
}

Status Plan::run(const BackwardTensors& tensors, const RunOptions& options) const {
  return run_checked<BackwardTensors>(
      state_.get(), tensors, options,
      [](const State& s, const BackwardTensors& t, const RunOptions& o) {
        return s.implementation->backward({s.resolved, s.draft, t, o});
      });
}

Status Plan::device_status(const RunOptions& options) const try {
  if (state_ == nullptr) return api::invalid("plan", "is empty, must come from plan()");
  const bool host = state_->resolved.problem.operands.q.device.type == DeviceType::cpu;
  if (state_->implementation->device_status == nullptr ||
      (host && !state_->resolved.geometry.paged)) {
    return {};
  }
  if (Status s = api::check_workspace(state_->draft.info, options.workspace); !s) return s;
  return state_->implementation->device_status(state_->resolved, state_->draft, options);
} catch (...) {
  return api::caught();
}

/// A run, and what it found in data that is checked on the way; on a GPU, where that would mean
/// to wait, the run alone.
template <class Tensors>
Status Plan::run_reporting(const Tensors& tensors, const RunOptions& options) const {
  const Status ran = run(tensors, options);
  const bool host = problem().operands.q.device.type == DeviceType::cpu;
  return ran && host ? device_status(options) : ran;
}

template <class Tensors>
Status Plan::run_allocating(const Tensors& tensors, const RunOptions& options) const try {
  const std::size_t bytes = info().workspace_bytes;
  if (bytes == 0 || options.workspace.data != nullptr) return run_reporting(tensors, options);
  const core::Memory& memory = state_->implementation->memory;
  const auto allocated = memory.allocate(bytes, state_->resolved, options);
  if (!allocated) return allocated.error();
  RunOptions with_workspace = options;
  with_workspace.workspace = {allocated.value(), bytes};
  const Status ran = run_reporting(tensors, with_workspace);
  const Status released = memory.release(allocated.value(), state_->resolved, options);
  return ran ? released : ran;
} catch (...) {  // from allocate or release; run() lets nothing out
  return api::caught();
}

Status forward(const ForwardTensors& tensors, const Options& options,
               const PlanOptions& plan_options, const RunOptions& run_options) {
  const auto planned = plan(make_problem(tensors, options), plan_options);
  if (!planned) return planned.error();
  return planned->run_allocating(tensors, run_options);
}

Status backward(const BackwardTensors& tensors, const Options& options,
                const PlanOptions& plan_options, const RunOptions& run_options) {
  const auto planned = plan(make_problem(tensors, options), plan_options);
  if (!planned) return planned.error();
  return planned->run_allocating(tensors, run_options);
}

}  // namespace abacist
