// The oracle as an implementation among others: its plan and its threads. The mathematics is in
// attention.cpp.
#include "reference/reference.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>

#include "core/figures.hpp"
#include "core/numeric.hpp"
#include "core/saturate.hpp"
#include "cpu/parallel.hpp"
#include "reference/attention.hpp"
#include "reference/visibility.hpp"

namespace abacist::reference {
namespace {

using core::Count;

/// What the plan chose: where the workers' doubles lie in the workspace.
struct Choices {
  int workers = 1;
  std::size_t doubles_per_worker = 0;
  std::size_t status_doubles = 0;  ///< before the workers' doubles; holds the status word
  std::int64_t max_len_k = 0;
  TensorSpec d_bias{};  ///< its sums as float64, row-major, behind the workers' doubles
};

constexpr std::size_t kAlignedDoubles = kWorkspaceAlignment / sizeof(double);
constexpr std::int64_t kCountedRows = std::int64_t{1} << 16;  // a plan stays below a millisecond

/// Pairs that see each other: counted row by row, or the product of the lengths where that would
/// take long or the lengths are data.
Figure counted_pairs(const core::Resolved& resolved) {
  const core::Geometry& g = resolved.geometry;
  if (g.varlen) {
    return {(Count{g.total_q} * std::min(g.s_k, g.total_k) * g.h_q).value, false};
  }
  const Count heads = Count{g.b} * g.h_q;
  if (g.s_q > kCountedRows) return {(Count{g.s_q} * g.s_k * heads).value, false};
  const Visibility visible(resolved.problem.options.mask, g.s_q, g.s_k);
  Count pairs = 0;
  for (std::int64_t i = 0; i < g.s_q; ++i) pairs = pairs + visible.count(i);
  // A shorter sequence never has more pairs.
  return {(pairs * heads).value, !g.key_lengths && !resolved.hides_by_data()};
}

void fill_figures(const core::Resolved& resolved, PlanInfo& info) {
  const core::Geometry& g = resolved.geometry;
  const bool backward = resolved.problem.pass == Pass::backward;
  info.visible_pairs = counted_pairs(resolved);
  const std::int64_t per_pair = backward ? 6 * g.d_qk + 4 * g.d_v : 2 * (g.d_qk + g.d_v);
  info.flops = {(Count{info.visible_pairs.value} * per_pair).value, info.visible_pairs.exact};
  // K and V are read once for their whole group, and every other operand once.
  const Count operands = core::operand_bytes(resolved).value;
  info.slow_memory_bytes = {operands.value, !g.ragged()};
  // Scores and probabilities in float, each written and read once; backward: P read, written and
  // read again, dP and dS written and read.
  const std::int64_t keys = g.varlen ? std::min(g.s_k, g.total_k) : g.s_k;
  const Count scores = Count{g.total_q} * keys * g.h_q;
  info.standard_memory_bytes = {(operands + scores * 4 * (backward ? 7 : 4)).value, !g.ragged()};
}

Result<core::Draft> plan(const core::Resolved& resolved, const PlanOptions& options) {
  if (options.backend != Backend::reference) {
    return Error{ErrorCode::unsupported, "", "runs only when asked for (backend reference)"};
  }
  if (resolved.problem.operands.q.device.type != DeviceType::cpu) {
    return Error{ErrorCode::unsupported, "", "computes on the host; the tensors are elsewhere"};
  }
  const core::Geometry& g = resolved.geometry;
  const std::int64_t items = (Count{g.b} * g.h_k).value;
  const int threads = options.threads > 0 ? options.threads : cpu::default_threads();
  Choices choices;
  choices.workers = static_cast<int>(std::clamp<std::int64_t>(items, 1, threads));
  if (const TensorSpec& x = resolved.problem.operands.d_bias; x.present()) {
    choices.workers = 1;  // all heads and sequences may add to the same elements
    choices.d_bias = contiguous(DType::f64, {x.shape[0], x.shape[1], x.shape[2], x.shape[3]});
  }
  choices.max_len_k = std::min(g.s_k, g.total_k);
  choices.status_doubles = g.paged ? kAlignedDoubles : 0;
  const bool empty = items == 0 || (g.total_q == 0 && g.total_k == 0);
  if (!empty) {
    const std::size_t doubles = scratch_doubles(g, resolved.problem.pass, choices.max_len_k);
    choices.doubles_per_worker =
        (doubles + kAlignedDoubles - 1) / kAlignedDoubles * kAlignedDoubles;
  }
  core::Draft draft;
  draft.info.kernel = "reference";
  draft.info.batch_invariant = options.batch_invariant;  // each sequence is worked on alone
  draft.info.rows = 1;
  draft.info.keys = static_cast<int>(std::min<std::int64_t>(choices.max_len_k, INT32_MAX));
  draft.info.work_items = items;
  draft.info.threads = choices.workers;
  const Count scratch = Count{static_cast<std::int64_t>(choices.doubles_per_worker)} * 8;
  draft.info.scratch_bytes_per_thread = static_cast<std::size_t>(scratch.value);
  draft.info.workspace_bytes =
      static_cast<std::size_t>((scratch * choices.workers + core::elements(choices.d_bias) * 8 +
                                static_cast<std::int64_t>(choices.status_doubles) * 8)
                                   .value);
  fill_figures(resolved, draft.info);
  draft.choices = std::make_shared<Choices>(choices);
  return draft;
}

/// Reports the share of query rows done, at most about a hundred times, one call at a time.
class Progress {
 public:
  Progress(const RunOptions& options, std::int64_t rows)
      : options_(options), rows_(rows), step_(std::max<std::int64_t>(rows / 100, 1)) {}

