#include "cpu/cpu.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/text.hpp"
#include "cpu/driver.hpp"

namespace abacist::cpu {
namespace {

Error unsupported(std::string argument, std::string message) {
  return {ErrorCode::unsupported, std::move(argument), std::move(message)};
}

Result<core::Draft> plan(const core::Resolved& resolved, const PlanOptions& options) {
  if (auto reason = decline(resolved)) return *reason;
  return resolved.problem.pass == Pass::forward ? plan_forward(resolved, options)
                                                : plan_backward(resolved, options);
}

bool serves(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
}

}  // namespace

const core::Implementation kImplementation = {"cpu",
                                              Backend::cpu,
                                              plan,
                                              run_forward,
                                              run_backward,
                                              {core::host_allocate, core::host_release},
                                              core::host_status};

ScoreRule ScoreRule::make(double scale, double softcap, bool added) {
  constexpr double kLog2E = 1.4426950408889634;
  ScoreRule rule;
  rule.softcap = static_cast<float>(softcap);
  rule.plain = softcap == 0.0 && !added && std::abs(scale) * kLog2E <= 1.0;
  if (rule.plain) {
    rule.prescale = static_cast<float>(scale * kLog2E);
  } else if (std::abs(scale) <= 1.0) {
    rule.prescale = static_cast<float>(scale);
  } else {
    rule.postscale = static_cast<float>(scale);
  }
  return rule;
}

PairOperand pair_view(const ConstTensor& tensor, std::int64_t sequence, std::int64_t head) {
  if (!tensor.present()) return {};
  const core::PairStrides s(tensor);
  const std::int64_t offset = s.at(sequence, head, 0, 0) * size_of(tensor.dtype);
  return {advanced(static_cast<const std::byte*>(tensor.data), offset),
          tensor.dtype,
          s.row,
          s.head,
          s.key,
          tensor.shape[3]};
}

ScoreRule score_rule(const core::Resolved& resolved, const ScoreOperands& x, std::int64_t sequence,
                     std::int64_t head) {
  const ConstTensor& slopes = x.slopes;
  ScoreRule rule = ScoreRule::make(resolved.scale, resolved.problem.options.score.softcap,
                                   slopes.present() || x.bias.present());
  rule.bias = pair_view(x.bias, sequence, head);
  rule.visible = pair_view(x.visible, sequence, head);
  if (!slopes.present()) return rule;
  const std::int64_t batch = slopes.rank == 2 ? slopes.stride[0] : 0;
  rule.slopes_stride = slopes.stride[static_cast<std::size_t>(slopes.rank - 1)];
  rule.slopes = advanced(static_cast<const float*>(slopes.data),
                         sequence * batch + head * rule.slopes_stride);
  return rule;
}

std::optional<Error> decline(const core::Resolved& resolved) {
  const Operands& x = resolved.problem.operands;
  if (x.q.device.type != DeviceType::cpu) {
    return unsupported("", "the tensors are on " + core::to_text(x.q.device));
  }
  if (!serves(x.q.dtype) || x.k.dtype != x.q.dtype || x.v.dtype != x.q.dtype) {
    return unsupported("", std::string("q, k, v are ") + to_string(x.q.dtype) + ", " +
                               to_string(x.k.dtype) + ", " + to_string(x.v.dtype) +
                               "; must be all f32, all bf16 or all f16");
  }
  const std::pair<const char*, const TensorSpec*> same_or_f32[] = {
      {"bias", &x.bias}, {"o", &x.o}, {"d_o", &x.d_o}, {"dq", &x.dq}, {"dk", &x.dk}, {"dv", &x.dv}};
  for (const auto& [name, spec] : same_or_f32) {
    if (spec->present() && spec->dtype != x.q.dtype && spec->dtype != DType::f32) {
      return unsupported("", std::string(name) + " is " + to_string(spec->dtype) + "; must be " +
                                 to_string(x.q.dtype) + " like q, or f32");
    }
  }
  const std::pair<const char*, const TensorSpec*> only_f32[] = {
      {"lse", &x.lse},     {"d_lse", &x.d_lse},     {"alibi_slopes", &x.alibi_slopes},
      {"sinks", &x.sinks}, {"d_sinks", &x.d_sinks}, {"d_bias", &x.d_bias}};
  for (const auto& [name, spec] : only_f32) {
    if (spec->present() && spec->dtype != DType::f32) {
      return unsupported("", std::string(name) + " is " + to_string(spec->dtype) + "; must be f32");
    }
  }
  const std::pair<const char*, double> factors[] = {
      {"scale", resolved.scale}, {"softcap", resolved.problem.options.score.softcap}};
  for (const auto& [name, value] : factors) {
    // Below float's normal numbers it would lose digits, or all of them.
    if (value != 0.0 && std::abs(value) < double{std::numeric_limits<float>::min()}) {
      return unsupported("", std::string(name) + " is " + core::to_text(value) +
                                 "; must be 0 or at least 2^-126 in size");
    }
  }
  const core::Geometry& g = resolved.geometry;
  if (g.d_qk > kMaxHeadDim || g.d_v > kMaxHeadDim) {
    return unsupported("", "head dimensions are " + std::to_string(g.d_qk) + " and " +
                               std::to_string(g.d_v) + "; at most 512 each");
  }
  return std::nullopt;
}

core::Count pair_bytes(const core::Resolved& resolved, std::int64_t first, std::int64_t last,
                       std::int64_t rows) {
  core::Count bytes = 0;
  const Operands& x = resolved.problem.operands;
  for (const TensorSpec* spec : {&x.bias, &x.visible}) {
    if (!spec->present()) continue;
    const bool by_row = spec->shape[2] > 1 || spec->shape[1] > 1;
    const Figure elements = tile_visits(
        resolved, first, last, rows,
        [by_row](core::Interval keys, std::int64_t n) { return keys.size() * (by_row ? n : 1); });
    bytes = bytes + core::Count{elements.value} * size_of(spec->dtype);
  }
  return bytes;
}

int plan_threads(const PlanOptions& options, std::int64_t items) {
  const int threads = options.threads > 0 ? options.threads : default_threads();
  return static_cast<int>(std::clamp<std::int64_t>(items, 1, threads));
}

}  // namespace abacist::cpu
