// Problems of tests/support run on a GPU through the public API.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "cuda/backend/device.hpp"
#include "support/case.hpp"

namespace abacist::testing {

/// Why the tests of the GPU cannot run here; "" if they can.
const std::string& why_no_gpu();

/// Base of every test that needs the GPU: skipped, with the reason, where there is none.
class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;  ///< nothing may be left behind, neither errors nor work
};

inline constexpr Device kGpu{DeviceType::cuda, 0};

#define ABACIST_CUDA_OK(call) \
  ASSERT_EQ(call, cudaSuccess) << cudaGetErrorString(cudaPeekAtLastError())

/// Whether a plan's kernel is the one that a test is for: the end of its name, "" for tiles of one
/// head.
bool is_kernel(const std::string& name, const std::string& ending);

/// Plans are made as for a GPU with few multiprocessors, where no keys need to be split; its blocks
/// then take several query tiles each.
class FewMultiprocessors {
 public:
  explicit FewMultiprocessors(int count) { cuda::assume_multiprocessors(count); }
  ~FewMultiprocessors() { cuda::assume_multiprocessors(0); }
  FewMultiprocessors(const FewMultiprocessors&) = delete;
  FewMultiprocessors& operator=(const FewMultiprocessors&) = delete;
};

/// Makes a GPU the current one, and the one before afterwards.
class CurrentGpu {
 public:
  explicit CurrentGpu(int index) {
    EXPECT_EQ(cudaGetDevice(&before_), cudaSuccess);
    EXPECT_EQ(cudaSetDevice(index), cudaSuccess);
  }
  ~CurrentGpu() { cudaSetDevice(before_); }
  CurrentGpu(const CurrentGpu&) = delete;
  CurrentGpu& operator=(const CurrentGpu&) = delete;

 private:
  int before_ = 0;
};

/// Device memory, freed at the end; EXPECTs that it is to be had.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(std::size_t bytes, int fill = 0xff);
  DeviceMemory(DeviceMemory&&) = default;
  DeviceMemory& operator=(DeviceMemory&&) = default;

  std::byte* data() const { return memory_.get(); }
  std::size_t bytes() const { return bytes_; }
  void write(std::span<const std::byte> from) const;
  void read(std::span<std::byte> to) const;
  std::vector<std::byte> read() const;

 private:
  struct Free {
    void operator()(std::byte* memory) const { cudaFree(memory); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t bytes_ = 0;
};

/// A Buffer's twin on the GPU: every byte of it, poisoned surroundings included.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(const Buffer& host, Device device = kGpu);

  Tensor out() const;
  ConstTensor in() const { return out(); }
  /// Brings every byte back.
  void read(Buffer& host) const;
  void write(const Buffer& host) const;

 private:
  TensorSpec spec_{};
  std::int64_t origin_ = 0;
  DeviceMemory memory_;
};

/// The forward operands of an instance on a GPU. Outputs are as `results` are: poisoned.
struct GpuForward {
  GpuForward(const Instance& instance, const Results& results, Device device = kGpu);

  ForwardTensors tensors() const;
  /// Outputs come back; checks that nothing but their elements has changed anywhere.
  void collect(const Instance& instance, Results& results) const;

  DeviceBuffer q, k, v, o, lse, slopes, sinks, cu_q, cu_k, key_lengths;
};

/// Fresh outputs of the instance's types; the LSE is contiguous, as the kernel wants it.
Results gpu_results(const Instance& instance);

/// Plans, runs on a stream of its own with a poisoned workspace of exactly the planned size, waits,
/// and checks that nothing was written beside outputs and workspace.
Status run_on_gpu(const Instance& instance, Results& results);

/// Parts that the plan cuts the keys into.
std::int64_t splits_of(const Instance& instance);

/// The bits of O and LSE.
std::vector<std::byte> bits_of(const Results& results);

class StreamOwner {
 public:
  StreamOwner() { EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), 0); }
  ~StreamOwner() { cudaStreamDestroy(stream_); }
  StreamOwner(const StreamOwner&) = delete;
  StreamOwner& operator=(const StreamOwner&) = delete;
  operator cudaStream_t() const { return stream_; }  // NOLINT(google-explicit-constructor)
  void wait() const { EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess); }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace abacist::testing
