#include "cuda/backend/decline.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "core/figures.hpp"
#include "core/operands.hpp"
#include "core/text.hpp"

namespace abacist::cuda {
namespace {

constexpr std::int64_t kMaxHeadDim = 256;
constexpr std::int64_t kTmaElements = 8;                       // 16 bytes
constexpr std::int64_t kTmaMaxStride = std::int64_t{1} << 38;  // elements: 2^39 bytes
constexpr double kLog2E = 1.4426950408889634;

Error unsupported(std::string message) { return {ErrorCode::unsupported, "", std::move(message)}; }

std::string is_stride(const char* name, const TensorSpec& spec, std::size_t axis) {
  return std::string(name) + ": strides" + core::to_text(spec.stride, spec.rank) + ", axis " +
         std::to_string(axis) + " has " + std::to_string(spec.stride[axis]) + ", must be ";
}

/// Operands of the forward pass that the kernel knows; any other one is refused by its name.
constexpr TensorSpec Operands::*kKnown[] = {&Operands::q,
                                            &Operands::k,
                                            &Operands::v,
                                            &Operands::o,
                                            &Operands::lse,
                                            &Operands::alibi_slopes,
                                            &Operands::sinks,
                                            &Operands::cu_seqlens_q,
                                            &Operands::cu_seqlens_k,
                                            &Operands::key_lengths};

/// What the operands are that no GPU kernel takes yet, for readers who named them otherwise.
std::string described(const core::OperandRule& rule) {
  if (rule.spec == &Operands::bias) return "an additive bias";
  if (rule.spec == &Operands::visible) return "a boolean mask (visible)";
  if (rule.spec == &Operands::block_table) return "paged K and V (block_table)";
  return rule.name;
}

std::optional<Error> decline_operands(const Operands& x) {
  for (const core::OperandRule& rule : core::kOperands) {
    if (!(x.*rule.spec).present() || rule.forward == core::Use::unused) continue;
    if (std::find(std::begin(kKnown), std::end(kKnown), rule.spec) != std::end(kKnown)) continue;
    return unsupported(described(rule) + " cannot be used on a GPU yet");
  }
  return std::nullopt;
}

std::optional<Error> decline_types(const Operands& x) {
  const bool half = x.q.dtype == DType::bf16 || x.q.dtype == DType::f16;
  if (!half || x.k.dtype != x.q.dtype || x.v.dtype != x.q.dtype) {
    return unsupported(std::string("q, k, v are ") + to_string(x.q.dtype) + ", " +
                       to_string(x.k.dtype) + ", " + to_string(x.v.dtype) +
                       "; must be all bf16 or all f16 on a GPU");
  }
  if (x.o.dtype != x.q.dtype) {
    return unsupported(std::string("o is ") + to_string(x.o.dtype) + "; must be " +
                       to_string(x.q.dtype) + " like q on a GPU");
  }
  const std::pair<const char*, const TensorSpec*> only_f32[] = {
      {"lse", &x.lse}, {"alibi_slopes", &x.alibi_slopes}, {"sinks", &x.sinks}};
  for (const auto& [name, spec] : only_f32) {
    if (spec->present() && spec->dtype != DType::f32) {
      return unsupported(std::string(name) + " is " + to_string(spec->dtype) + "; must be f32");
    }
  }
  return std::nullopt;
}

std::optional<Error> decline_dims(const core::Geometry& g) {
  for (const auto& [name, d] : {std::pair{"d_qk", g.d_qk}, {"d_v", g.d_v}}) {
    if (d % kTmaElements != 0 || d > kMaxHeadDim) {
      return unsupported(std::string(name) + " is " + std::to_string(d) +
                         "; must be a multiple of 8 up to 256 on a GPU");
    }
  }
  return std::nullopt;
}

/// What the tensor memory accelerator can walk: rows of 16-byte pieces, forwards.
std::optional<Error> decline_strides(const char* name, const TensorSpec& spec) {
  if (!core::has_elements(spec)) return std::nullopt;
  const auto last = static_cast<std::size_t>(spec.rank) - 1;
  if (spec.stride[last] != 1) {
    return unsupported(is_stride(name, spec, last) + "1 (d must be contiguous on a GPU)");
  }
  for (std::size_t axis = 0; axis < last; ++axis) {
    const std::int64_t stride = spec.stride[axis];
    if (spec.shape[axis] <= 1) continue;
    if (stride < 0 || stride % kTmaElements != 0 || stride >= kTmaMaxStride) {
      return unsupported(is_stride(name, spec, axis) +
                         "a multiple of 8 elements from 0 to 2^38 (TMA moves 16-byte pieces)");
    }
  }
  return std::nullopt;
}

/// LSE and slopes are read and written by plain instructions that know one layout.
std::optional<Error> decline_layout(const char* name, const TensorSpec& spec) {
  if (!core::has_elements(spec)) return std::nullopt;
  std::int64_t expected = 1;
  for (auto axis = static_cast<std::size_t>(spec.rank); axis-- > 0;) {
    if (spec.shape[axis] > 1 && spec.stride[axis] != expected) {
      return unsupported(is_stride(name, spec, axis) + std::to_string(expected) +
                         " (contiguous on a GPU)");
    }
    expected *= spec.shape[axis];
  }
  return std::nullopt;
}

std::optional<Error> decline_score(const core::Resolved& resolved) {
  const double scale = resolved.scale;
  const double softcap = resolved.problem.options.score.softcap;
  constexpr double kSmallest = std::numeric_limits<float>::min();
  constexpr double kLargest = std::numeric_limits<float>::max();
  const std::pair<const char*, double> factors[] = {{"scale", scale}, {"softcap", softcap}};
  for (const auto& [name, value] : factors) {
    if (value == 0.0) continue;
    if (std::abs(value) < kSmallest || std::abs(value) * kLog2E > kLargest) {
      return unsupported(std::string(name) + " is " + core::to_text(value) +
                         "; must be 0 or from 2^-126 to 2^127 in size on a GPU");
    }
  }
  if (softcap != 0.0 && scale != 0.0) {
    // The kernel multiplies q·k with the quotient: infinite, it would make NaN of 0.
    const double quotient = std::abs(scale) / softcap;
    if (!(quotient >= 0x1p-127 && quotient <= 0x1p126)) {
      return unsupported("scale / softcap is " + core::to_text(scale / softcap) +
                         "; must be 0 or from 2^-127 to 2^126 in size on a GPU");
    }
  }
  if (resolved.problem.options.dropout.p != 0.0) return unsupported("no dropout on a GPU yet");
  if (resolved.problem.operands.alibi_slopes.rank == 2) {
    return unsupported("alibi_slopes are [b, h_q]; must be [h_q] on a GPU");
  }
  return std::nullopt;
}

}  // namespace

std::optional<Error> decline(const core::Resolved& resolved) {
  const Operands& x = resolved.problem.operands;
  if (x.q.device.type != DeviceType::cuda) return unsupported("the tensors are on the host");
  if (resolved.problem.pass == Pass::backward) {
    return unsupported("there is no backward pass for GPUs yet");
  }
  if (auto reason = decline_operands(x)) return reason;
  if (auto reason = decline_types(x)) return reason;
  if (auto reason = decline_dims(resolved.geometry)) return reason;
  for (const auto& [name, spec] : {std::pair{"q", &x.q}, {"k", &x.k}, {"v", &x.v}, {"o", &x.o}}) {
    if (auto reason = decline_strides(name, *spec)) return reason;
  }
  for (const auto& [name, spec] :
       {std::pair{"lse", &x.lse}, {"alibi_slopes", &x.alibi_slopes}, {"sinks", &x.sinks}}) {
    if (auto reason = decline_layout(name, *spec)) return reason;
  }
  return decline_score(resolved);
}

std::optional<Error> decline(const DeviceFacts& device) {
  if (device.capability == 90) return std::nullopt;
  return unsupported("cuda:" + std::to_string(device.index) + " (" + device.name +
                     ") has compute capability " + std::to_string(device.capability / 10) + "." +
                     std::to_string(device.capability % 10) +
                     "; the kernels are for 9.0 (H100, H200)");
}

}  // namespace abacist::cuda
