// Every refusal of the CUDA backend, and what its plans say: a function of the problem and of facts
// about the GPU, so that no GPU is needed here.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <iterator>

#include "api/validate.hpp"
#include "cuda/backend/decline.hpp"
#include "cuda/backend/plan.hpp"

namespace abacist::testing {
namespace {

const Device kGpu{DeviceType::cuda, 0};

cuda::DeviceFacts h200() {
  return {.index = 0, .name = "NVIDIA H200", .capability = 90, .multiprocessors = 132};
}

/// A problem that the kernel takes: bf16 [2, 380, 8 / 2, 128].
Problem good() {
  Problem p;
  Operands& x = p.operands;
  x.q = contiguous(DType::bf16, {2, 380, 8, 128}, kGpu);
  x.k = contiguous(DType::bf16, {2, 500, 2, 128}, kGpu);
  x.v = contiguous(DType::bf16, {2, 500, 2, 128}, kGpu);
  x.o = x.q;
  x.lse = contiguous(DType::f32, {2, 8, 380}, kGpu);
  return p;
}

Result<core::Draft> plan_of(const Problem& problem, const cuda::DeviceFacts& device = h200()) {
  const auto resolved = api::resolve(problem);
  if (!resolved) {
    ADD_FAILURE() << "not a valid problem: " << to_string(resolved.error());
    return resolved.error();
  }
  return cuda::plan_on(resolved.value(), device);
}

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

TEST(CudaPlan, TakesTheGoodProblem) {
  const auto draft = plan_of(good());
  ASSERT_TRUE(draft.ok()) << to_string(draft.error());
  const PlanInfo& info = draft->info;
  EXPECT_EQ(info.kernel, "cuda.forward.sm90.bf16.d128x128");
  EXPECT_GE(info.rows, 64);
  EXPECT_GE(info.keys, 16);
  EXPECT_EQ(info.work_items, 2 * 8 * ((380 + info.rows - 1) / info.rows));
  EXPECT_EQ(info.grid, std::min<std::int64_t>(132, info.work_items));
  EXPECT_EQ(info.threads % 128, 0);
  EXPECT_EQ(info.splits, 1);
  EXPECT_TRUE(info.deterministic);
  EXPECT_EQ(info.visible_pairs.value, std::int64_t{2} * 8 * 380 * 500);
  EXPECT_EQ(info.flops.value, info.visible_pairs.value * 4 * 128);
  // Q, O and LSE once; K and V once for each query tile.
  const std::int64_t tiles = info.work_items;
  EXPECT_TRUE(info.slow_memory_bytes.exact);
  EXPECT_EQ(info.slow_memory_bytes.value,
            std::int64_t{2} * 8 * 380 * (2 * 128 * 2 + 4) + tiles * 500 * 2 * 128 * 2);
}

TEST(CudaPlan, CausalTilesLoadWhatTheySee) {
  Problem problem = good();
  problem.options.mask.causal = true;
  const auto draft = plan_of(problem);
  ASSERT_TRUE(draft.ok()) << to_string(draft.error());
  const PlanInfo& info = draft->info;
  std::int64_t keys = 0;
  for (std::int64_t row = 0; row < 380; row += info.rows) {
    const std::int64_t last = std::min<std::int64_t>(row + info.rows, 380) - 1;
    const std::int64_t end = last + 120 + 1;  // bottom-right: shift 120
    keys += std::min<std::int64_t>((end + info.keys - 1) / info.keys * info.keys, 500);
  }
  EXPECT_EQ(info.slow_memory_bytes.value,
            std::int64_t{2} * 8 * (380 * (2 * 128 * 2 + 4) + keys * 2 * 128 * 2));
}

/// bf16 [b, s_q, h_q / h_k, 128] against s_k keys.
Problem grouped(std::int64_t b, std::int64_t h_q, std::int64_t h_k, std::int64_t s_q,
                std::int64_t s_k) {
  Problem p;
  Operands& x = p.operands;
  x.q = x.o = contiguous(DType::bf16, {b, s_q, h_q, 128}, kGpu);
  x.k = x.v = contiguous(DType::bf16, {b, s_k, h_k, 128}, kGpu);
  return p;
}

bool is_packed(const PlanInfo& info) { return info.kernel.ends_with(".packed"); }

TEST(CudaPlan, HeadsArePackedWhereThatTakesLessTime) {
  const struct {
    std::int64_t b, h_q, h_k, s_q;
    std::int64_t tiles;  // of a sequence; 0: heads are not packed
  } cases[] = {
      {16, 64, 8, 1, 8},
      {16, 64, 8, 16, 8},
      {16, 64, 8, 17, 16},
      {16, 64, 8, 64, 32},
      {16, 64, 8, 100, 56},
      {16, 64, 8, 128, 0},
      {16, 64, 8, 129, 72},
      {16, 64, 8, 4096, 0},
      {16, 8, 8, 1, 0},
      {16, 12, 4, 42, 4},
      {16, 71, 1, 1, 2},
      {16, 128, 1, 1, 2},
      {16, 128, 1, 3, 4},
      {16, 32, 1, 4, 1},
      // All in one wave: few queries are packed to load less, 64 would keep two warpgroups busy.
      {1, 64, 8, 1, 8},
      {1, 64, 8, 64, 0},
      {1, 64, 8, 100, 56}};
  for (const auto& [b, h_q, h_k, s_q, tiles] : cases) {
    const auto draft = plan_of(grouped(b, h_q, h_k, s_q, 1000));
    ASSERT_TRUE(draft.ok()) << to_string(draft.error());
    const PlanInfo& info = draft->info;
    const std::string what = std::to_string(b) + " x " + std::to_string(h_q) + "/" +
                             std::to_string(h_k) + " heads, s_q " + std::to_string(s_q) + ": " +
                             info.kernel;
    EXPECT_EQ(is_packed(info), tiles > 0) << what;
    const std::int64_t expected = tiles > 0 ? tiles : h_q * ((s_q + 127) / 128);
    EXPECT_EQ(info.work_items, b * expected) << what;
    EXPECT_EQ(info.grid, std::min<std::int64_t>(132, b * expected)) << what;
    // Q and O once, K and V once for each tile.
    EXPECT_EQ(info.slow_memory_bytes.value,
              b * (h_q * s_q * 2 * 128 * 2 + expected * 1000 * 2 * 128 * 2))
        << what;
    EXPECT_TRUE(info.slow_memory_bytes.exact);
  }
}

TEST(CudaPlan, PackedCausalTilesLoadWhatTheySee) {
  Problem problem = grouped(16, 12, 2, 50, 700);  // groups of 6: 10 positions a warpgroup
  problem.options.mask.causal = true;
  const auto draft = plan_of(problem);
  ASSERT_TRUE(draft.ok()) << to_string(draft.error());
  ASSERT_TRUE(is_packed(draft->info));
  std::int64_t keys = 0;  // positions 0 .. 19, 20 .. 39, 40 .. 49, each with 650 keys before
  for (const std::int64_t end : {670, 690, 700}) {
    keys += std::min<std::int64_t>((end + 127) / 128 * 128, 700);
  }
  EXPECT_EQ(draft->info.slow_memory_bytes.value,
            16 * (12 * 50 * 2 * 128 * 2 + 2 * keys * 2 * 128 * 2));
}

TEST(CudaPlan, ShortSequencesAreReadKeyByKey) {
  Problem problem = grouped(1000, 6, 3, 20, 40);
  problem.options.mask.causal = true;
  const auto draft = plan_of(problem);
  ASSERT_TRUE(draft.ok()) << to_string(draft.error());
  const PlanInfo& info = draft->info;
  EXPECT_EQ(info.kernel, "cuda.forward.sm90.bf16.d128x128.short");
  EXPECT_EQ(info.rows, 16);
  EXPECT_EQ(info.work_items, 1000 * 6 * 2);
  EXPECT_EQ(info.grid * (info.threads / 32), 1000 * 6 * 2);
  // Rows 0 .. 15 see keys up to 35, rows 16 .. 19 all 40. A bound: heads of a group share the L1.
  EXPECT_FALSE(info.slow_memory_bytes.exact);
  EXPECT_EQ(info.slow_memory_bytes.value,
            std::int64_t{1000} * 6 * (20 * 2 * 128 * 2 + (36 + 40) * 2 * 128 * 2));
  const auto alone = plan_of(grouped(1000, 6, 6, 20, 40));
  ASSERT_TRUE(alone.ok()) << to_string(alone.error());
  EXPECT_TRUE(alone->info.slow_memory_bytes.exact);
  for (const auto& [s_q, s_k] : {std::pair{65, 64}, {64, 65}}) {
    const auto longer = plan_of(grouped(1000, 6, 6, s_q, s_k));
    ASSERT_TRUE(longer.ok()) << to_string(longer.error());
    EXPECT_EQ(longer->info.kernel, "cuda.forward.sm90.bf16.d128x128");
  }
}

TEST(CudaPlan, PackingCountsTheTilesOfAllSequences) {
  Problem p;  // one prompt among sequences of one token
  Operands& x = p.operands;
  x.q = x.o = contiguous(DType::bf16, {4096 + 63, 64, 128}, kGpu);
  x.k = x.v = contiguous(DType::bf16, {100'000, 8, 128}, kGpu);
  x.cu_seqlens_q = x.cu_seqlens_k = contiguous(DType::i32, {65}, kGpu);
  p.options.max_lengths = {4096, 8192};
  const auto mixed = plan_of(p);
  ASSERT_TRUE(mixed.ok()) << to_string(mixed.error());
  EXPECT_TRUE(is_packed(mixed->info));
  x.q = x.o = contiguous(DType::bf16, {64 * 4096, 64, 128}, kGpu);  // prompts alone
  const auto prompts = plan_of(p);
  ASSERT_TRUE(prompts.ok()) << to_string(prompts.error());
  EXPECT_FALSE(is_packed(prompts->info));
}

TEST(CudaPlan, EveryMultipleOfEightUpTo256HasAKernel) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (std::int64_t d_qk = 8; d_qk <= 256; d_qk += 8) {
      for (std::int64_t d_v = 8; d_v <= 256; d_v += 8) {
        for (const std::int64_t s : {std::int64_t{100}, std::int64_t{10'000}}) {
          Problem p;
          p.operands.q = contiguous(dtype, {1, s, 2, d_qk}, kGpu);
          p.operands.k = p.operands.q;
          p.operands.v = p.operands.o = contiguous(dtype, {1, s, 2, d_v}, kGpu);
          const auto draft = plan_of(p);
          ASSERT_TRUE(draft.ok()) << d_qk << "/" << d_v << ": " << to_string(draft.error());
          const PlanInfo& info = draft->info;
          EXPECT_EQ(info.workspace_bytes, 0u);
          EXPECT_NE(info.kernel.find(dtype == DType::f16 ? ".f16." : ".bf16."), std::string::npos);
        }
      }
    }
  }
}

/// Ten sequences of 1,000 queries and 2,000 keys in all.
Problem ragged() {
  Problem p;
  Operands& x = p.operands;
  x.q = x.o = contiguous(DType::f16, {1000, 4, 64}, kGpu);
  x.k = x.v = contiguous(DType::f16, {2000, 4, 64}, kGpu);
  x.cu_seqlens_q = x.cu_seqlens_k = contiguous(DType::i32, {11}, kGpu);
  return p;
}

TEST(CudaPlan, RaggedLengthsGiveBoundsAndAStatusWord) {
  Problem p = ragged();
  p.options.max_lengths = {300, 700};
  const auto varlen = plan_of(p);
  ASSERT_TRUE(varlen.ok()) << to_string(varlen.error());
  EXPECT_EQ(varlen->info.workspace_bytes, 256u);
  EXPECT_FALSE(varlen->info.slow_memory_bytes.exact);
  EXPECT_FALSE(varlen->info.flops.exact);

  Problem dense = good();
  dense.operands.key_lengths = contiguous(DType::i32, {2}, kGpu);
  const auto lengths = plan_of(dense);
  ASSERT_TRUE(lengths.ok()) << to_string(lengths.error());
  EXPECT_EQ(lengths->info.workspace_bytes, 256u);
  EXPECT_FALSE(lengths->info.slow_memory_bytes.exact);
}

/// Tiles are loaded whole, whatever lies behind a sequence's end: a bound that leaves that out is
/// none.
TEST(CudaPlan, BoundsCountWholeTiles) {
  Problem p = ragged();
  p.options.max_lengths = {100, 200};
  const auto draft = plan_of(p);
  ASSERT_TRUE(draft.ok()) << to_string(draft.error());
  ASSERT_EQ(draft->info.rows, 128);
  ASSERT_EQ(draft->info.keys, 128);
  const std::int64_t tiles = 10 * 4;  // one of each sequence and head
  const std::int64_t q = tiles * 128 * 64 * 2, o = 1000 * 4 * 64 * 2;
  EXPECT_EQ(draft->info.slow_memory_bytes.value, q + o + tiles * 256 * 2 * 64 * 2);

  p.options.max_lengths = {40, 60};  // read row by row
  const auto brief = plan_of(p);
  ASSERT_TRUE(brief.ok()) << to_string(brief.error());
  ASSERT_TRUE(brief->info.kernel.ends_with(".short"));
  const std::int64_t sixteens = std::min<std::int64_t>(1000 / 16 + 10, 10 * 3) * 4;
  EXPECT_EQ(brief->info.slow_memory_bytes.value, 2 * o + sixteens * 60 * 2 * 64 * 2);
}

/// 71 heads are two boxes of 36; the last one of all ends with the tensor.
TEST(CudaPlan, HeadsLoadedBesideTheGroupCount) {
  const auto draft = plan_of(grouped(16, 142, 2, 1, 1000));
  ASSERT_TRUE(draft.ok()) << to_string(draft.error());
  ASSERT_TRUE(is_packed(draft->info));
  EXPECT_EQ(draft->info.slow_memory_bytes.value,
            16 * ((72 + 71 + 142) * 128 * 2 + 4 * 1000 * 2 * 128 * 2));
}

TEST(CudaPlan, NothingToDoIsAPlanToo) {
  for (const Extents& shape : {Extents{0, 300, 8, 128}, {2, 0, 8, 128}, {2, 300, 0, 128}}) {
    Problem p;
    p.operands.q = contiguous(DType::bf16, {shape[0], shape[1], shape[2], shape[3]}, kGpu);
    p.operands.o = p.operands.k = p.operands.v = p.operands.q;
    const auto draft = plan_of(p);
    ASSERT_TRUE(draft.ok()) << to_string(draft.error());
    EXPECT_EQ(draft->info.grid, 0);
    EXPECT_EQ(draft->info.work_items, 0);
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