  RowsDone hook() {
    if (options_.progress == nullptr) return {};
    return {[](void* self) { static_cast<Progress*>(self)->row_done(); }, this};
  }

 private:
  void row_done() {
    const std::int64_t done = ++done_;
    if (done % step_ != 0 && done != rows_) return;
    const std::lock_guard lock(mutex_);
    const double share = static_cast<double>(done) / static_cast<double>(rows_);
    if (share <= reported_) return;
    reported_ = share;
    options_.progress(share, options_.progress_context);
  }

  const RunOptions& options_;
  std::int64_t rows_;
  std::int64_t step_;
  std::atomic<std::int64_t> done_ = 0;
  std::mutex mutex_;
  double reported_ = 0.0;
};

/// Query rows of all heads that a run visits.
std::int64_t visited_rows(const core::Geometry& g, const ConstTensor& cu_q) {
  const std::int64_t rows =
      g.varlen ? static_cast<const std::int32_t*>(cu_q.data)[g.b] : g.b * g.s_q;
  return rows * g.h_q;
}

/// Each item (sequence, key/value head) is one worker's alone, so threads never change a bit.
template <class Call, class Body>
Status run(const Call& call, const Body& body) {
  const core::Geometry& g = call.resolved.geometry;
  const auto& choices = *static_cast<const Choices*>(call.draft.choices.get());
  auto* const workspace =
      static_cast<double*>(call.options.workspace.data) + choices.status_doubles;
  std::atomic<std::uint32_t> faults = 0;
  double* const d_bias =
      workspace + static_cast<std::size_t>(choices.workers) * choices.doubles_per_worker;
  std::fill_n(d_bias, core::elements(choices.d_bias).value, 0.0);
  if (choices.doubles_per_worker == 0) return {};  // no row to write
  const ConstTensor& cu_q = call.tensors.cu_seqlens_q;
  Progress progress(call.options, visited_rows(g, cu_q));
  const RowsDone done = progress.hook();
  const std::int64_t items = g.b * g.h_k;
  std::atomic<std::int64_t> next = 0;
  cpu::parallel_for(choices.workers, [&](int worker) {
    double* const memory =
        workspace + static_cast<std::size_t>(worker) * choices.doubles_per_worker;
    Scratch scratch = carve(memory, g, call.resolved.problem.pass, choices.max_len_k);
    scratch.d_bias = d_bias;
    scratch.d_bias_spec = choices.d_bias;
    scratch.faults = &faults;
    for (std::int64_t item = next++; item < items; item = next++) {
      const auto sequence = core::sequence_at(g, core::Lengths::of(call.tensors), item / g.h_k);
      body(sequence, item % g.h_k, scratch, done);
    }
  });
  if (g.paged) *static_cast<std::uint32_t*>(call.options.workspace.data) = faults;
  return {};
}

Status run_forward(const core::ForwardCall& call) {
  const core::Geometry& g = call.resolved.geometry;
  if (g.paged) *static_cast<std::uint32_t*>(call.options.workspace.data) = 0;
  if (g.total_q == 0 || g.h_q == 0) return {};  // no output; keys alone may be beyond counting
  return run(call, [&](const core::Sequence& sequence, std::int64_t head_k, const Scratch& scratch,
                       const RowsDone& done) {
    forward(call.resolved, call.tensors, sequence, head_k, scratch, done);
  });
}

/// The sums of the bias gradient to the caller's tensor.
void store_bias_gradient(const core::BackwardCall& call) {
  const Tensor& x = call.tensors.d_bias;
  const auto& choices = *static_cast<const Choices*>(call.draft.choices.get());
  const double* from = static_cast<const double*>(call.options.workspace.data) +
                       static_cast<std::size_t>(choices.workers) * choices.doubles_per_worker;
  const std::int64_t count = core::elements(choices.d_bias).value;
  for (std::int64_t flat = 0; flat < count; ++flat) {
    std::int64_t rest = flat;
    std::int64_t at = 0;
    for (std::size_t axis = kMaxRank; axis-- > 0; rest /= x.shape[axis]) {
      at += rest % x.shape[axis] * x.stride[axis];
    }
    core::store_element(x.data, x.dtype, at, from[flat]);
  }
}

Status run_backward(const core::BackwardCall& call) {
  if (call.tensors.d_sinks.present()) sink_gradients(call.resolved, call.tensors);
  const Status status = run(call, [&](const core::Sequence& sequence, std::int64_t head_k,
                                      const Scratch& scratch, const RowsDone& done) {
    backward(call.resolved, call.tensors, sequence, head_k, scratch, done);
  });
  if (status.ok()) store_bias_gradient(call);
  return status;
}

}  // namespace

const core::Implementation kImplementation = {
    "reference",       Backend::reference, &plan,
    &run_forward,      &run_backward,      {core::host_allocate, core::host_release},
    &core::host_status};

}  // namespace abacist::reference
