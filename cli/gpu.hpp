// Memory, copies and clocks of GPUs. Without CUDA in the build every call throws UserError.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "abacist/problem.hpp"

namespace abacist::cli {

/// Memory of the device, aligned to kWorkspaceAlignment; throws UserError when it is not to be had.
std::shared_ptr<void> allocate_on(Device device, std::int64_t bytes);

void copy_to_device(Device device, void* to, const void* from, std::int64_t bytes);
void copy_to_host(Device device, void* to, const void* from, std::int64_t bytes);

/// Seconds between two events around what `enqueue` puts on the device's default stream; waits for
/// it, and throws UserError if it failed.
double seconds_on(Device device, const std::function<void()>& enqueue);

/// A line for each GPU, or one that says why there is none.
std::vector<std::string> gpu_lines();

/// Tensors of the host and their twins on a GPU: inputs are copied at once, outputs by
/// `download()`. A tensor's whole range of bytes is copied, gaps between its elements included.
class Twins {
 public:
  Twins(const ForwardTensors& host, Device device);

  const ForwardTensors& tensors() const { return tensors_; }
  void download() const;
  std::int64_t bytes() const { return bytes_; }

 private:
  struct Output {
    void* host;
    const void* device;
    std::int64_t bytes;
  };
  ConstTensor upload(const ConstTensor& host);
  Tensor reserve(const Tensor& host);

  Device device_;
  ForwardTensors tensors_;
  std::vector<std::shared_ptr<void>> memory_;
  std::vector<Output> outputs_;
  std::int64_t bytes_ = 0;
};

/// The problem with every operand on the device.
Problem on_device(Problem problem, Device device);

}  // namespace abacist::cli
