// The C API on a GPU: device fields, streams, status, against the C++ API bit for bit.
#include "abacist/abacist.h"
#include "cuda/support/gpu.hpp"

namespace abacist::testing {
namespace {

Case varlen_case() {
  Case c{
      .h_k = 2, .group = 2, .d_qk = 128, .d_v = 64, .dtype = DType::bf16, .o_dtype = DType::bf16};
  c.lens_q = {70, 0, 200};
  c.lens_k = {90, 5, 130};
  c.options.mask.causal = true;
  return c;
}

abacist_tensor in_c(const ConstTensor& x) {
  abacist_tensor t{};
  t.data = const_cast<void*>(x.data);
  t.dtype = static_cast<int32_t>(x.dtype);
  t.rank = x.rank;
  t.device_type = static_cast<int32_t>(x.device.type);
  t.device_index = x.device.index;
  for (std::size_t axis = 0; axis < kMaxRank; ++axis) {
    t.shape[axis] = x.shape[axis];
    t.stride[axis] = x.stride[axis];
  }
  return t;
}

abacist_tensors in_c(const ForwardTensors& x) {
  abacist_tensors t{};
  t.struct_size = sizeof(t);
  t.q = in_c(x.q);
  t.k = in_c(x.k);
  t.v = in_c(x.v);
  t.o = in_c(x.o);
  t.lse = in_c(x.lse);
  t.cu_seqlens_q = in_c(x.cu_seqlens_q);
  t.cu_seqlens_k = in_c(x.cu_seqlens_k);
  t.alibi_slopes = in_c(x.alibi_slopes);
  t.sinks = in_c(x.sinks);
  t.key_lengths = in_c(x.key_lengths);
  return t;
}

abacist_options in_c(const Options& x) {
  abacist_options options{};
  options.struct_size = sizeof(options);
  options.causal = x.mask.causal;
  options.align = static_cast<int32_t>(x.mask.align);
  options.has_window = 1;
  options.window_left = x.mask.window.left;
  options.window_right = x.mask.window.right;
  options.has_scale = x.score.scale.has_value();
  options.scale = x.score.scale.value_or(0.0);
  options.softcap = x.score.softcap;
  options.max_s_q = x.max_lengths.s_q;
  options.max_s_k = x.max_lengths.s_k;
  return options;
}

struct Destroy {
  void operator()(abacist_plan* plan) const { abacist_plan_destroy(plan); }
};

using GpuCApi = GpuTest;

TEST_F(GpuCApi, PlansRunOnTheCallersStream) {
  const Instance x(varlen_case());
  Results expected = gpu_results(x);
  ASSERT_TRUE(run_on_gpu(x, expected).ok());
  Results results = gpu_results(x);
  const GpuForward gpu(x, results);
  const abacist_tensors tensors = in_c(gpu.tensors());
  const abacist_options options = in_c(x.c.options);
  abacist_plan* made = nullptr;
  ASSERT_EQ(abacist_plan_create(ABACIST_FORWARD, &tensors, &options, nullptr, &made), ABACIST_OK)
      << abacist_last_error();
  const std::unique_ptr<abacist_plan, Destroy> plan(made);
  abacist_plan_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(abacist_plan_get_info(plan.get(), &info), ABACIST_OK);
  EXPECT_EQ(std::string(info.kernel).rfind("cuda.forward", 0), 0u) << info.kernel;
  EXPECT_GT(info.grid, 0);
  const DeviceMemory workspace(info.workspace_bytes);
  const StreamOwner stream;
  abacist_run_options run{};
  run.struct_size = sizeof(run);
  run.workspace = workspace.data();
  run.workspace_bytes = workspace.bytes();
  run.stream = static_cast<cudaStream_t>(stream);
  ASSERT_EQ(abacist_plan_run(plan.get(), &tensors, &run), ABACIST_OK) << abacist_last_error();
  EXPECT_EQ(abacist_plan_device_status(plan.get(), &run), ABACIST_OK) << abacist_last_error();
  gpu.collect(x, results);
  EXPECT_EQ(bits_of(results), bits_of(expected));

  Buffer wrong = x.cu_k;
  wrong.fill(std::vector<double>{0, 90, 95, 9999});
  gpu.cu_k.write(wrong);
  ASSERT_EQ(abacist_plan_run(plan.get(), &tensors, &run), ABACIST_OK) << abacist_last_error();
  EXPECT_EQ(abacist_plan_device_status(plan.get(), &run), ABACIST_INVALID_ARGUMENT);
  EXPECT_STREQ(abacist_last_error_argument(), "cu_seqlens_k");
}

TEST_F(GpuCApi, OneLineCalls) {
  const Instance x(varlen_case());
  Results expected = gpu_results(x);
  ASSERT_TRUE(run_on_gpu(x, expected).ok());
  Results results = gpu_results(x);
  const GpuForward gpu(x, results);
  const abacist_tensors tensors = in_c(gpu.tensors());
  const abacist_options options = in_c(x.c.options);
  ASSERT_EQ(abacist_forward(&tensors, &options, nullptr, nullptr), ABACIST_OK)
      << abacist_last_error();
  ABACIST_CUDA_OK(cudaDeviceSynchronize());
  gpu.collect(x, results);
  EXPECT_EQ(bits_of(results), bits_of(expected));
}

/// Every option and operand that GPUs serve, and those that they do not.
TEST_F(GpuCApi, OptionsAndOperands) {
  Case c{.b = 2, .h_k = 2, .group = 2, .s_q = 50, .s_k = 70, .d_qk = 64, .d_v = 64};
  c.dtype = c.o_dtype = DType::f16;
  c.options.mask = {.window = {20, 3}, .align = Align::top_left};
  c.options.score = {.scale = -0.1, .softcap = 5.0};
  c.alibi_rank = 1;
  c.sinks = true;
  c.key_lengths = {70, 31};
  const Instance x(c);
  Results expected = gpu_results(x);
  ASSERT_TRUE(run_on_gpu(x, expected).ok());
  Results results = gpu_results(x);
  const GpuForward gpu(x, results);
  abacist_tensors tensors = in_c(gpu.tensors());
  abacist_options options = in_c(c.options);
  ASSERT_EQ(abacist_forward(&tensors, &options, nullptr, nullptr), ABACIST_OK)
      << abacist_last_error();
  ABACIST_CUDA_OK(cudaDeviceSynchronize());
  gpu.collect(x, results);
  EXPECT_EQ(bits_of(results), bits_of(expected));

  const auto refused = [&](const char* reason) {
    EXPECT_EQ(abacist_forward(&tensors, &options, nullptr, nullptr), ABACIST_UNSUPPORTED);
    const std::string said = abacist_last_error();
    EXPECT_NE(said.find(std::string("cuda: ") + reason), std::string::npos) << said;
  };
  options.dropout_p = 0.5;
  refused("no dropout");
  options.dropout_p = 0.0;
  const int64_t pairs[] = {1, 1, 50, 70};
  tensors.bias = abacist_contiguous(tensors.q.data, ABACIST_F16, 4, pairs);
  tensors.bias.device_type = ABACIST_CUDA;
  refused("an additive bias");
  tensors.visible = abacist_contiguous(tensors.q.data, ABACIST_U8, 4, pairs);
  tensors.visible.device_type = ABACIST_CUDA;
  tensors.bias = {};
  refused("a boolean mask");
  tensors.visible = {};
  tensors.q.stride[1] += 1;
  refused("q: strides");
}

TEST(CudaCApi, DeviceTensorsReachTheBackend) {
  EXPECT_EQ(abacist_has_backend(ABACIST_BACKEND_CUDA), 1);
  const int64_t shape[] = {1, 4, 1, 64};
  abacist_tensors tensors{};
  tensors.struct_size = sizeof(tensors);
  static char memory[4][512];
  abacist_tensor* const all[] = {&tensors.q, &tensors.k, &tensors.v, &tensors.o};
  for (int n = 0; n < 4; ++n) {
    *all[n] = abacist_contiguous(memory[n], ABACIST_BF16, 4, shape);
    all[n]->device_type = ABACIST_CUDA;
    all[n]->device_index = 1000;
  }
  EXPECT_EQ(abacist_forward(&tensors, nullptr, nullptr, nullptr), ABACIST_UNSUPPORTED);
  const std::string said = abacist_last_error();
  EXPECT_NE(said.find("cpu: the tensors are on cuda:1000; cuda: "), std::string::npos) << said;
}

}  // namespace
}  // namespace abacist::testing
