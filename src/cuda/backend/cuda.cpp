#include "cuda/backend/cuda.hpp"

#include <cuda_runtime_api.h>

#include <mutex>
#include <set>
#include <string>
#include <tuple>

#include "core/figures.hpp"
#include "core/text.hpp"
#include "cuda/backend/device.hpp"
#include "cuda/backend/lengths.hpp"
#include "cuda/backend/plan.hpp"

namespace abacist::cuda {
namespace {

Error invalid(std::string argument, std::string message) {
  return {ErrorCode::invalid_argument, std::move(argument), std::move(message)};
}

const Choices& choices_of(const core::Draft& draft) {
  return *static_cast<const Choices*>(draft.choices.get());
}

/// Puts what the plan launches onto the device, once for each: the runtime would do so at the first
/// launch, and might wait there for the stream that is to be overlapped.
Status load_kernels(const Choices& choices) {
  static std::mutex mutex;
  static std::set<std::pair<int, const sm90::ForwardInstance*>> loaded;
  const std::lock_guard lock(mutex);
  const auto key = std::pair{choices.device.index, choices.launch.instance};
  if (loaded.contains(key)) return {};
  const CurrentDevice current(choices.device.index);
  if (!current.status()) return current.status();
  cudaError_t error = sm90::load_forward(choices.launch);
  if (error == cudaSuccess) error = static_cast<cudaError_t>(load_length_check());
  if (error != cudaSuccess) return device_error(error, "loading the kernel");
  loaded.insert(key);
  return {};
}

Result<core::Draft> plan(const core::Resolved& resolved, const PlanOptions& options) {
  const Device device = resolved.problem.operands.q.device;
  if (device.type != DeviceType::cuda) {
    return Error{ErrorCode::unsupported, "", "the tensors are on the host"};
  }
  if (options.batch_invariant) {
    return Error{ErrorCode::unsupported, "", "no batch-invariant plans on a GPU yet"};
  }
  const auto facts = device_facts(device.index);
  if (!facts) return facts.error();
  auto draft = plan_on(resolved, facts.value());
  if (!draft) return draft;
  if (Status s = load_kernels(choices_of(draft.value())); !s) return s.error();
  return draft;
}

/// The address is one that the device can use, and aligned as the kernel needs it. Asks the driver
/// about the address; the memory itself is not touched.
Status check_address(const char* name, const ConstTensor& tensor, std::uintptr_t alignment,
                     const DeviceFacts& device, bool capturing) {
  if (!core::has_elements(tensor)) return {};
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % alignment != 0) {
    return invalid(name, "data is not aligned to " + std::to_string(alignment) +
                             " bytes, as a GPU needs it (TMA moves 16-byte pieces)");
  }
  cudaPointerAttributes attributes;
  const cudaError_t error = cudaPointerGetAttributes(&attributes, tensor.data);
  if (error != cudaSuccess) return device_error(error, std::string("asking where ") + name + " is");
  const bool elsewhere =
      attributes.type == cudaMemoryTypeDevice && attributes.device != device.index;
  if (elsewhere) {
    return invalid(name, "data is in the memory of cuda:" + std::to_string(attributes.device) +
                             ", must be in that of cuda:" + std::to_string(device.index));
  }
  // Memory that a graph under capture allocates is not there yet, so the driver does not know it.
  if (attributes.type == cudaMemoryTypeUnregistered && !device.reads_host && !capturing) {
    return invalid(
        name, "data is in host memory, must be in that of cuda:" + std::to_string(device.index));
  }
  return {};
}

Status check_addresses(const ForwardTensors& t, const Workspace& workspace,
                       const core::Draft& draft, bool capturing) {
  const DeviceFacts& device = choices_of(draft).device;
  ConstTensor memory;
  if (draft.info.workspace_bytes > 0) {
    memory = {workspace.data,
              contiguous(DType::f32, {static_cast<std::int64_t>(draft.info.workspace_bytes / 4)})};
  }
  const struct {
    const char* name;
    ConstTensor tensor;
    std::uintptr_t alignment;
  } all[] = {{"q", t.q, 16},
             {"k", t.k, 16},
             {"v", t.v, 16},
             {"o", t.o, 16},
             {"lse", t.lse, 4},
             {"alibi_slopes", t.alibi_slopes, 4},
             {"cu_seqlens_q", t.cu_seqlens_q, 4},
             {"cu_seqlens_k", t.cu_seqlens_k, 4},
             {"sinks", t.sinks, 4},
             {"key_lengths", t.key_lengths, 4},
             {"workspace", memory, kWorkspaceAlignment}};
  for (const auto& [name, tensor, alignment] : all) {
    if (Status s = check_address(name, tensor, alignment, device, capturing); !s) return s;
  }
  return {};
}

/// Null is for tensors without elements; TMA wants an address even then.
const void* address_or(const ConstTensor& tensor, const void* other) {
  return core::has_elements(tensor) ? tensor.data : other;
}

Status check_lengths(const core::ForwardCall& call) {
  const core::Geometry& g = call.resolved.geometry;
  const MaxLengths& most = call.resolved.problem.options.max_lengths;
  const auto own = core::Lengths::of(call.tensors);
  const Lengths lengths{.cu_q = own.cu_q,
                        .cu_k = own.cu_k,
                        .keys = own.keys,
                        .b = g.b,
                        .total_q = g.total_q,
                        .total_k = g.total_k,
                        .most_q = most.s_q,
                        .most_k = g.varlen ? most.s_k : g.s_k};
  auto* const status = static_cast<std::uint32_t*>(call.options.workspace.data);
  const int error = enqueue_length_check(lengths, status, call.options.stream);
  if (error != cudaSuccess) return device_error(error, "enqueuing the check of the lengths");
  return {};
}

Status forward(const core::ForwardCall& call) {
  const Choices& choices = choices_of(call.draft);
  const ForwardTensors& t = call.tensors;
  const RunOptions& options = call.options;
  const CurrentDevice current(choices.device.index);
  if (!current.status()) return current.status();
  const auto capturing = check_stream(options.stream, choices.device.index);
  if (!capturing) return capturing.error();
  if (Status s = check_addresses(t, options.workspace, call.draft, *capturing); !s) return s;
  if (choices.status_bytes > 0) {
    if (Status s = check_lengths(call); !s) return s;
  }
  sm90::ForwardArguments a = forward_arguments(call.resolved);
  a.operands.q = t.q.data;
  a.operands.k = address_or(t.k, t.q.data);
  a.operands.v = address_or(t.v, t.q.data);
  a.operands.o = t.o.data;
  a.operands.lse = static_cast<float*>(t.lse.data);
  const auto lengths = core::Lengths::of(t);
  a.geometry.cu_seqlens_q = lengths.cu_q;
  a.geometry.cu_seqlens_k = lengths.cu_k;
  a.geometry.k_lengths = lengths.keys;
  a.score.alibi_slopes = static_cast<const float*>(t.alibi_slopes.data);
  a.score.sinks = static_cast<const float*>(t.sinks.data);
  a.workspace = static_cast<std::byte*>(options.workspace.data) + choices.status_bytes;
  const sm90::ForwardStatus status = sm90::launch_forward(a, choices.launch, options.stream);
  switch (status.code) {
    case sm90::ForwardStatus::ok:
      return {};
    case sm90::ForwardStatus::cuda_error:
      if (status.cuda != cudaSuccess) {
        return device_error(status.cuda, "launching " + call.draft.info.kernel);
      }
      return Error{ErrorCode::device_error, "", status.reason};
    default:
      return Error{ErrorCode::unsupported, "", status.reason};
  }
}

Status backward(const core::BackwardCall&) {
  return Error{ErrorCode::unsupported, "", "there is no backward pass for GPUs yet"};
}

Result<void*> allocate(std::size_t bytes, const core::Resolved& resolved,
                       const RunOptions& options) {
  const int device = resolved.problem.operands.q.device.index;
  const CurrentDevice current(device);
  if (!current.status()) return current.status().error();
  if (const auto stream = check_stream(options.stream, device); !stream) return stream.error();
  void* memory = nullptr;
  const cudaError_t error = cudaMallocAsync(&memory, bytes, options.stream);
  if (error == cudaSuccess) return memory;
  return device_error(error, "allocating a workspace of " + std::to_string(bytes) + " bytes");
}

Status release(void* memory, const core::Resolved& resolved, const RunOptions& options) {
  const CurrentDevice current(resolved.problem.operands.q.device.index);
  if (!current.status()) return current.status();
  const cudaError_t error = cudaFreeAsync(memory, options.stream);
  if (error == cudaSuccess) return {};
  return device_error(error, "freeing the workspace");
}

Status device_status(const core::Resolved& resolved, const core::Draft& draft,
                     const RunOptions& options) {
  const Choices& choices = choices_of(draft);
  if (choices.status_bytes == 0) return {};
  const CurrentDevice current(choices.device.index);
  if (!current.status()) return current.status();
  const auto capturing = check_stream(options.stream, choices.device.index);
  if (!capturing) return capturing.error();
  if (*capturing) return invalid("stream", "is under capture, so there is nothing to wait for");
  std::uint32_t faults = 0;
  cudaError_t error = cudaMemcpyAsync(&faults, options.workspace.data, sizeof(faults),
                                      cudaMemcpyDeviceToHost, options.stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(options.stream);
  if (error != cudaSuccess) return device_error(error, "reading the status word");
  if (faults == 0) return {};
  const core::Geometry& g = resolved.geometry;
  const MaxLengths& most = resolved.problem.options.max_lengths;
  const auto cumulative = [](std::int64_t longest, std::int64_t total) {
    return "in device memory breaks its rules: 0 first, ascending, no length over max_lengths = " +
           std::to_string(longest) + ", the last entry at most the " + std::to_string(total) +
           " rows of its tensor";
  };
  if ((faults & DeviceFault::cu_seqlens_q) != 0) {
    return invalid("cu_seqlens_q", cumulative(most.s_q, g.total_q));
  }
  if ((faults & DeviceFault::cu_seqlens_k) != 0) {
    return invalid("cu_seqlens_k", cumulative(most.s_k, g.total_k));
  }
  return invalid("key_lengths",
                 "in device memory has a length outside [0, s_k = " + std::to_string(g.s_k) + "]");
}

}  // namespace

const core::Implementation kImplementation = {
    "cuda", Backend::cuda, &plan, &forward, &backward, {&allocate, &release}, &device_status};

}  // namespace abacist::cuda
