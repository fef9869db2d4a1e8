// Plans with their workspace, ready to run.
#pragma once

#include <memory>
#include <string>

#include "abacist/plan.hpp"
#include "gpu.hpp"
#include "memory.hpp"
#include "operands.hpp"
#include "options.hpp"
#include "progress.hpp"
#include "user_error.hpp"

namespace abacist::cli {

/// Throws UserError with the planner's reason.
Plan plan_or_throw(const Problem& problem, const PlanOptions& options);

/// How long a run took: the attention itself (on a GPU between two events), and the copies to and
/// from the GPU.
struct RunTime {
  double seconds = 0.0;
  double copy_seconds = 0.0;
};

/// A plan and its workspace. Tensors are those of the host: for a GPU they are copied there and
/// back.
class Runner {
 public:
  Runner(const Problem& problem, const Place& place);
  Runner(const Problem& problem, const PlanOptions& options) : Runner(problem, Place{options}) {}

  const PlanInfo& info() const { return plan_.info(); }
  const Plan& plan() const { return plan_; }
  const Place& place() const { return place_; }

  /// Runs once. Throws UserError if the library refuses, or page ids were outside the pool.
  RunTime run(const ForwardTensors& tensors, Progress* progress = nullptr) const;
  RunTime run(const BackwardTensors& tensors, Progress* progress = nullptr) const;

  /// Runs in a row on tensors that are on the GPU already; seconds of all of them.
  double run_on_gpu(const ForwardTensors& tensors, std::int64_t runs) const;

 private:
  template <class Tensors>
  double run_on_host(const Tensors& tensors, Progress* progress) const;
  /// Throws UserError for page ids, and on a GPU lengths, that break their rules.
  void check_data() const;

  Place place_;
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
