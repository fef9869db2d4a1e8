// Which device the operands are on, checked before anything runs. Needs no GPU.
#include <gtest/gtest.h>

#include <vector>

#include "abacist/abacist.hpp"

namespace abacist::testing {
namespace {

/// A valid call on the host, to be spoilt.
struct Call {
  Call() : data(4 * 64, 0.5f), o(64, 7.0f) {
    const TensorSpec spec = contiguous(DType::f32, {1, 4, 2, 8});
    tensors = {.q = {data.data(), spec},
               .k = {data.data() + 64, spec},
               .v = {data.data() + 128, spec},
               .o = {o.data(), spec}};
  }
  void move_to(Device device) {
    tensors.q.device = tensors.k.device = tensors.v.device = tensors.o.device = device;
  }
  ~Call() { EXPECT_EQ(o, std::vector<float>(64, 7.0f)) << "written after an error"; }

  std::vector<float> data, o;
  ForwardTensors tensors;
};

void expect_error(const Status& status, ErrorCode code, const std::string& argument,
                  const std::string& says) {
  ASSERT_FALSE(status.ok()) << "expected an error: " << says;
  EXPECT_EQ(status.error().code, code) << to_string(status.error());
  EXPECT_EQ(status.error().argument, argument) << to_string(status.error());
  EXPECT_NE(status.error().message.find(says), std::string::npos) << to_string(status.error());
}

TEST(Device, OperandsMustBeOnOne) {
  Call call;
  call.tensors.k.device = {DeviceType::cuda, 1};
  expect_error(forward(call.tensors), ErrorCode::invalid_argument, "k", "cuda:1");
}

TEST(Device, MustExistByItsName) {
  Call call;
  call.tensors.v.device = {DeviceType::cuda, -1};
  expect_error(forward(call.tensors), ErrorCode::invalid_argument, "v", "device index is -1");
  call.tensors.v.device = {static_cast<DeviceType>(7), 0};
  expect_error(forward(call.tensors), ErrorCode::invalid_argument, "v", "must be cpu or cuda");
}

TEST(Device, NoBackendTakesFloat32OnAGpu) {
  Call call;
  call.move_to({DeviceType::cuda, 0});
  for (const Backend backend :
       {Backend::automatic, Backend::cpu, Backend::reference, Backend::cuda}) {
    expect_error(forward(call.tensors, {}, {.backend = backend}), ErrorCode::unsupported, "",
                 "no implementation serves: ");
  }
}

TEST(Device, AnAbsentGpuIsRefused) {
  Call call;
  call.move_to({DeviceType::cuda, 1000});
  for (TensorSpec* spec :
       {static_cast<TensorSpec*>(&call.tensors.q), static_cast<TensorSpec*>(&call.tensors.k),
        static_cast<TensorSpec*>(&call.tensors.v), static_cast<TensorSpec*>(&call.tensors.o)}) {
    spec->dtype = DType::bf16;
  }
  expect_error(forward(call.tensors), ErrorCode::unsupported, "", "cuda: ");
}

TEST(Device, AStreamIsForTensorsOnAGpu) {
  Call call;
  int no_stream = 0;
  const RunOptions options{.stream = reinterpret_cast<Stream>(&no_stream)};
  expect_error(forward(call.tensors, {}, {}, options), ErrorCode::invalid_argument, "stream",
               "on the host");
}

TEST(Device, HostTensorsAreNotForTheCudaBackend) {
  Call call;
  expect_error(forward(call.tensors, {}, {.backend = Backend::cuda}), ErrorCode::unsupported, "",
               "no implementation serves: cuda: ");
}

TEST(Device, HostPlansHaveNoDeviceStatus) {
  Call call;
  const auto planned = plan(make_problem(call.tensors));
  ASSERT_TRUE(planned.ok());
  EXPECT_TRUE(planned->device_status({}).ok());
  EXPECT_EQ(planned->info().grid, 0);
  EXPECT_EQ(planned->info().operand_bytes.value, 4 * 64 * 4);
  EXPECT_FALSE(Plan().device_status({}).ok());
}

}  // namespace
}  // namespace abacist::testing
