// Streams, graphs, threads, workspaces, and errors of runs on a GPU.
#include <atomic>
#include <cstring>
#include <thread>

#include "cuda/fault.hpp"
#include "cuda/support/gpu.hpp"
#include "support/bounds.hpp"

namespace abacist::testing {
namespace {

Case dense_case() {
  Case c{.b = 2,
         .h_k = 2,
         .group = 2,
         .s_q = 200,
         .s_k = 300,
         .d_qk = 128,
         .d_v = 128,
         .dtype = DType::bf16,
         .o_dtype = DType::bf16};
  c.options.mask.causal = true;
  return c;
}

Case varlen_case() {
  Case c{.h_k = 2, .group = 2, .d_qk = 64, .d_v = 64, .dtype = DType::f16, .o_dtype = DType::f16};
  c.lens_q = {100, 1, 0, 257};
  c.lens_k = {130, 64, 20, 300};
  c.options.mask.causal = true;
  return c;
}

/// The same bits as a run by itself.
std::vector<std::byte> alone(const Instance& x) {
  Results results = gpu_results(x);
  const Status status = run_on_gpu(x, results);
  EXPECT_TRUE(status.ok()) << (status ? "" : to_string(status.error()));
  return bits_of(results);
}

void expect_error(const Status& status, ErrorCode code, const std::string& argument,
                  const std::string& says) {
  ASSERT_FALSE(status.ok()) << "expected an error: " << says;
  EXPECT_EQ(status.error().code, code) << to_string(status.error());
  EXPECT_EQ(status.error().argument, argument) << to_string(status.error());
  EXPECT_NE(status.error().message.find(says), std::string::npos) << to_string(status.error());
}

using GpuRun = GpuTest;

TEST_F(GpuRun, IsEnqueuedOnTheCallersStreamAndDoesNotWait) {
  const Instance x(dense_case());
  Results results = gpu_results(x);
  const GpuForward gpu(x, results);
  const StreamOwner stream;
  const auto planned = plan(make_problem(gpu.tensors(), x.c.options));  // loads the kernel
  ASSERT_TRUE(planned.ok());
  std::atomic<bool> open = false;
  const auto gate = [](void* flag) {
    while (!*static_cast<std::atomic<bool>*>(flag)) std::this_thread::yield();
  };
  ABACIST_CUDA_OK(cudaLaunchHostFunc(stream, gate, &open));
  const Status status = planned->run(gpu.tensors(), {.stream = stream});
  const cudaError_t pending = cudaStreamQuery(stream);
  open = true;
  stream.wait();
  EXPECT_EQ(pending, cudaErrorNotReady) << "the run waited, or went to another stream";
  ASSERT_TRUE(status.ok()) << to_string(status.error());
  gpu.collect(x, results);
  EXPECT_EQ(bits_of(results), alone(x));
}

TEST_F(GpuRun, OneLineCallsBringTheirWorkspace) {
  const Instance x(varlen_case());
  for (const bool own_stream : {false, true}) {
    Results results = gpu_results(x);
    const GpuForward gpu(x, results);
    const StreamOwner stream;
    const Stream chosen = own_stream ? static_cast<cudaStream_t>(stream) : nullptr;
    const Status status = forward(gpu.tensors(), x.c.options, {}, {.stream = chosen});
    ASSERT_TRUE(status.ok()) << to_string(status.error());
    ABACIST_CUDA_OK(cudaDeviceSynchronize());
    gpu.collect(x, results);
    EXPECT_EQ(bits_of(results), alone(x));
  }
}

/// A captured run, replayed with other data and other lengths in the same buffers.
TEST_F(GpuRun, Row33_GraphsReadDataAndLengthsAnew) {
  Case long_case = varlen_case();
  Case short_case = long_case;
  short_case.lens_q = {1, 1, 1, 355};
  short_case.lens_k = {1, 500, 3, 10};
  short_case.stream = 77;
  Instance a(long_case);
  Instance b(short_case);
  a.c.options.max_lengths = b.c.options.max_lengths = {400, 500};
  Results results = gpu_results(a);
  const GpuForward gpu(a, results);
  const auto planned = plan(make_problem(gpu.tensors(), a.c.options));
  ASSERT_TRUE(planned.ok()) << to_string(planned.error());
  const DeviceMemory workspace(planned->info().workspace_bytes);
  const StreamOwner stream;
  const RunOptions options{.workspace = {workspace.data(), workspace.bytes()}, .stream = stream};
  // Captured before anything of this kernel has run.
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ABACIST_CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  const Status captured = planned->run(gpu.tensors(), options);
  expect_error(planned->device_status(options), ErrorCode::invalid_argument, "stream", "capture");
  ABACIST_CUDA_OK(cudaStreamEndCapture(stream, &graph));
  ASSERT_TRUE(captured.ok()) << to_string(captured.error());
  ABACIST_CUDA_OK(cudaGraphInstantiate(&executable, graph, 0));
  for (Instance* x : {&a, &b, &a}) {
    for (const auto& [device, host] : {std::pair{&gpu.q, &x->q},
                                       {&gpu.k, &x->k},
                                       {&gpu.v, &x->v},
                                       {&gpu.cu_q, &x->cu_q},
                                       {&gpu.cu_k, &x->cu_k},
                                       {&gpu.o, &results.o},
                                       {&gpu.lse, &results.lse}}) {
      device->write(*host);
    }
    ABACIST_CUDA_OK(cudaGraphLaunch(executable, stream));
    stream.wait();
    const Status status = planned->device_status(options);
    EXPECT_TRUE(status.ok()) << to_string(status.error());
    Results replayed = gpu_results(*x);
    gpu.collect(*x, replayed);
    EXPECT_EQ(bits_of(replayed), alone(*x));
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

/// The parts of the keys follow from what the plan knows, their ranges from the lengths of the
/// moment. Runs after one another share a workspace.
TEST_F(GpuRun, Row33_GraphsOfSplitKeysReadLengthsAnew) {
  Case c = dense_case();
  c.group = 4;
  c.s_q = 3;
  c.s_k = 3000;
  c.sinks = true;
  std::vector<Instance> all;
  for (const std::vector<std::int64_t>& lengths :
       {std::vector<std::int64_t>{3000, 1200}, {0, 2999}, {1, 130}, {3000, 3000}}) {
    c.key_lengths = lengths;
    ++c.stream;
    all.emplace_back(c);
  }
  ASSERT_GT(splits_of(all[0]), 1);
  Results results = gpu_results(all[0]);
  const GpuForward gpu(all[0], results);
  const auto planned = plan(make_problem(gpu.tensors(), c.options));
  ASSERT_TRUE(planned.ok()) << to_string(planned.error());
  const DeviceMemory workspace(planned->info().workspace_bytes);
  const StreamOwner stream;
  const RunOptions options{.workspace = {workspace.data(), workspace.bytes()}, .stream = stream};
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ABACIST_CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int run = 0; run < 3; ++run) EXPECT_TRUE(planned->run(gpu.tensors(), options).ok());
  ABACIST_CUDA_OK(cudaStreamEndCapture(stream, &graph));
  ABACIST_CUDA_OK(cudaGraphInstantiate(&executable, graph, 0));
  for (const Instance& x : all) {
    for (const auto& [device, host] : {std::pair{&gpu.q, &x.q},
                                       {&gpu.k, &x.k},
                                       {&gpu.v, &x.v},
                                       {&gpu.sinks, &x.sinks},
                                       {&gpu.key_lengths, &x.key_lengths}}) {
      device->write(*host);
    }
    gpu.o.write(results.o);
    gpu.lse.write(results.lse);
    ABACIST_CUDA_OK(cudaGraphLaunch(executable, stream));
    stream.wait();
    Results replayed = gpu_results(x);
    gpu.collect(x, replayed);
    EXPECT_EQ(bits_of(replayed), alone(x));
  }
  ABACIST_CUDA_OK(cudaGraphExecDestroy(executable));
  ABACIST_CUDA_OK(cudaGraphDestroy(graph));
}

TEST_F(GpuRun, OneLineCallsCanBeCaptured) {
  const Instance x(varlen_case());
  Results results = gpu_results(x);
  const GpuForward gpu(x, results);
  const StreamOwner stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ABACIST_CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  const Status captured = forward(gpu.tensors(), x.c.options, {}, {.stream = stream});
  ABACIST_CUDA_OK(cudaStreamEndCapture(stream, &graph));
  ASSERT_TRUE(captured.ok()) << to_string(captured.error());
  ABACIST_CUDA_OK(cudaGraphInstantiate(&executable, graph, 0));
  for (int replay = 0; replay < 2; ++replay) {
    gpu.o.write(results.o);
    ABACIST_CUDA_OK(cudaGraphLaunch(executable, stream));
    stream.wait();
    Results replayed = gpu_results(x);
    gpu.collect(x, replayed);
    EXPECT_EQ(bits_of(replayed), alone(x));
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

TEST_F(GpuRun, Row46_ManyThreadsShareAPlan) {
  const Instance x(varlen_case());
  const std::vector<std::byte> expected = alone(x);
  Results poisoned = gpu_results(x);
  const GpuForward inputs(x, poisoned);
  const auto planned = plan(make_problem(inputs.tensors(), x.c.options));
  ASSERT_TRUE(planned.ok());
  constexpr int kThreads = 8;
  constexpr int kRuns = 20;
  std::atomic<int> good = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int n = 0; n < kRuns; ++n) {
        Results results = poisoned;
        const DeviceBuffer o(results.o);
        const DeviceBuffer lse(results.lse);
        const DeviceMemory workspace(planned->info().workspace_bytes);
        const StreamOwner stream;
        ForwardTensors tensors = inputs.tensors();
        tensors.o = o.out();
        tensors.lse = lse.out();
        const RunOptions options{.workspace = {workspace.data(), workspace.bytes()},
                                 .stream = stream};
        const bool ran =
            planned->run(tensors, options).ok() && planned->device_status(options).ok();
        stream.wait();
        o.read(results.o);
        lse.read(results.lse);
        if (ran && bits_of(results) == expected) ++good;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, kThreads * kRuns);
}

int gpu_count() {
  int count = 0;
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  return count;
}

int current_gpu() {
  int current = -1;
  EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
  return current;
}

TEST_F(GpuRun, Row34_TheTensorsDeviceIsUsedWhateverIsCurrent) {
  if (gpu_count() < 2) GTEST_SKIP() << "one GPU";
  for (const Case& c : {dense_case(), varlen_case()}) {
    const Instance x(c);
    const std::vector<std::byte> expected = alone(x);
    for (const int place : {1, 0}) {
      for (const int current : {0, 1}) {
        SCOPED_TRACE("tensors on cuda:" + std::to_string(place) +
                     ", current cuda:" + std::to_string(current));
        const CurrentGpu set(current);
        Results results = gpu_results(x);
        const GpuForward gpu(x, results, {DeviceType::cuda, place});
        Status status = forward(gpu.tensors(), x.c.options);  // the default stream of their device
        EXPECT_TRUE(status.ok()) << to_string(status.error());
        EXPECT_EQ(current_gpu(), current);
        {
          const CurrentGpu theirs(place);
          ABACIST_CUDA_OK(cudaDeviceSynchronize());
        }
        gpu.collect(x, results);
        EXPECT_EQ(bits_of(results), expected);

        const auto planned = plan(make_problem(gpu.tensors(), x.c.options));
        ASSERT_TRUE(planned.ok()) << to_string(planned.error());
        const CurrentGpu theirs(place);  // whose copies are waited for
        Results again = gpu_results(x);
        gpu.o.write(again.o);
        gpu.lse.write(again.lse);
        const StreamOwner stream;
        const DeviceMemory workspace(planned->info().workspace_bytes);
        const RunOptions options{.workspace = {workspace.data(), workspace.bytes()},
                                 .stream = stream};
        const CurrentGpu other(current);
        status = planned->run(gpu.tensors(), options);
        EXPECT_TRUE(status.ok()) << to_string(status.error());
        status = planned->device_status(options);
        EXPECT_TRUE(status.ok()) << to_string(status.error());
        EXPECT_EQ(current_gpu(), current);
        stream.wait();
        gpu.collect(x, again);
        EXPECT_EQ(bits_of(again), expected);
      }
    }
  }
}

TEST_F(GpuRun, Row34_MemoryAndStreamsOfAnotherGpuAreRefused) {
  if (gpu_count() < 2) GTEST_SKIP() << "one GPU";
  const Instance x(dense_case());
  Results results = gpu_results(x);
  const GpuForward here(x, results);
  const GpuForward there(x, results, {DeviceType::cuda, 1});
  ForwardTensors t = here.tensors();
  t.k.data = there.tensors().k.data;
  expect_error(forward(t, x.c.options), ErrorCode::invalid_argument, "k",
               "in the memory of cuda:1");
  const CurrentGpu second(1);
  const StreamOwner stream;
  const CurrentGpu first(0);
  const RunOptions wrong{.stream = stream};
  expect_error(forward(here.tensors(), x.c.options, {}, wrong), ErrorCode::invalid_argument,
               "stream", "is a stream of cuda:1, must be one of cuda:0");
  const auto planned = plan(make_problem(here.tensors(), x.c.options));
  ASSERT_TRUE(planned.ok()) << to_string(planned.error());
  expect_error(planned->run(here.tensors(), wrong), ErrorCode::invalid_argument, "stream",
               "cuda:1");
  ABACIST_CUDA_OK(cudaDeviceSynchronize());
  here.collect(x, results);
  EXPECT_EQ(results.o.damage(false), "");
}

struct BadLengths {
  const char* argument;
  std::vector<double> cu_q, cu_k;
};

TEST_F(GpuRun, Row28_MalformedLengthsAreReportedAndHarmless) {
  const Instance good(varlen_case());
  const std::vector<double> q = {0, 100, 101, 101, 358};
  const std::vector<double> k = {0, 130, 194, 214, 514};
  const BadLengths all[] = {
      {"cu_seqlens_q", {1, 100, 101, 101, 358}, k},  {"cu_seqlens_q", {0, 100, 90, 101, 358}, k},
      {"cu_seqlens_q", {0, 100, 101, 101, 400}, k},  {"cu_seqlens_q", {0, 100, 101, 2e9, 358}, k},
      {"cu_seqlens_k", q, {0, -2e9, 194, 214, 514}}, {"cu_seqlens_k", q, {0, 130, 194, 214, 515}},
      {"cu_seqlens_k", q, {0, 130, 131, 131, 513}}};
  for (const BadLengths& bad : all) {
    Instance x(varlen_case());
    x.cu_q.fill(bad.cu_q);
    x.cu_k.fill(bad.cu_k);
    Results results = gpu_results(x);
    expect_error(run_on_gpu(x, results), ErrorCode::invalid_argument, bad.argument,
                 "in device memory breaks its rules");
    // Sequence 0 where its own lengths are untouched: as ever.
    Results as_ever = gpu_results(good);
    ASSERT_TRUE(run_on_gpu(good, as_ever).ok());
    if (bad.cu_q[0] != 0 || bad.cu_k[1] != 130) continue;
    results.o.for_each([&](const auto& index, std::int64_t) {
      if (index[0] >= 90) return;
      ASSERT_EQ(results.o.at(index), as_ever.o.at(index)) << index[0];
    });
  }
}

TEST_F(GpuRun, KeyLengthsOutsideTheTensorAreReportedAndHarmless) {
  for (const double wrong : {-1.0, 301.0, 2e9}) {
    Case c = dense_case();
    c.key_lengths = {300, 17};
    Instance x(c);
    x.key_lengths.fill({wrong, 17.0});
    Results results = gpu_results(x);
    expect_error(run_on_gpu(x, results), ErrorCode::invalid_argument, "key_lengths",
                 "outside [0, s_k = 300]");
  }
}

TEST_F(GpuRun, TheStatusWordIsResetByTheNextRun) {
  Instance x(varlen_case());
  Results results = gpu_results(x);
  const GpuForward gpu(x, results);
  const auto planned = plan(make_problem(gpu.tensors(), x.c.options));
  ASSERT_TRUE(planned.ok());
  const DeviceMemory workspace(planned->info().workspace_bytes);
  const RunOptions options{.workspace = {workspace.data(), workspace.bytes()}};
  const std::vector<double> right = x.cu_k.values();
  for (const bool bad : {true, false, true, false}) {
    x.cu_k.fill(bad ? std::vector<double>{0, 1, 2, 2, 9999} : right);
    gpu.cu_k.write(x.cu_k);
    ASSERT_TRUE(planned->run(gpu.tensors(), options).ok());
    EXPECT_EQ(planned->device_status(options).ok(), !bad);
    std::uint32_t word = 0;
    std::memcpy(&word, workspace.read().data(), sizeof(word));
    EXPECT_EQ(word, bad ? DeviceFault::cu_seqlens_k : 0u);
  }
}

TEST_F(GpuRun, WorkspacesThatCannotServe) {
  const Instance x(varlen_case());
  Results results = gpu_results(x);
  const GpuForward gpu(x, results);
  const auto planned = plan(make_problem(gpu.tensors(), x.c.options));
  ASSERT_TRUE(planned.ok());
  const std::size_t bytes = planned->info().workspace_bytes;
  const DeviceMemory memory(bytes + 512);
  const auto run = [&](void* data, std::size_t size) {
    return planned->run(gpu.tensors(), {.workspace = {data, size}});
  };
  constexpr auto kInvalid = ErrorCode::invalid_argument;
  expect_error(run(nullptr, 0), kInvalid, "workspace", "the plan needs");
  expect_error(run(memory.data(), bytes - 1), kInvalid, "workspace", "the plan needs");
  expect_error(run(memory.data() + 128, bytes), kInvalid, "workspace", "256 bytes");
  expect_error(run(gpu.tensors().o.data, bytes), kInvalid, "workspace", "");
  gpu.collect(x, results);
  EXPECT_EQ(results.o.damage(false), "");
}

TEST_F(GpuRun, AddressesThatCannotServe) {
  const Instance x(dense_case());
  Results results = gpu_results(x);
  const GpuForward gpu(x, results);
  constexpr auto kInvalid = ErrorCode::invalid_argument;
  for (const int bytes : {2, 8}) {
    ForwardTensors t = gpu.tensors();
    t.q.data = static_cast<const std::byte*>(t.q.data) + bytes;
    expect_error(forward(t, x.c.options), kInvalid, "q", "16 bytes");
    t = gpu.tensors();
    t.o.data = static_cast<std::byte*>(t.o.data) + bytes;
    expect_error(forward(t, x.c.options), kInvalid, "o", "16 bytes");
  }
  ForwardTensors t = gpu.tensors();
  t.o.data = const_cast<void*>(t.q.data);
  expect_error(forward(t, x.c.options), kInvalid, "o", "overlaps q");
  int reads_host = 0;
  cudaDeviceGetAttribute(&reads_host, cudaDevAttrPageableMemoryAccess, 0);
  if (reads_host == 0) {
    t = gpu.tensors();
    t.v.data = x.v.in().data;
    if (reinterpret_cast<std::uintptr_t>(t.v.data) % 16 == 0) {
      expect_error(forward(t, x.c.options), kInvalid, "v", "in host memory");
    }
  }
  gpu.collect(x, results);
  EXPECT_EQ(results.o.damage(false), "");
}

TEST_F(GpuRun, HarmlessErrorsOfOthersAreNotOurs) {
  const Instance x(dense_case());
  Results results = gpu_results(x);
  const GpuForward gpu(x, results);
  EXPECT_NE(cudaSetDevice(12345), cudaSuccess);
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidDevice);  // still there when the run begins
  const Status status = forward(gpu.tensors(), x.c.options);
  EXPECT_TRUE(status.ok()) << to_string(status.error());
  ABACIST_CUDA_OK(cudaDeviceSynchronize());
  cudaGetLastError();  // the runtime may have kept it
  gpu.collect(x, results);
  EXPECT_EQ(bits_of(results), alone(x));
}

/// In a process of its own, whose context a kernel of somebody else destroys.
void report_earlier_fault() {
  const Instance x(dense_case());
  const Results results = gpu_results(x);
  const GpuForward gpu(x, results);
  enqueue_fault(nullptr);
  cudaDeviceSynchronize();
  const Status status = forward(gpu.tensors(), x.c.options);
  std::fprintf(stderr, "said: %s\n", status ? "nothing" : to_string(status.error()).c_str());
  std::_Exit(status ? 1 : 3);
}

TEST_F(GpuRun, FaultsOfEarlierKernelsAreNamedAsNotOurs) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(report_earlier_fault(), ::testing::ExitedWithCode(3),
              "said: device error: work enqueued before this call failed.*IllegalAddress");
}

TEST_F(GpuRun, PlansSayWhatRuns) {
  const Instance x(dense_case());
  const Results results = gpu_results(x);
  const GpuForward gpu(x, results);
  const auto planned = plan(make_problem(gpu.tensors(), x.c.options));
  ASSERT_TRUE(planned.ok());
  EXPECT_EQ(planned->info().kernel.rfind("cuda.forward.sm90", 0), 0u) << planned->info().kernel;
  ASSERT_EQ(planned->info().declined.size(), 1u);
  EXPECT_EQ(planned->info().declined[0], "cpu: the tensors are on cuda:0");
  EXPECT_NE(explain(*planned).find(" blocks of "), std::string::npos) << explain(*planned);
}

}  // namespace
}  // namespace abacist::testing
