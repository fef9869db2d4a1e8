// Plans with their workspace, ready to run.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "abacist/plan.hpp"
#include "memory.hpp"
#include "operands.hpp"
#include "progress.hpp"
#include "user_error.hpp"

namespace abacist::cli {

/// Throws UserError with the planner's reason.
Plan plan_or_throw(const Problem& problem, const PlanOptions& options);

/// A plan and its workspace.
class Runner {
 public:
  Runner(const Problem& problem, const PlanOptions& options)
      : plan_(plan_or_throw(problem, options)),
        workspace_(allocate(static_cast<std::int64_t>(plan_.info().workspace_bytes))) {}

  const PlanInfo& info() const { return plan_.info(); }
  const Plan& plan() const { return plan_; }

  /// Runs once; seconds. Throws UserError if the library refuses.
  template <class Tensors>
  double run(const Tensors& tensors, Progress* progress = nullptr) const {
    RunOptions options;
    options.workspace = {workspace_.get(), plan_.info().workspace_bytes};
    if (progress != nullptr) {
      options.progress = &Progress::callback;
      options.progress_context = progress;
    }
    const auto start = std::chrono::steady_clock::now();
    const Status status = plan_.run(tensors, options);
    const auto end = std::chrono::steady_clock::now();
    if (!status) throw UserError(status.error());
    return std::chrono::duration<double>(end - start).count();
  }

 private:
  Plan plan_;
  std::shared_ptr<void> workspace_;
};

/// "cpu.forward.avx512, tiles of 64 x 128, 2 threads"
std::string kernel_text(const PlanInfo& info);

/// "f16[1, 2048, 9, 64]"
std::string operand_text(const TensorSpec& spec);

/// Bytes of the float32 score matrix that standard attention writes.
double score_matrix_bytes(const Problem& problem);

}  // namespace abacist::cli
