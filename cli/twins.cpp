#include "core/operands.hpp"
#include "gpu.hpp"

namespace abacist::cli {
namespace {

/// Bytes from the lowest to the highest element, and where element 0, ..., 0 lies in them.
struct Range {
  std::int64_t bytes = 0;
  std::int64_t origin = 0;
};

Range range_of(const TensorSpec& spec) {
  std::int64_t lowest = 0;
  std::int64_t highest = 0;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(spec.rank); ++axis) {
    if (spec.shape[axis] == 0) return {};
    const std::int64_t reach = (spec.shape[axis] - 1) * spec.stride[axis];
    (reach < 0 ? lowest : highest) += reach;
  }
  const std::int64_t size = size_of(spec.dtype);
  return {(highest - lowest + 1) * size, -lowest * size};
}

}  // namespace

Twins::Twins(const ForwardTensors& host, Device device) : device_(device) {
  tensors_.q = upload(host.q);
  tensors_.k = upload(host.k);
  tensors_.v = upload(host.v);
  tensors_.o = reserve(host.o);
  tensors_.lse = reserve(host.lse);
  tensors_.alibi_slopes = upload(host.alibi_slopes);
  tensors_.cu_seqlens_q = upload(host.cu_seqlens_q);
  tensors_.cu_seqlens_k = upload(host.cu_seqlens_k);
  tensors_.sinks = upload(host.sinks);
  tensors_.key_lengths = upload(host.key_lengths);
}

ConstTensor Twins::upload(const ConstTensor& host) {
  if (!host.present()) return {};
  ConstTensor twin = host;
  twin.device = device_;
  const Range range = range_of(host);
  memory_.push_back(allocate_on(device_, range.bytes));
  auto* const memory = static_cast<std::byte*>(memory_.back().get());
  const auto* const first = static_cast<const std::byte*>(host.data) - range.origin;
  if (range.bytes > 0) copy_to_device(device_, memory, first, range.bytes);
  twin.data = memory + range.origin;
  bytes_ += range.bytes;
  return twin;
}

Tensor Twins::reserve(const Tensor& host) {
  if (!host.present()) return {};
  Tensor twin = host;
  twin.device = device_;
  const Range range = range_of(host);
  memory_.push_back(allocate_on(device_, range.bytes));
  auto* const memory = static_cast<std::byte*>(memory_.back().get());
  outputs_.push_back({static_cast<std::byte*>(host.data) - range.origin, memory, range.bytes});
  twin.data = memory + range.origin;
  bytes_ += range.bytes;
  return twin;
}

void Twins::download() const {
  for (const Output& output : outputs_) {
    if (output.bytes > 0) copy_to_host(device_, output.host, output.device, output.bytes);
  }
}

Problem on_device(Problem problem, Device device) {
  for (const core::OperandRule& rule : core::kOperands) {
    TensorSpec& spec = problem.operands.*rule.spec;
    if (spec.present()) spec.device = device;
  }
  return problem;
}

}  // namespace abacist::cli
