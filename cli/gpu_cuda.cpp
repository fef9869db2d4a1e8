// GPUs through the CUDA runtime.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "cuda/backend/device.hpp"
#include "gpu.hpp"
#include "text.hpp"
#include "user_error.hpp"

namespace abacist::cli {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw UserError(cuda::device_error(error, what));
}

/// The device is current from here on; throws the reason if it cannot be used.
void use(Device device) {
  const auto facts = cuda::device_facts(device.index);
  if (!facts) throw UserError(facts.error());
  check(cudaSetDevice(device.index), "choosing the GPU");
}

class Event {
 public:
  Event() { check(cudaEventCreate(&event_), "making an event"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record() const { check(cudaEventRecord(event_, nullptr), "recording an event"); }
  float milliseconds_since(const Event& start) const {
    float milliseconds = 0.0f;
    check(cudaEventSynchronize(event_), "running on the GPU");
    check(cudaEventElapsedTime(&milliseconds, start.event_, event_), "reading the events");
    return milliseconds;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace

std::shared_ptr<void> allocate_on(Device device, std::int64_t bytes) {
  use(device);
  void* memory = nullptr;
  const auto rounded = static_cast<std::size_t>(bytes > 0 ? bytes : 1);
  if (const cudaError_t error = cudaMalloc(&memory, rounded); error != cudaSuccess) {
    cudaGetLastError();
    throw UserError(fmt::format("{} for cuda:{}: {}", bytes_text(static_cast<double>(bytes)),
                                device.index, cudaGetErrorString(error)));
  }
  return {memory, [](void* allocated) { cudaFree(allocated); }};
}

void copy_to_device(Device device, void* to, const void* from, std::int64_t bytes) {
  use(device);
  check(cudaMemcpy(to, from, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice),
        "copying to the GPU");
}

void copy_to_host(Device device, void* to, const void* from, std::int64_t bytes) {
  use(device);
  check(cudaMemcpy(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost),
        "copying from the GPU");
}

double seconds_on(Device device, const std::function<void()>& enqueue) {
  use(device);
  const Event start;
  const Event end;
  start.record();
  enqueue();
  end.record();
  return end.milliseconds_since(start) * 1e-3;
}

std::vector<std::string> gpu_lines() {
  std::string why_none;
  std::vector<std::string> lines;
  for (const cuda::DeviceFacts& gpu : cuda::all_devices(why_none)) {
    lines.push_back(fmt::format("cuda:{} {}, compute capability {}.{}, {} multiprocessors, {}",
                                gpu.index, gpu.name, gpu.capability / 10, gpu.capability % 10,
                                gpu.multiprocessors, bytes_text(static_cast<double>(gpu.memory))));
  }
  if (lines.empty()) lines.push_back("none: " + why_none);
  return lines;
}

}  // namespace abacist::cli
