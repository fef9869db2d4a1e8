// What the backend knows of a GPU, and how its errors are told. No CUDA header is needed here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "abacist/plan.hpp"

namespace abacist::cuda {

struct DeviceFacts {
  int index = 0;
  std::string name;    ///< "NVIDIA H200"
  int capability = 0;  ///< compute capability: 90 is 9.0
  int multiprocessors = 0;
  std::int64_t memory = 0;  ///< bytes
  bool reads_host = false;  ///< pageable host memory, too
};

/// Asked of the driver once for each device, then remembered. `unsupported` with the reason if
/// there is no driver, or no such device. Touches no device memory and makes no context.
Result<DeviceFacts> device_facts(int index);

/// For tests: device_facts tells so many multiprocessors from now on; 0: as many as there are.
void assume_multiprocessors(int count);

/// Every device there is; empty, with the reason, if there is none.
std::vector<DeviceFacts> all_devices(std::string& why_none);

/// Makes a device the calling thread's current one, and the one before again at the end.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  const Status& status() const { return status_; }

 private:
  int before_ = -1;  ///< -1: nothing to put back
  Status status_;
};

/// The error of a call of ours that returned `code` (a cudaError_t, not 0). Faults of kernels that
/// ran before are named as such: nothing that this library enqueued in this call can have failed
/// yet.
Error device_error(int code, const std::string& what);

/// Whether the stream is under capture; or the fault that an earlier kernel or copy of this process
/// left behind; or that the stream is one of another device than `device`, the current one: a
/// launch would run there. (One under capture is not asked.) Neither waits nor enqueues.
Result<bool> check_stream(Stream stream, int device);

}  // namespace abacist::cuda
