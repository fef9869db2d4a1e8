#include "cuda/backend/device.hpp"

#include <cuda_runtime_api.h>

#include <atomic>
#include <map>
#include <mutex>

namespace abacist::cuda {
namespace {

std::atomic<int> assumed_multiprocessors = 0;

Error no_device(const std::string& why) { return {ErrorCode::unsupported, "", why}; }

Result<DeviceFacts> ask_driver(int index) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    cudaGetLastError();
    int driver = 0;
    if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0) {
      return no_device("this machine has no NVIDIA driver");
    }
    return no_device(std::string("no GPU can be used: ") + cudaGetErrorString(error));
  }
  if (index >= count) {
    return no_device("there is no cuda:" + std::to_string(index) + "; this process sees " +
                     std::to_string(count) + " GPU" + (count == 1 ? "" : "s"));
  }
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, index); error != cudaSuccess) {
    cudaGetLastError();
    return device_error(error, "cudaGetDeviceProperties");
  }
  DeviceFacts facts;
  facts.index = index;
  facts.name = properties.name;
  facts.capability = properties.major * 10 + properties.minor;
  facts.multiprocessors = properties.multiProcessorCount;
  facts.memory = static_cast<std::int64_t>(properties.totalGlobalMem);
  facts.reads_host = properties.pageableMemoryAccess != 0;
  return facts;
}

/// Errors that a kernel or copy leaves when it runs, not when it is enqueued; they end the context.
bool is_fault_of_execution(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
      return true;
    default:
      return false;
  }
}

bool has_several_gpus() {
  static const bool several = [] {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count > 1;
  }();
  return several;
}

}  // namespace

Result<DeviceFacts> device_facts(int index) {
  static std::mutex mutex;
  static std::map<int, DeviceFacts> known;
  const std::lock_guard lock(mutex);
  auto found = known.find(index);
  if (found == known.end()) {
    auto facts = ask_driver(index);
    if (!facts) return facts;
    found = known.emplace(index, facts.value()).first;
  }
  DeviceFacts facts = found->second;
  if (const int assumed = assumed_multiprocessors) facts.multiprocessors = assumed;
  return facts;
}

void assume_multiprocessors(int count) { assumed_multiprocessors = count; }

std::vector<DeviceFacts> all_devices(std::string& why_none) {
  std::vector<DeviceFacts> all;
  while (true) {
    auto facts = device_facts(static_cast<int>(all.size()));
    if (!facts) {
      if (all.empty()) why_none = facts.error().message;
      return all;
    }
    all.push_back(std::move(facts).value());
  }
}

CurrentDevice::CurrentDevice(int index) {
  int current = 0;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != index) {
    error = cudaSetDevice(index);
    if (error == cudaSuccess) before_ = current;
  }
  if (error != cudaSuccess) {
    status_ = device_error(error, "making cuda:" + std::to_string(index) + " current");
  }
}

CurrentDevice::~CurrentDevice() {
  if (before_ >= 0) cudaSetDevice(before_);
}

Error device_error(int code, const std::string& what) {
  const auto error = static_cast<cudaError_t>(code);
  const std::string text = std::string(cudaGetErrorName(error)) + ", " + cudaGetErrorString(error);
  // The caller hears of it here; the runtime need not say it once more.
  cudaGetLastError();
  if (is_fault_of_execution(error)) {
    return {ErrorCode::device_error, "",
            "work enqueued before this call failed, this call enqueued nothing: " + text};
  }
  if (error == cudaErrorMemoryAllocation) {
    return {ErrorCode::out_of_memory, "", what + ": " + text};
  }
  return {ErrorCode::device_error, "", what + ": " + text};
}

Result<bool> check_stream(Stream stream, int device) {
  cudaStreamCaptureStatus capture;
  if (const cudaError_t error = cudaStreamIsCapturing(stream, &capture); error != cudaSuccess) {
    return device_error(error, "the stream");
  }
  // Under capture the question is not allowed, it would even end the capture.
  if (capture != cudaStreamCaptureStatusNone) return true;
  if (stream == nullptr || !has_several_gpus()) return false;
  int its_device = device;
  if (const cudaError_t error = cudaStreamGetDevice(stream, &its_device); error != cudaSuccess) {
    return device_error(error, "the stream");
  }
  if (its_device == device) return false;
  return Error{ErrorCode::invalid_argument, "stream",
               "is a stream of cuda:" + std::to_string(its_device) +
                   ", must be one of cuda:" + std::to_string(device) + ", where the tensors are"};
}

}  // namespace abacist::cuda
