#include "runner.hpp"

#include <fmt/format.h>

#include "text.hpp"

namespace abacist::cli {

Plan plan_or_throw(const Problem& problem, const PlanOptions& options) {
  auto planned = plan(problem, options);
  if (planned) return std::move(planned).value();
  std::string hint;
  if (planned.error().code == ErrorCode::unsupported && options.backend != Backend::reference &&
      problem.operands.q.dtype == DType::f64) {
    hint = "; f64 is for --backend reference, --convert f32 is for speed";
  }
  throw UserError(to_string(planned.error()) + hint);
}

std::string kernel_text(const PlanInfo& info) {
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
  for (const std::int64_t extent : {q[0], q[2], q[1], k[1]}) bytes *= static_cast<double>(extent);
  return bytes;
}

}  // namespace abacist::cli
