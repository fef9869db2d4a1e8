// Every argument error is named before anything runs, and outputs stay as they were.
#include <gtest/gtest.h>

#include <limits>

#include "abacist/abacist.hpp"
#include "support/case.hpp"
#include "unit/good.hpp"

namespace abacist::testing {
namespace {

constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();

TEST(Validation, TheGoodCallsAreGood) {
  for (const bool varlen : {false, true}) {
    Good good = varlen ? Good(varlen_case()) : Good();
    const auto f = forward(good.forward, good.options, {.backend = Backend::reference});
    EXPECT_TRUE(f.ok()) << to_string(f.error());
    const auto b = backward(good.backward, good.options, {.backend = Backend::reference});
    EXPECT_TRUE(b.ok()) << to_string(b.error());
  }
}

TEST(Validation, AbsentOperands) {
  expect_forward_error("q", "absent", [](Good& g) { g.forward.q = {}; });
  expect_forward_error("k", "absent", [](Good& g) { g.forward.k = {}; });
  expect_forward_error("v", "absent", [](Good& g) { g.forward.v = {}; });
  expect_forward_error("o", "absent", [](Good& g) { g.forward.o = {}; });
  expect_backward_error("o", "absent", [](Good& g) { g.backward.o = {}; });
  expect_backward_error("lse", "absent", [](Good& g) { g.backward.lse = {}; });
  expect_backward_error("d_o", "absent", [](Good& g) { g.backward.d_o = {}; });
  expect_backward_error("dq", "absent", [](Good& g) { g.backward.dq = {}; });
  expect_backward_error("dk", "absent", [](Good& g) { g.backward.dk = {}; });
  expect_backward_error("dv", "absent", [](Good& g) { g.backward.dv = {}; });
}

TEST(Validation, NullData) {
  expect_forward_error("q", "null", [](Good& g) { g.forward.q.data = nullptr; });
  expect_forward_error("v", "null", [](Good& g) { g.forward.v.data = nullptr; });
  expect_forward_error("o", "null", [](Good& g) { g.forward.o.data = nullptr; });
  expect_forward_error("lse", "null", [](Good& g) { g.forward.lse.data = nullptr; });
  expect_backward_error("d_o", "null", [](Good& g) { g.backward.d_o.data = nullptr; });
  expect_backward_error("dk", "null", [](Good& g) { g.backward.dk.data = nullptr; });
  const Case c = varlen_case();
  expect_forward_error(
      "cu_seqlens_q", "null", [](Good& g) { g.forward.cu_seqlens_q.data = nullptr; }, &c);
  expect_forward_error(
      "cu_seqlens_k", "null", [](Good& g) { g.forward.cu_seqlens_k.data = nullptr; }, &c);
}

TEST(Validation, MisalignedData) {
  const auto shift = [](auto& tensor) {
    using Void = std::remove_pointer_t<decltype(tensor.data)>;
    using Byte = std::conditional_t<std::is_const_v<Void>, const std::byte, std::byte>;
    tensor.data = static_cast<Byte*>(tensor.data) + 2;
  };
  expect_forward_error("k", "aligned", [&](Good& g) { shift(g.forward.k); });
  expect_forward_error("o", "aligned", [&](Good& g) { shift(g.forward.o); });
  expect_backward_error("dv", "aligned", [&](Good& g) { shift(g.backward.dv); });
}

TEST(Validation, Ranks) {
  expect_forward_error("q", "[b, s, h, d]", [](Good& g) { g.forward.q.rank = 3; });
  expect_forward_error("q", "rank is -1", [](Good& g) { g.forward.q.rank = -1; });
  expect_forward_error("k", "rank is 5", [](Good& g) { g.forward.k.rank = 5; });
  expect_forward_error("v", "[b, s, h, d]", [](Good& g) { g.forward.v.rank = 1; });
  expect_forward_error("o", "[b, s_q, h_q, d_v]", [](Good& g) { g.forward.o.rank = 2; });
  expect_forward_error("lse", "[b, h_q, s_q]", [](Good& g) { g.forward.lse.rank = 2; });
  const Case c = varlen_case();
  expect_forward_error(
      "cu_seqlens_k", "absent", [](Good& g) { g.forward.cu_seqlens_k = {}; }, &c);
  expect_forward_error(
      "q", "[b, s, h, d]", [](Good& g) { g.forward.cu_seqlens_q = g.forward.cu_seqlens_k = {}; },
      &c);
}

TEST(Validation, Shapes) {
  expect_forward_error("q", "outside", [](Good& g) { g.forward.q.shape[1] = -1; });
  expect_forward_error("k", "outside", [](Good& g) { g.forward.k.shape[0] = kLargest; });
  expect_forward_error("k", "[b, s_k, h_k, d_qk]", [](Good& g) { g.forward.k.shape[3] = 2; });
  expect_forward_error("k", "[b, s_k, h_k, d_qk]", [](Good& g) { g.forward.k.shape[0] = 1; });
  expect_forward_error("v", "[b, s_k, h_k, d_v]", [](Good& g) { g.forward.v.shape[1] = 4; });
  expect_forward_error("v", "[b, s_k, h_k, d_v]", [](Good& g) { g.forward.v.shape[2] = 1; });
  expect_forward_error("o", "[b, s_q, h_q, d_v]", [](Good& g) { g.forward.o.shape[2] = 2; });
  expect_forward_error("lse", "[b, h_q, s_q]", [](Good& g) {
    std::swap(g.forward.lse.shape[1], g.forward.lse.shape[2]);
    g.forward.lse.shape[1] = 3;
  });
  expect_backward_error("dq", "the shape of q", [](Good& g) { g.backward.dq.shape[1] = 3; });
  expect_backward_error("dk", "the shape of k", [](Good& g) { g.backward.dk.shape[3] = 1; });
  expect_backward_error("dv", "the shape of v", [](Good& g) { g.backward.dv.shape[2] = 1; });
  expect_backward_error("d_o", "[b, s_q, h_q, d_v]", [](Good& g) { g.backward.d_o.shape[0] = 1; });
  expect_backward_error("d_lse", "[b, h_q, s_q]",
                        [](Good& g) { g.backward.d_lse = g.backward.d_o; });
}

// Edge case 14: 3 query heads over 2 key/value heads.
TEST(Validation, HeadsMustDivide) {
  const auto heads = [](std::int64_t h_q, std::int64_t h_k) {
    return [=](Good& g) {
      g.forward.q.shape[2] = g.forward.o.shape[2] = g.forward.lse.shape[1] = h_q;
      g.forward.k.shape[2] = g.forward.v.shape[2] = h_k;
    };
  };
  expect_forward_error("k", "must divide h_q = 3", heads(3, 2));
  expect_forward_error("k", "must divide h_q = 2", heads(2, 0));
  expect_forward_error("k", "must divide h_q = 1", heads(1, 2));
}

// Edge case 21: a head dimension of 0 is refused.
TEST(Validation, HeadDimensionZero) {
  expect_forward_error("q", "at least 1",
                       [](Good& g) { g.forward.q.shape[3] = g.forward.k.shape[3] = 0; });
  expect_forward_error("v", "at least 1",
                       [](Good& g) { g.forward.v.shape[3] = g.forward.o.shape[3] = 0; });
}

TEST(Validation, DataTypes) {
  expect_forward_error("q", "floating-point", [](Good& g) { g.forward.q.dtype = DType::i32; });
  expect_forward_error("o", "floating-point", [](Good& g) { g.forward.o.dtype = DType::i32; });
  expect_forward_error("alibi_slopes", "floating-point", [](Good& g) {
    static const float slopes[4] = {};
    g.forward.alibi_slopes = {slopes, contiguous(DType::i32, {4})};
  });
  const Case c = varlen_case();
  for (const DType dtype : {DType::f32, DType::f64}) {
    expect_forward_error(
        "cu_seqlens_q", "i32", [dtype](Good& g) { g.forward.cu_seqlens_q.dtype = dtype; }, &c);
  }
}

TEST(Validation, ProductsAndStridesThatOverflow) {
  const std::int64_t huge = std::int64_t{1} << 40;
  expect_forward_error("q", "overflow", [&](Good& g) { g.forward.q.shape = {huge, huge, 2, 3}; });
  expect_forward_error("q", "overflow", [](Good& g) { g.forward.q.stride[0] = kLargest; });
  expect_forward_error("k", "overflow", [](Good& g) {
    g.forward.k.stride[1] = std::numeric_limits<std::int64_t>::min();
  });
  expect_forward_error("o", "overflow", [](Good& g) { g.forward.o.stride[1] = kLargest / 4; });
  // contiguous() of an overflowing shape must not look valid.
  expect_forward_error("q", "overflow", [&](Good& g) {
    g.forward.q = {g.forward.q.data, contiguous(DType::f32, {huge, huge, huge, huge})};
  });
}

/// Lengths in the billions with nothing in them: planned or refused, but without overflow (UBSan).
TEST(Validation, AbsurdButEmptyProblems) {
  const std::int64_t huge = std::int64_t{1} << 40;
  const Extents shapes[] = {{huge, 0, huge, 4},
                            {0, huge, huge, 4},
                            {huge, huge, 0, 4},
                            {huge, 0, 4, huge},
                            {1, huge, 0, 1}};
  for (const Extents& shape : shapes) {
    const auto spec = contiguous(DType::f32, {shape[0], shape[1], shape[2], shape[3]});
    ForwardTensors t;
    t.q = t.k = t.v = {nullptr, spec};
    t.o = {nullptr, spec};
    for (const Backend backend : {Backend::automatic, Backend::reference}) {
      const auto planned = plan(make_problem(t), {.backend = backend});
      if (planned.ok()) {
        EXPECT_EQ(planned->info().flops.value, 0);
      }
    }
  }
}

TEST(Validation, PlansOfProblemsBeyondAnyMachineDoNotOverflow) {
  const std::int64_t huge = std::int64_t{1} << 38;
  const auto spec = contiguous(DType::f32, {1, huge, 1, 1});
  ForwardTensors t;
  t.q = t.k = t.v = {nullptr, spec};
  t.o = {nullptr, spec};
  for (const Backend backend : {Backend::automatic, Backend::reference}) {
    const auto planned = plan(make_problem(t), {.backend = backend});
    if (!planned.ok()) continue;  // a refusal is fine
    EXPECT_GT(planned->info().visible_pairs.value, 0);
    EXPECT_GT(planned->info().flops.value, 0);
    EXPECT_GT(planned->info().slow_memory_bytes.value, 0);
  }
}

TEST(Validation, OutputsThatWriteAnElementTwice) {
  expect_forward_error("o", "twice", [](Good& g) { g.forward.o.stride[1] = 0; });
  expect_forward_error("lse", "twice", [](Good& g) { g.forward.lse.stride[2] = 0; });
  expect_backward_error("dq", "twice", [](Good& g) { g.backward.dq.stride[0] = 0; });
  expect_backward_error("dk", "twice", [](Good& g) { g.backward.dk.stride[3] = 0; });
  expect_backward_error("dv", "twice", [](Good& g) { g.backward.dv.stride[2] = 1; });
}

TEST(Validation, OutputsThatOverlap) {
  expect_forward_error("o", "overlaps q",
                       [](Good& g) { g.forward.o.data = const_cast<void*>(g.forward.q.data); });
  expect_forward_error("lse", "overlaps v", [](Good& g) {
    g.forward.lse.data =
        const_cast<std::byte*>(static_cast<const std::byte*>(g.forward.v.data) + 4);
  });
  expect_forward_error("o", "overlaps lse", [](Good& g) { g.forward.lse.data = g.forward.o.data; });
  expect_backward_error("dq", "overlaps d_o", [](Good& g) {
    g.backward.dq.data = const_cast<void*>(g.backward.d_o.data);
  });
  expect_backward_error("dk", "overlaps dv",
                        [](Good& g) { g.backward.dv.data = g.backward.dk.data; });
  const Case c = varlen_case();
  expect_forward_error(
      "o", "overlaps cu_seqlens_q",
      [](Good& g) { g.forward.o.data = const_cast<void*>(g.forward.cu_seqlens_q.data); }, &c);
}

TEST(Validation, MaskAndScore) {
  expect_forward_error("mask.window.left", "-1", [](Good& g) { g.options.mask.window.left = -1; });
  expect_forward_error("mask.window.right", "-7",
                       [](Good& g) { g.options.mask.window.right = -7; });
  for (const double bad : {std::numeric_limits<double>::infinity(),
                           std::numeric_limits<double>::quiet_NaN(), 1e39, -1e39}) {
    expect_forward_error("score.scale", "finite", [bad](Good& g) { g.options.score.scale = bad; });
  }
  for (const double bad : {-1.0, std::numeric_limits<double>::infinity(),
                           std::numeric_limits<double>::quiet_NaN(), 1e39}) {
    expect_forward_error("score.softcap", "must be 0",
                         [bad](Good& g) { g.options.score.softcap = bad; });
  }
  expect_forward_error("alibi_slopes", "[h_q]", [](Good& g) {
    static const float slopes[8] = {};
    g.forward.alibi_slopes = {slopes, contiguous(DType::f32, {3})};
  });
  expect_forward_error("alibi_slopes", "[b, h_q]", [](Good& g) {
    static const float slopes[8] = {};
    g.forward.alibi_slopes = {slopes, contiguous(DType::f32, {1, 4})};
  });
}

// Edge case 28: malformed cu_seqlens on the host are rejected.
TEST(Validation, CumulativeLengths) {
  const Case c = varlen_case();
  const auto with = [](std::vector<std::int32_t> cu) {
    return [cu = std::move(cu)](Good& g) {
      std::copy(cu.begin(), cu.end(),
                static_cast<std::int32_t*>(const_cast<void*>(g.forward.cu_seqlens_q.data)));
    };
  };
  expect_forward_error("cu_seqlens_q", "must be 0", with({1, 3, 3, 5}), &c);
  expect_forward_error("cu_seqlens_q", "less than", with({0, 3, 2, 5}), &c);
  expect_forward_error("cu_seqlens_q", "less than", with({0, -1, 3, 5}), &c);
  expect_forward_error("cu_seqlens_q", "past the 5 rows", with({0, 3, 3, 6}), &c);
  expect_forward_error("cu_seqlens_q", "length over max_lengths = 3", with({0, 4, 4, 5}), &c);
  expect_forward_error(
      "cu_seqlens_k", "entries", [](Good& g) { g.forward.cu_seqlens_k.shape[0] = 3; }, &c);
  expect_forward_error(
      "cu_seqlens_k", "contiguous", [](Good& g) { g.forward.cu_seqlens_k.stride[0] = 2; }, &c);
  expect_forward_error(
      "cu_seqlens_k", "contiguous", [](Good& g) { g.forward.cu_seqlens_k.shape[0] = 0; }, &c);
  expect_forward_error(
      "max_lengths.s_q", "-1", [](Good& g) { g.options.max_lengths.s_q = -1; }, &c);
  expect_forward_error(
      "cu_seqlens_k", "length over max_lengths = 2", [](Good& g) { g.options.max_lengths.s_k = 2; },
      &c);
}

TEST(Validation, ThreadsMustNotBeNegative) {
  Good good;
  expect_error(forward(good.forward, good.options, {.threads = -1}), "threads", "at least 0");
}

TEST(Validation, PlanRefusesOtherTensorsThanItsOwn) {
  Good good;
  const auto planned =
      plan(make_problem(good.forward, good.options), {.backend = Backend::reference});
  ASSERT_TRUE(planned.ok());
  std::vector<std::byte> memory(planned->info().workspace_bytes + 512);
  void* data = memory.data();
  std::size_t space = memory.size();
  std::align(kWorkspaceAlignment, planned->info().workspace_bytes, data, space);
  const RunOptions run{.workspace = {data, planned->info().workspace_bytes}};
  ForwardTensors other = good.forward;
  other.q.stride[0] += 1;
  expect_error(planned->run(other, run), "tensors", "other");
  expect_error(planned->run(good.backward, run), "tensors", "other pass");
  expect_untouched(good);
  EXPECT_TRUE(planned->run(good.forward, run).ok());
}

TEST(Validation, Workspace) {
  Good good;
  const auto planned =
      plan(make_problem(good.forward, good.options), {.backend = Backend::reference});
  ASSERT_TRUE(planned.ok());
  const std::size_t bytes = planned->info().workspace_bytes;
  ASSERT_GT(bytes, 0u);
  std::vector<std::byte> memory(bytes + 1024);
  void* data = memory.data();
  std::size_t space = memory.size();
  std::align(kWorkspaceAlignment, bytes + 256, data, space);
  expect_error(planned->run(good.forward), "workspace", "has 0 bytes");
  expect_error(planned->run(good.forward, {.workspace = {data, bytes - 1}}), "workspace", "needs");
  expect_error(
      planned->run(good.forward, {.workspace = {static_cast<std::byte*>(data) + 8, bytes}}),
      "workspace", "aligned");
  expect_untouched(good);
}

TEST(Validation, WorkspaceApartFromTheOperands) {
  Good good;
  for (const Backend backend : {Backend::cpu, Backend::reference}) {
    const auto planned = plan(make_problem(good.forward, good.options), {.backend = backend});
    ASSERT_TRUE(planned.ok());
    const std::size_t bytes = planned->info().workspace_bytes;
    std::vector<std::byte> memory(bytes + 4096, std::byte{0x7f});
    void* data = memory.data();
    std::size_t space = memory.size();
    std::align(kWorkspaceAlignment, bytes + 2048, data, space);
    const RunOptions run{.workspace = {data, bytes + 2048}};
    ForwardTensors t = good.forward;
    t.o.data = static_cast<std::byte*>(data) + bytes - 4;
    expect_error(planned->run(t, run), "o", "overlaps workspace");
    t = good.forward;
    t.q.data = data;
    expect_error(planned->run(t, run), "workspace", "overlaps q");
    expect_untouched(good);
    for (const std::byte b : memory) ASSERT_EQ(b, std::byte{0x7f});
    t.q.data = static_cast<std::byte*>(data) + bytes;  // past what the plan uses
    EXPECT_TRUE(planned->run(t, run).ok());
    good = Good();
  }
}

// For the undefined behaviour sanitizer: no offset of a head may be added to a null pointer.
TEST(Validation, NoKeysNeedNoData) {
  Good good(Case{.h_k = 2, .s_q = 3, .s_k = 0});
  good.forward.k.data = good.forward.v.data = nullptr;
  good.backward.k.data = good.backward.v.data = nullptr;
  good.backward.dk.data = good.backward.dv.data = nullptr;
  EXPECT_TRUE(forward(good.forward, good.options, {.backend = Backend::cpu}).ok());
  EXPECT_TRUE(backward(good.backward, good.options, {.backend = Backend::cpu}).ok());
  for (const double value : good.results.o.values()) EXPECT_EQ(value, 0.0);
  for (const double value : good.gradients.dq.values()) EXPECT_EQ(value, 0.0);
}

TEST(Validation, AnEmptyPlanIsAnErrorToRun) {
  const Good good;
  const Plan none;
  expect_error(none.run(good.forward), "plan", "empty");
  expect_error(none.run(good.backward), "plan", "empty");
  EXPECT_EQ(none.info().workspace_bytes, 0u);
  EXPECT_FALSE(none.problem().operands.q.present());
}

TEST(Validation, ValuesThatNoEnumHas) {
  expect_forward_error("mask.align", "is 9",
                       [](Good& g) { g.options.mask.align = static_cast<Align>(9); });
  expect_forward_error("k", "dtype is 77", [](Good& g) { g.forward.k.dtype = DType{77}; });
  expect_backward_error("dv", "dtype is 6", [](Good& g) { g.backward.dv.dtype = DType{6}; });
  const Good good;
  Problem problem = make_problem(good.forward, good.options);
  problem.pass = static_cast<Pass>(7);
  expect_error(validate(problem), "pass", "is 7");
}

TEST(Validation, FactorsBelowTheNormalFloatsAreRefused) {
  Good good;
  for (const bool softcap : {false, true}) {
    Options options = good.options;
    if (softcap) options.score.softcap = 1e-50;
    if (!softcap) options.score.scale = -1e-44;
    const Status status = forward(good.forward, options, {.backend = Backend::cpu});
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code, ErrorCode::unsupported);
    EXPECT_NE(status.error().message.find(softcap ? "softcap is 1e-50" : "scale is -1e-44"),
              std::string::npos)
        << status.error().message;
  }
  expect_untouched(good);
}

TEST(Validation, MergeChecksItsArguments) {
  Good good;
  ForwardTensors& t = good.forward;
  Buffer lse(DType::f32, {2, 4, 4});
  lse.fill(0.0);
  Buffer o(DType::f32, {2, 4, 4, 2});
  o.fill(0.0);
  const Partial fine{o.in(), lse.in()};
  const auto expect = [&](const std::string& says, std::vector<Partial> parts, const Tensor& to,
                          const Tensor& to_lse) {
    const Status status = merge(parts, to, to_lse);
    ASSERT_FALSE(status.ok()) << says;
    EXPECT_NE(to_string(status.error()).find(says), std::string::npos) << to_string(status.error());
  };
  EXPECT_TRUE(merge(std::vector<Partial>{fine, fine}, t.o, t.lse).ok());
  Buffer wrong(DType::f32, {2, 4, 4, 3});
  Partial bad = fine;
  bad.o = wrong.in();
  expect("shape", {fine, bad}, t.o, t.lse);
  bad = fine;
  bad.o.data = nullptr;
  expect("null", {bad}, t.o, t.lse);
  bad = fine;
  bad.lse = {};
  expect("lse", {bad}, t.o, t.lse);
  Tensor stuck = t.o;
  stuck.stride[1] = 0;
  expect("twice", {fine}, stuck, t.lse);
  expect("overlap", {fine}, o.out(), t.lse);
}

}  // namespace
}  // namespace abacist::testing
