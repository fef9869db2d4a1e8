// A problem that is timed: its data, its plan, and bursts of runs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "abacist/problem.hpp"
#include "operands.hpp"
#include "runner.hpp"

namespace abacist::cli {

struct BenchProblem {
  Pass pass = Pass::forward;
  DType dtype = DType::f32;
  std::int64_t b = 1, s_q = 1024, s_k = 1024, h_q = 1, h_k = 1, d_qk = 64, d_v = 64;
  bool causal = false;
  std::string feature = "plain";
  Place place{};

  bool operator==(const BenchProblem& other) const;
};

/// Runs in a row: how many, and how long one took on average.
struct Burst {
  double seconds_per_run = 0.0;
  std::int64_t runs = 0;
};

/// "plain", or one thing beside Q, K and V, made of random numbers: bias, mask, sinks, alibi,
/// lengths, softcap=CAP, dropout=P, window=L (L keys to the left, none to the right), paged=ROWS.
/// Throws UserError for anything else.
ScoreArguments parse_feature(const std::string& text);

class BenchCase {
 public:
  /// Allocates, fills with random normal data, and runs once to touch every page. The backward pass
  /// gets its O and LSE from a forward run.
  BenchCase(const BenchProblem& problem, std::uint64_t seed);

  /// One run that wakes the threads and fills the caches, then timed runs for at least so long, at
  /// least one.
  Burst burst(double min_seconds) const;

  const BenchProblem& problem() const { return problem_; }
  const PlanInfo& info() const { return runner_->info(); }

 private:
  void run() const;
  void plan_backward(std::uint64_t seed, const Options& options);
  Burst burst_on_gpu(double min_seconds) const;

  BenchProblem problem_;
  Inputs inputs_;
  Operand o_, lse_;
  Gradients gradients_;
  ForwardTensors forward_;
  BackwardTensors backward_;
  std::unique_ptr<Runner> runner_;
  std::unique_ptr<Twins> twins_;  ///< on a GPU
};

/// FLOP/s of fused multiply-adds on so many threads (0: all allowed): the ceiling of the CPU
/// backend.
double fma_peak(int threads);

}  // namespace abacist::cli
