#include "api/tensors.hpp"

#include <span>
#include <string>
#include <utility>

#include "api/overlap.hpp"
#include "api/validate.hpp"
#include "core/figures.hpp"
#include "core/text.hpp"

namespace abacist::api {
namespace {

/// Host cu_seqlens: 0 first, ascending, no length over `max_length`, the last within `total`.
Status check_cu_seqlens(const char* name, const ConstTensor& tensor, std::int64_t total,
                        std::int64_t max_length) {
  const auto* cu = static_cast<const std::int32_t*>(tensor.data);
  const std::int64_t b = tensor.shape[0] - 1;
  const auto entry = [&](std::int64_t i) {
    return "[" + std::to_string(i) + "] is " + std::to_string(cu[i]);
  };
  if (cu[0] != 0) return invalid(name, entry(0) + ", must be 0");
  for (std::int64_t i = 1; i <= b; ++i) {
    if (cu[i] < cu[i - 1]) return invalid(name, entry(i) + ", less than " + entry(i - 1));
    if (std::int64_t{cu[i]} - cu[i - 1] > max_length) {
      return invalid(name, entry(i) + " after " + entry(i - 1) +
                               ": a length over max_lengths = " + std::to_string(max_length));
    }
  }
  if (cu[b] > total) {
    return invalid(name, entry(b) + ", past the " + std::to_string(total) + " rows of its tensor");
  }
  return {};
}

/// Host key_lengths: each within the rows that a sequence has.
Status check_key_lengths(const ConstTensor& tensor, std::int64_t most) {
  const auto* lengths = static_cast<const std::int32_t*>(tensor.data);
  for (std::int64_t n = 0; n < tensor.shape[0]; ++n) {
    if (lengths[n] >= 0 && lengths[n] <= most) continue;
    return invalid("key_lengths", "[" + std::to_string(n) + "] is " + std::to_string(lengths[n]) +
                                      ", must be in [0, s_k = " + std::to_string(most) + "]");
  }
  return {};
}

/// The lengths that are in host memory.
template <class Tensors>
Status check_lengths(const core::Resolved& resolved, const Tensors& t) {
  const core::Geometry& g = resolved.geometry;
  if (t.q.device.type != DeviceType::cpu) return {};
  if (g.key_lengths) {
    if (Status s = check_key_lengths(t.key_lengths, g.s_k); !s) return s;
  }
  if (!g.varlen) return {};
  const MaxLengths& most = resolved.problem.options.max_lengths;
  if (Status s = check_cu_seqlens("cu_seqlens_q", t.cu_seqlens_q, g.total_q, most.s_q); !s)
    return s;
  if (g.paged) return {};
  return check_cu_seqlens("cu_seqlens_k", t.cu_seqlens_k, g.total_k, most.s_k);
}

template <class Tensors>
Status check_all(const core::Resolved& resolved, const Tensors& tensors,
                 std::span<const NamedTensor> all) {
  const Problem now = make_problem(tensors);
  const Problem& planned = resolved.problem;
  if (now.pass != planned.pass) return invalid("tensors", "are of the other pass than the plan");
  if (!(now.operands == planned.operands)) {
    return invalid("tensors", "have other dtypes, shapes or strides than the plan was made for");
  }
  if (Status s = check_operands(all); !s) return s;
  return check_lengths(resolved, tensors);
}

/// A workspace as an operand, in elements of two bytes; absent if empty.
ConstTensor view_of(const Workspace& workspace) {
  if (workspace.bytes == 0) return {};
  return {workspace.data, contiguous(DType::f16, {static_cast<std::int64_t>(workspace.bytes / 2)})};
}

}  // namespace

Status check_operands(std::span<const NamedTensor> all) {
  for (const NamedTensor& x : all) {
    if (!core::has_elements(x.tensor)) continue;
    if (x.tensor.data == nullptr) return invalid(x.name, "data is null");
    const auto address = reinterpret_cast<std::uintptr_t>(x.tensor.data);
    const auto size = static_cast<std::uintptr_t>(size_of(x.tensor.dtype));
    if (address % size != 0) {
      return invalid(x.name,
                     "data is not aligned to its " + std::to_string(size) + "-byte elements");
    }
  }
  for (const NamedTensor& x : all) {
    if (!x.output) continue;
    for (const NamedTensor& y : all) {
      if (&x == &y || (y.output && &y < &x) || !may_overlap(x.tensor, y.tensor)) continue;
      return invalid(
          x.name, "overlaps " + y.name + "; outputs must not share memory with any other operand");
    }
  }
  return {};
}

Status check_tensors(const core::Resolved& resolved, const ForwardTensors& t,
                     const Workspace& workspace) {
  const NamedTensor all[] = {{"q", t.q},
                             {"k", t.k},
                             {"v", t.v},
                             {"o", t.o, true},
                             {"lse", t.lse, true},
                             {"block_table", t.block_table},
                             {"alibi_slopes", t.alibi_slopes},
                             {"cu_seqlens_q", t.cu_seqlens_q},
                             {"cu_seqlens_k", t.cu_seqlens_k},
                             {"bias", t.bias},
                             {"visible", t.visible},
                             {"sinks", t.sinks},
                             {"key_lengths", t.key_lengths},
                             {"workspace", view_of(workspace), true}};
  return check_all(resolved, t, all);
}

Status check_tensors(const core::Resolved& resolved, const BackwardTensors& t,
                     const Workspace& workspace) {
  const NamedTensor all[] = {{"q", t.q},
                             {"k", t.k},
                             {"v", t.v},
                             {"o", t.o},
                             {"lse", t.lse},
                             {"d_o", t.d_o},
                             {"d_lse", t.d_lse},
                             {"dq", t.dq, true},
                             {"dk", t.dk, true},
                             {"dv", t.dv, true},
                             {"d_bias", t.d_bias, true},
                             {"d_sinks", t.d_sinks, true},
                             {"alibi_slopes", t.alibi_slopes},
                             {"cu_seqlens_q", t.cu_seqlens_q},
                             {"cu_seqlens_k", t.cu_seqlens_k},
                             {"bias", t.bias},
                             {"visible", t.visible},
                             {"sinks", t.sinks},
                             {"key_lengths", t.key_lengths},
                             {"workspace", view_of(workspace), true}};
  return check_all(resolved, t, all);
}

Status check_workspace(const PlanInfo& info, const Workspace& workspace) {
  if (info.workspace_bytes == 0) return {};
  if (workspace.data == nullptr || workspace.bytes < info.workspace_bytes) {
    return invalid("workspace", "has " + std::to_string(workspace.data ? workspace.bytes : 0) +
                                    " bytes, the plan needs " +
                                    std::to_string(info.workspace_bytes));
  }
  if (reinterpret_cast<std::uintptr_t>(workspace.data) % kWorkspaceAlignment != 0) {
    return invalid("workspace", "is not aligned to 256 bytes");
  }
  return {};
}

}  // namespace abacist::api
