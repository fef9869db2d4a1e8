// Every refusal of the CUDA backend: a function of the problem and of facts about the GPU, so that
// no GPU is needed here.
#include <gtest/gtest.h>

#include <functional>
#include <iterator>

#include "cuda/backend/decline.hpp"
#include "cuda/support/problems.hpp"

namespace abacist::testing {
namespace {

/// Spoils the good problem; the refusal must say all of `says`.
void expect_refusal(std::initializer_list<const char*> says,
                    const std::function<void(Problem&)>& spoil) {
  Problem problem = good();
  spoil(problem);
  const auto draft = plan_of(problem);
  ASSERT_FALSE(draft.ok()) << "expected a refusal: " << *says.begin();
  EXPECT_EQ(draft.error().code, ErrorCode::unsupported) << to_string(draft.error());
  for (const char* part : says) {
    EXPECT_NE(draft.error().message.find(part), std::string::npos)
        << draft.error().message << "\n  lacks: " << part;
  }
}

TEST(CudaRefusal, OtherGpus) {
  for (const int capability : {70, 80, 86, 89, 100, 120}) {
    cuda::DeviceFacts other = h200();
    other.capability = capability;
    other.name = "Some GPU";
    const auto draft = plan_of(good(), other);
    ASSERT_FALSE(draft.ok()) << capability;
    EXPECT_EQ(draft.error().code, ErrorCode::unsupported);
    EXPECT_NE(draft.error().message.find("Some GPU"), std::string::npos);
    EXPECT_NE(draft.error().message.find("H200"), std::string::npos);
  }
}

TEST(CudaRefusal, HostTensors) {
  expect_refusal({"on the host"}, [](Problem& p) {
    for (TensorSpec* spec :
         {&p.operands.q, &p.operands.k, &p.operands.v, &p.operands.o, &p.operands.lse}) {
      spec->device = {};
    }
  });
}

TEST(CudaRefusal, BatchInvariantPlans) {
  const auto planned = plan(good(), {.backend = Backend::cuda, .batch_invariant = true});
  ASSERT_FALSE(planned.ok());
  EXPECT_EQ(planned.error().code, ErrorCode::unsupported);
  EXPECT_NE(planned.error().message.find("no batch-invariant plans on a GPU"), std::string::npos)
      << planned.error().message;
}

TEST(CudaRefusal, BackwardPass) {
  expect_refusal({"no backward pass"}, [](Problem& p) {
    p.pass = Pass::backward;
    p.operands.d_o = p.operands.o;
    p.operands.dq = p.operands.q;
    p.operands.dk = p.operands.k;
    p.operands.dv = p.operands.v;
  });
}

TEST(CudaRefusal, Types) {
  expect_refusal({"f32, f32, f32", "all bf16 or all f16"}, [](Problem& p) {
    for (TensorSpec* spec : {&p.operands.q, &p.operands.k, &p.operands.v, &p.operands.o}) {
      spec->dtype = DType::f32;
    }
  });
  expect_refusal({"bf16, f16, bf16"}, [](Problem& p) { p.operands.k.dtype = DType::f16; });
  expect_refusal({"o is f32", "must be bf16"}, [](Problem& p) { p.operands.o.dtype = DType::f32; });
  expect_refusal({"lse is f64", "f32"}, [](Problem& p) { p.operands.lse.dtype = DType::f64; });
  expect_refusal({"alibi_slopes is f16", "f32"},
                 [](Problem& p) { p.operands.alibi_slopes = contiguous(DType::f16, {8}, kGpu); });
  expect_refusal({"sinks is bf16", "f32"},
                 [](Problem& p) { p.operands.sinks = contiguous(DType::bf16, {8}, kGpu); });
}

TEST(CudaRefusal, FeaturesThatTheKernelLacks) {
  expect_refusal({"no dropout"}, [](Problem& p) { p.options.dropout.p = 0.1; });
  expect_refusal({"an additive bias cannot be used"}, [](Problem& p) {
    p.operands.bias = contiguous(DType::f32, {1, 1, 380, 500}, kGpu);
  });
  expect_refusal({"a boolean mask (visible) cannot be used"}, [](Problem& p) {
    p.operands.visible = contiguous(DType::u8, {1, 1, 380, 500}, kGpu);
  });
}

TEST(CudaRefusal, HeadDimensions) {
  const auto with_d = [](std::int64_t d_qk, std::int64_t d_v) {
    return [d_qk, d_v](Problem& p) {
      p.operands.q = contiguous(DType::bf16, {2, 380, 8, d_qk}, kGpu);
      p.operands.k = contiguous(DType::bf16, {2, 500, 2, d_qk}, kGpu);
      p.operands.v = contiguous(DType::bf16, {2, 500, 2, d_v}, kGpu);
      p.operands.o = contiguous(DType::bf16, {2, 380, 8, d_v}, kGpu);
    };
  };
  expect_refusal({"d_qk is 60", "multiple of 8 up to 256"}, with_d(60, 64));
  expect_refusal({"d_v is 1", "multiple of 8 up to 256"}, with_d(64, 1));
  expect_refusal({"d_qk is 264"}, with_d(264, 64));
  expect_refusal({"d_v is 512"}, with_d(64, 512));
}

TEST(CudaRefusal, StridesThatTmaCannotWalk) {
  expect_refusal({"q: strides", "axis 3 has 2", "must be 1"}, [](Problem& p) {
    TensorSpec& q = p.operands.q;
    for (std::size_t axis = 0; axis < 4; ++axis) q.stride[axis] *= 2;
  });
  expect_refusal({"k: strides", "axis 1 has 260", "multiple of 8"}, [](Problem& p) {
    p.operands.k.stride = {130'000, 260, 128, 1};
  });
  expect_refusal({"v: strides", "axis 2 has -128", "from 0"},
                 [](Problem& p) { p.operands.v.stride[2] = -128; });
  expect_refusal({"o: strides", "axis 0 has 389124"},
                 [](Problem& p) { p.operands.o.stride[0] = 380 * 8 * 128 + 4; });
  expect_refusal({"q: strides", "axis 0 has", "2^38"},
                 [](Problem& p) { p.operands.q.stride[0] = std::int64_t{1} << 38; });
  expect_refusal({"lse: strides", "axis 2 has 2", "must be 1"}, [](Problem& p) {
    p.operands.lse.stride = {6080, 760, 2};
  });
  expect_refusal({"lse: strides", "axis 1 has 384", "must be 380"}, [](Problem& p) {
    p.operands.lse.stride = {3072, 384, 1};
  });
  expect_refusal({"alibi_slopes: strides", "axis 0 has 3"}, [](Problem& p) {
    p.operands.alibi_slopes = contiguous(DType::f32, {8}, kGpu);
    p.operands.alibi_slopes.stride[0] = 3;
  });
}

TEST(CudaRefusal, StridesOfSingleElementsMeanNothing) {
  Problem p;
  p.operands.q = contiguous(DType::bf16, {1, 300, 1, 64}, kGpu);
  p.operands.q.stride[0] = 7;
  p.operands.q.stride[2] = -5;
  p.operands.k = p.operands.v = p.operands.q;
  p.operands.o = contiguous(DType::bf16, {1, 300, 1, 64}, kGpu);
  const auto draft = plan_of(p);
  EXPECT_TRUE(draft.ok()) << to_string(draft.error());
}

TEST(CudaRefusal, StridesOfTensorsWithoutElementsMeanNothing) {
  Problem no_keys = good();
  no_keys.operands.k.shape[1] = no_keys.operands.v.shape[1] = 0;
  no_keys.operands.k.stride = no_keys.operands.v.stride = {0, 0, 0, 0};
  Problem nothing = good();
  for (TensorSpec Operands::*each :
       {&Operands::q, &Operands::k, &Operands::v, &Operands::o, &Operands::lse}) {
    (nothing.operands.*each).shape[0] = 0;
    (nothing.operands.*each).stride = {-3, 5, 0, 7};
  }
  for (const Problem& p : {no_keys, nothing}) {
    const auto draft = plan_of(p);
    EXPECT_TRUE(draft.ok()) << to_string(draft.error());
  }
}

TEST(CudaRefusal, BroadcastInputsAreTaken) {
  Problem p = good();
  p.operands.k.stride[0] = 0;
  p.operands.v.stride[2] = 0;
  const auto draft = plan_of(p);
  EXPECT_TRUE(draft.ok()) << to_string(draft.error());
}

TEST(CudaRefusal, ScoresThatFloatCannotHold) {
  expect_refusal({"scale is 1e-40"}, [](Problem& p) { p.options.score.scale = 1e-40; });
  expect_refusal({"scale is -3e+38"}, [](Problem& p) { p.options.score.scale = -3e38; });
  expect_refusal({"softcap is 1e-40"}, [](Problem& p) { p.options.score.softcap = 1e-40; });
  for (const auto& [scale, softcap] :
       {std::pair{1e10, 1e-30}, {-4.0, 0x1p-126}, {1e-10, 1e30}, {-0x1p-126, 4.0}}) {
    expect_refusal({"scale / softcap is "},
                   [&](Problem& p) { p.options.score = {.scale = scale, .softcap = softcap}; });
  }
  expect_refusal({"alibi_slopes are [b, h_q]"}, [](Problem& p) {
    p.operands.alibi_slopes = contiguous(DType::f32, {2, 8}, kGpu);
  });
}

TEST(CudaRefusal, SizesBeyondTheKernels) {
  expect_refusal({"2^28"}, [](Problem& p) {
    p.operands = {};
    p.operands.q = p.operands.o = contiguous(DType::bf16, {1, 1, 1, 64}, kGpu);
    p.operands.k = p.operands.v =
        contiguous(DType::bf16, {1, (std::int64_t{1} << 28) + 1, 1, 64}, kGpu);
  });
  expect_refusal({"query tiles"}, [](Problem& p) {
    p.operands = {};
    const std::int64_t b = std::int64_t{1} << 31;
    p.operands.q = p.operands.o = contiguous(DType::bf16, {b, 1, 1, 64}, kGpu);
    p.operands.k = p.operands.v = contiguous(DType::bf16, {b, 1, 1, 64}, kGpu);
  });
}

/// Numbers of sequences and heads whose products leave 64 bits.
TEST(CudaRefusal, SizesWhoseProductsOverflow) {
  constexpr std::int64_t kMany = std::int64_t{1} << 31;
  const auto ragged = [](std::int64_t b, std::int64_t total, std::int64_t h_q, std::int64_t h_k) {
    return [=](Problem& p) {
      p.operands = {};
      p.operands.q = p.operands.o = contiguous(DType::bf16, {total, h_q, 8}, kGpu);
      p.operands.k = p.operands.v = contiguous(DType::bf16, {total, h_k, 8}, kGpu);
      p.operands.cu_seqlens_q = p.operands.cu_seqlens_k = contiguous(DType::i32, {b + 1}, kGpu);
      p.options.max_lengths = {total, total};
    };
  };
  expect_refusal({"query tiles"}, ragged(std::int64_t{1} << 39, 1 << 28, 64, 1));
  expect_refusal({"query tiles"}, ragged(1 << 29, 1, kMany / 2, 4));
  expect_refusal({"query heads"}, ragged(1, 1, kMany, 1));  // packed, they would be few tiles
}

TEST(CudaErrors, FaultsOfEarlierWorkAreNamedAsSuch) {
  // 700 is cudaErrorIllegalAddress, 2 cudaErrorMemoryAllocation, 1 cudaErrorInvalidValue.
  const Error fault = cuda::device_error(700, "launching");
  EXPECT_EQ(fault.code, ErrorCode::device_error);
  EXPECT_NE(fault.message.find("before this call"), std::string::npos) << fault.message;
  EXPECT_EQ(cuda::device_error(2, "allocating").code, ErrorCode::out_of_memory);
  const Error ours = cuda::device_error(1, "launching");
  EXPECT_EQ(ours.code, ErrorCode::device_error);
  EXPECT_NE(ours.message.find("launching: cudaErrorInvalidValue"), std::string::npos);
}

}  // namespace
}  // namespace abacist::testing
