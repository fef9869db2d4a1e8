#include "runner.hpp"

#include <fmt/format.h>

#include <chrono>

#include "text.hpp"

namespace abacist::cli {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

Plan plan_or_throw(const Problem& problem, const PlanOptions& options) {
  auto planned = plan(problem, options);
  if (planned) return std::move(planned).value();
  std::string hint;
  if (planned.error().code == ErrorCode::unsupported && options.backend != Backend::reference &&
      problem.operands.q.dtype == DType::f64) {
    hint = "; f64 is for --backend reference, f32 is for speed (--convert f32 for files)";
  }
  const Operands& x = problem.operands;
  if (x.k.dtype != x.q.dtype || x.v.dtype != x.q.dtype) {
    hint = "; --convert f32 makes them one type";
  }
  const bool on_gpu = problem.operands.q.device.type == DeviceType::cuda;
  if (on_gpu && problem.pass == Pass::backward) hint = "; --pass forward needs none";
  throw UserError(to_string(planned.error()) + hint);
}

Runner::Runner(const Problem& problem, const Place& place)
    : place_(place), plan_(plan_or_throw(on_device(problem, place.device), place.plan)) {
  const auto bytes = static_cast<std::int64_t>(plan_.info().workspace_bytes);
  workspace_ = place.on_gpu() ? allocate_on(place.device, bytes) : allocate(bytes);
}

template <class Tensors>
double Runner::run_on_host(const Tensors& tensors, Progress* progress) const {
  RunOptions options;
  options.workspace = {workspace_.get(), plan_.info().workspace_bytes};
  if (progress != nullptr) {
    options.progress = &Progress::callback;
    options.progress_context = progress;
  }
  const auto start = Clock::now();
  const Status status = plan_.run(tensors, options);
  const double seconds = seconds_since(start);
  if (!status) throw UserError(status.error());
  return seconds;
}

double Runner::run_on_gpu(const ForwardTensors& tensors, std::int64_t runs) const {
  const RunOptions options{.workspace = {workspace_.get(), plan_.info().workspace_bytes}};
  return seconds_on(place_.device, [&] {
    for (std::int64_t i = 0; i < runs; ++i) {
      if (const Status status = plan_.run(tensors, options); !status) {
        throw UserError(status.error());
      }
    }
  });
}

void Runner::check_data() const {
  const Status status =
      plan_.device_status({.workspace = {workspace_.get(), plan_.info().workspace_bytes}});
  if (!status) throw UserError(status.error());
}

RunTime Runner::run(const ForwardTensors& tensors, Progress* progress) const {
  if (!place_.on_gpu()) {
    const RunTime time{run_on_host(tensors, progress), 0.0};
    check_data();
    return time;
  }
  const auto start = Clock::now();
  const Twins twins(tensors, place_.device);
  RunTime time{.copy_seconds = seconds_since(start)};
  time.seconds = run_on_gpu(twins.tensors(), 1);
  check_data();
  const auto back = Clock::now();
  twins.download();
  time.copy_seconds += seconds_since(back);
  return time;
}

RunTime Runner::run(const BackwardTensors& tensors, Progress* progress) const {
  return {run_on_host(tensors, progress), 0.0};  // the planner refuses it on a GPU
}

std::string kernel_text(const PlanInfo& info) {
  if (info.grid > 0) {
    return fmt::format("{}, tiles of {} x {}, {} blocks of {} threads", info.kernel, info.rows,
                       info.keys, info.grid, info.threads);
  }
  return fmt::format("{}, tiles of {} x {}, {} thread{}", info.kernel, info.rows, info.keys,
                     info.threads, info.threads == 1 ? "" : "s");
}

std::string operand_text(const TensorSpec& spec) {
  return to_string(spec.dtype) + shape_text(spec);
}

double score_matrix_bytes(const Problem& problem) {
  const Extents& q = problem.operands.q.shape;
  const Extents& k = problem.operands.k.shape;
  double bytes = sizeof(float);
  const TensorSpec& table = problem.operands.block_table;
  const std::int64_t keys = table.present() ? table.shape[1] * k[1] : k[1];
  for (const std::int64_t extent : {q[0], q[2], q[1], keys}) bytes *= static_cast<double>(extent);
  return bytes;
}

}  // namespace abacist::cli
