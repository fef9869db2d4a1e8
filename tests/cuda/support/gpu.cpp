#include "cuda/support/gpu.hpp"

#include <algorithm>

namespace abacist::testing {
namespace {

std::string find_out_why() {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    return std::string("no GPU: ") + cudaGetErrorString(error);
  }
  if (count == 0) return "no GPU";
  int major = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  return major == 9 ? "" : "cuda:0 is no Hopper GPU";
}

void expect_same(const char* name, const DeviceBuffer& device, const Buffer& host) {
  if (!host.present()) return;
  Buffer now = host;
  device.read(now);
  EXPECT_TRUE(std::ranges::equal(now.memory(), host.memory())) << name << " was written";
}

}  // namespace

const std::string& why_no_gpu() {
  static const std::string why = find_out_why();
  return why;
}

void GpuTest::SetUp() {
  if (!why_no_gpu().empty()) GTEST_SKIP() << why_no_gpu();
}

void GpuTest::TearDown() {
  if (!why_no_gpu().empty()) return;
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "an error was left behind";
}

DeviceMemory::DeviceMemory(std::size_t bytes, int fill) : bytes_(bytes) {
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, std::max<std::size_t>(bytes, 1)), cudaSuccess) << bytes;
  EXPECT_EQ(cudaMemset(memory, fill, bytes), cudaSuccess);
  memory_.reset(static_cast<std::byte*>(memory));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // streams that do not wait for the default one
}

void DeviceMemory::write(std::span<const std::byte> from) const {
  ASSERT_LE(from.size(), bytes_);
  EXPECT_EQ(cudaMemcpy(memory_.get(), from.data(), from.size(), cudaMemcpyHostToDevice), 0);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

void DeviceMemory::read(std::span<std::byte> to) const {
  ASSERT_LE(to.size(), bytes_);
  EXPECT_EQ(cudaMemcpy(to.data(), memory_.get(), to.size(), cudaMemcpyDeviceToHost), 0);
}

std::vector<std::byte> DeviceMemory::read() const {
  std::vector<std::byte> all(bytes_);
  read(all);
  return all;
}

DeviceBuffer::DeviceBuffer(const Buffer& host, Device device) {
  if (!host.present()) return;
  const CurrentGpu current(device.index);
  spec_ = host.spec();
  spec_.device = device;
  origin_ = host.origin_bytes();
  memory_ = DeviceMemory(host.memory().size());
  write(host);
}

Tensor DeviceBuffer::out() const {
  return spec_.present() ? Tensor{memory_.data() + origin_, spec_} : Tensor{};
}

void DeviceBuffer::read(Buffer& host) const {
  if (spec_.present()) memory_.read(host.memory());
}

void DeviceBuffer::write(const Buffer& host) const {
  if (spec_.present()) memory_.write(host.memory());
}

GpuForward::GpuForward(const Instance& x, const Results& results, Device device)
    : q(x.q, device),
      k(x.k, device),
      v(x.v, device),
      o(results.o, device),
      lse(results.lse, device),
      slopes(x.slopes, device),
      sinks(x.sinks, device),
      cu_q(x.cu_q, device),
      cu_k(x.cu_k, device),
      key_lengths(x.key_lengths, device) {}

ForwardTensors GpuForward::tensors() const {
  return {.q = q.in(),
          .k = k.in(),
          .v = v.in(),
          .o = o.out(),
          .lse = lse.out(),
          .alibi_slopes = slopes.in(),
          .cu_seqlens_q = cu_q.in(),
          .cu_seqlens_k = cu_k.in(),
          .sinks = sinks.in(),
          .key_lengths = key_lengths.in()};
}

void GpuForward::collect(const Instance& x, Results& results) const {
  o.read(results.o);
  lse.read(results.lse);
  EXPECT_EQ(results.o.damage(true), "") << "around o";
  EXPECT_EQ(results.lse.damage(true), "") << "around lse";
  expect_same("q", q, x.q);
  expect_same("k", k, x.k);
  expect_same("v", v, x.v);
  expect_same("alibi_slopes", slopes, x.slopes);
  expect_same("sinks", sinks, x.sinks);
  expect_same("cu_seqlens_q", cu_q, x.cu_q);
  expect_same("cu_seqlens_k", cu_k, x.cu_k);
  expect_same("key_lengths", key_lengths, x.key_lengths);
}

bool is_kernel(const std::string& name, const std::string& ending) {
  const bool special =
      name.ends_with(".packed") || name.ends_with(".short") || name.ends_with(".split");
  return ending.empty() ? !special : name.ends_with(ending);
}

Results gpu_results(const Instance& x) {
  Results results = x.make_results(x.c.o_dtype, DType::f32, x.c.layout);
  results.lse = x.make_results(x.c.o_dtype).lse;
  return results;
}

Status run_on_gpu(const Instance& x, Results& results) {
  const GpuForward gpu(x, results);
  const ForwardTensors tensors = gpu.tensors();
  const auto planned = plan(make_problem(tensors, x.c.options));
  if (!planned) return planned.error();
  const std::size_t bytes = planned->info().workspace_bytes;
  constexpr std::size_t kGuard = 4096;
  const DeviceMemory workspace(bytes + 2 * kGuard);
  const StreamOwner stream;
  const RunOptions options{.workspace = {workspace.data() + kGuard, bytes}, .stream = stream};
  Status status = planned->run(tensors, options);
  stream.wait();
  if (status) status = planned->device_status(options);
  gpu.collect(x, results);
  const std::vector<std::byte> after = workspace.read();
  const auto poisoned = [](std::byte each) { return each == std::byte{0xff}; };
  EXPECT_TRUE(std::all_of(after.begin(), after.begin() + kGuard, poisoned))
      << "written before the workspace";
  EXPECT_TRUE(std::all_of(after.end() - kGuard, after.end(), poisoned))
      << "written past the workspace";
  return status;
}

std::int64_t splits_of(const Instance& x) {
  const Results results = gpu_results(x);
  const GpuForward gpu(x, results);
  const auto planned = plan(make_problem(gpu.tensors(), x.c.options));
  EXPECT_TRUE(planned.ok()) << (planned ? "" : to_string(planned.error()));
  return planned ? planned->info().splits : 0;
}

std::vector<std::byte> bits_of(const Results& results) {
  std::vector<std::byte> bits = results.o.element_bytes();
  const std::vector<std::byte> lse = results.lse.element_bytes();
  bits.insert(bits.end(), lse.begin(), lse.end());
  return bits;
}

}  // namespace abacist::testing
