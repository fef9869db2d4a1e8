// Argument errors of the optional parts of a problem.
#include <gtest/gtest.h>

#include <limits>

#include "unit/good.hpp"

namespace abacist::testing {
namespace {

Case case_with_sinks() {
  return {.b = 2, .h_k = 2, .group = 2, .s_q = 4, .s_k = 5, .d_qk = 3, .d_v = 2, .sinks = true};
}

Case case_with_lengths() {
  Case c{.b = 2, .h_k = 2, .group = 2, .s_q = 4, .s_k = 5, .d_qk = 3, .d_v = 2};
  c.key_lengths = {5, 0};
  return c;
}

TEST(FeatureValidation, TheGoodCallsAreGood) {
  for (const Case& c : {case_with_sinks(), case_with_lengths()}) {
    Good good(c);
    const auto f = forward(good.forward, good.options);
    EXPECT_TRUE(f.ok()) << to_string(f.error());
    const auto b = backward(good.backward, good.options);
    EXPECT_TRUE(b.ok()) << to_string(b.error());
  }
}

TEST(FeatureValidation, Sinks) {
  const Case c = case_with_sinks();
  expect_forward_error(
      "sinks", "shape is [3], must be [h_q] = [4]", [](Good& g) { g.forward.sinks.shape[0] = 3; },
      &c);
  expect_forward_error(
      "sinks", "dtype is i32", [](Good& g) { g.forward.sinks.dtype = DType::i32; }, &c);
  expect_forward_error(
      "sinks", "data is null", [](Good& g) { g.forward.sinks.data = nullptr; }, &c);
  expect_backward_error(
      "d_sinks", "without sinks", [](Good& g) { g.backward.sinks = {}; }, &c);
  expect_backward_error(
      "d_sinks", "must be [h_q]", [](Good& g) { g.backward.d_sinks.rank = 2; }, &c);
  expect_backward_error(
      "d_sinks", "write an element twice", [](Good& g) { g.backward.d_sinks.stride[0] = 0; }, &c);
  expect_backward_error(
      "d_sinks", "overlaps sinks",
      [](Good& g) { g.backward.d_sinks.data = const_cast<void*>(g.backward.sinks.data); }, &c);
}

TEST(FeatureValidation, SinksOfTheCpuBackendAreFloat) {
  Good good(case_with_sinks());
  good.forward.sinks.dtype = DType::f16;
  const Status s = forward(good.forward, good.options, {.backend = Backend::cpu});
  ASSERT_FALSE(s.ok());
  EXPECT_EQ(s.error().code, ErrorCode::unsupported);
  EXPECT_NE(s.error().message.find("sinks is f16; must be f32"), std::string::npos);
}

TEST(FeatureValidation, KeyLengths) {
  const Case c = case_with_lengths();
  const auto with = [](std::int32_t second) {
    return [second](Good& g) {
      static_cast<std::int32_t*>(const_cast<void*>(g.forward.key_lengths.data))[1] = second;
    };
  };
  expect_forward_error("key_lengths", "[1] is 6, must be in [0, s_k = 5]", with(6), &c);
  expect_forward_error("key_lengths", "[1] is -1", with(-1), &c);
  expect_forward_error(
      "key_lengths", "contiguous i32[b]", [](Good& g) { g.forward.key_lengths.stride[0] = 2; }, &c);
  expect_forward_error(
      "key_lengths", "must be [b] = [2]", [](Good& g) { g.forward.key_lengths.shape[0] = 1; }, &c);
  expect_forward_error(
      "key_lengths", "i32[b]", [](Good& g) { g.forward.key_lengths.dtype = DType::f32; }, &c);
  const Case varlen = varlen_case();
  expect_forward_error(
      "key_lengths", "beside cu_seqlens",
      [](Good& g) { g.forward.key_lengths = g.forward.cu_seqlens_k; }, &varlen);
}

Case case_with_pairs() {
  Case c = case_with_sinks();
  c.bias = {.present = true, .h = false};
  c.visible = {.present = true, .b = false, .s = false};
  return c;
}

TEST(FeatureValidation, BiasAndMask) {
  const Case c = case_with_pairs();
  Good good(c);
  EXPECT_TRUE(forward(good.forward, good.options).ok());
  EXPECT_TRUE(backward(good.backward, good.options).ok());
  const char* const shapes = "must be [b|1, h_q|1, s_q|1, s_k] of [2, 4, 4, 5]";
  expect_forward_error(
      "bias", shapes, [](Good& g) { g.forward.bias.shape[1] = 2; }, &c);
  expect_forward_error(
      "bias", shapes, [](Good& g) { g.forward.bias.shape[3] = 1; }, &c);
  expect_forward_error(
      "bias", shapes, [](Good& g) { g.forward.bias.rank = 3; }, &c);
  expect_forward_error(
      "visible", shapes, [](Good& g) { g.forward.visible.shape[0] = 3; }, &c);
  expect_forward_error(
      "bias", "dtype is u8", [](Good& g) { g.forward.bias.dtype = DType::u8; }, &c);
  expect_forward_error(
      "visible", "must be u8", [](Good& g) { g.forward.visible.dtype = DType::i32; }, &c);
  expect_forward_error(
      "q", "dtype is u8", [](Good& g) { g.forward.q.dtype = DType::u8; }, &c);
  expect_forward_error(
      "visible", "data is null", [](Good& g) { g.forward.visible.data = nullptr; }, &c);
  expect_backward_error(
      "d_bias", "without bias", [](Good& g) { g.backward.bias = {}; }, &c);
  expect_backward_error(
      "d_bias", "the shape of bias", [](Good& g) { g.backward.d_bias.shape[0] = 1; }, &c);
  expect_backward_error(
      "d_bias", "write an element twice", [](Good& g) { g.backward.d_bias.stride[3] = 0; }, &c);
  expect_backward_error(
      "d_bias", "overlaps bias",
      [](Good& g) { g.backward.d_bias.data = const_cast<void*>(g.backward.bias.data); }, &c);
}

TEST(FeatureValidation, PairsOfVarlenProblemsAreAsLongAsTheLongestSequence) {
  Case c = varlen_case();
  c.bias = {.present = true};
  Good good(c);
  EXPECT_TRUE(forward(good.forward, good.options).ok());
  expect_forward_error(
      "bias", "of [3, 4, 5, 4]", [](Good& g) { g.options.max_lengths.s_q = 5; }, &c);
}

TEST(FeatureValidation, CpuBackendDeclinesOtherTypesOfBias) {
  Good good(case_with_pairs());
  good.forward.bias.dtype = DType::f16;
  const Status s = forward(good.forward, good.options, {.backend = Backend::cpu});
  ASSERT_FALSE(s.ok());
  EXPECT_EQ(s.error().code, ErrorCode::unsupported);
  EXPECT_NE(s.error().message.find("bias is f16; must be f32 like q, or f32"), std::string::npos)
      << s.error().message;
}

TEST(FeatureValidation, FiguresOfMasksByDataAreUpperBounds) {
  Good good(case_with_pairs());
  for (const Backend backend : {Backend::cpu, Backend::reference}) {
    const auto p = plan(make_problem(good.forward, good.options), {.backend = backend});
    ASSERT_TRUE(p.ok());
    EXPECT_FALSE(p->info().visible_pairs.exact);
    EXPECT_FALSE(p->info().flops.exact);
  }
  Good plain(case_with_sinks());
  const auto bytes = [](const ForwardTensors& t) {
    return plan(make_problem(t), {.backend = Backend::cpu})->info().slow_memory_bytes.value;
  };
  EXPECT_GE(bytes(good.forward), bytes(plain.forward) + 2 * 4 * 5 * 4 + 4 * 5);
}

TEST(FeatureValidation, Dropout) {
  for (const double p : {-0.1, 1.0000001, std::numeric_limits<double>::quiet_NaN()}) {
    expect_forward_error("dropout.p", "must be in [0, 1]",
                         [p](Good& g) { g.options.dropout.p = p; });
    expect_backward_error("dropout.p", "must be in [0, 1]",
                          [p](Good& g) { g.options.dropout.p = p; });
  }
}

Case paged_case() {
  Case c = case_with_lengths();
  c.page_size = 2;
  return c;
}

TEST(FeatureValidation, BlockTable) {
  const Case c = paged_case();
  Good good(c);
  EXPECT_TRUE(forward(good.forward, good.options).ok());
  expect_forward_error(
      "block_table", "has 1 rows, must have b = 2",
      [](Good& g) { g.forward.block_table.shape[0] = 1; }, &c);
  expect_forward_error(
      "block_table", "i32[b, max_pages] with contiguous rows",
      [](Good& g) { g.forward.block_table.stride[1] = 2; }, &c);
  expect_forward_error(
      "block_table", "i32[b, max_pages]", [](Good& g) { g.forward.block_table.dtype = DType::f32; },
      &c);
  expect_forward_error(
      "block_table", "data is null", [](Good& g) { g.forward.block_table.data = nullptr; }, &c);
  expect_forward_error(
      "key_lengths", "is absent, but a block_table is given",
      [](Good& g) { g.forward.key_lengths = {}; }, &c);
  expect_forward_error(
      "k", "[pages, page_size, h_k, d]", [](Good& g) { g.forward.k.rank = 3; }, &c);
  expect_forward_error(
      "k", "page_size is 0", [](Good& g) { g.forward.k.shape[1] = 0; }, &c);
  expect_forward_error(
      "v", "must be [pages, page_size, h_k, d_v]", [](Good& g) { g.forward.v.shape[1] = 1; }, &c);
  expect_forward_error(
      "cu_seqlens_k", "beside block_table",
      [](Good& g) { g.forward.cu_seqlens_k = g.forward.key_lengths; }, &c);
  expect_forward_error(
      "key_lengths", "[1] is 7, must be in [0, s_k = 6]",
      [](Good& g) {
        static_cast<std::int32_t*>(const_cast<void*>(g.forward.key_lengths.data))[1] = 7;
      },
      &c);
}

TEST(FeatureValidation, MergeOfSinks) {
  Buffer o(DType::f32, {1, 2, 3, 4});
  Buffer lse(DType::f32, {1, 3, 2});
  Buffer sinks(DType::f32, {3});
  ConstTensor wrong = sinks.in();
  wrong.shape[0] = 2;
  expect_error(merge({}, o.out(), lse.out(), wrong), "sinks", "must be f32[3]");
  wrong = sinks.in();
  wrong.dtype = DType::f16;
  expect_error(merge({}, o.out(), lse.out(), wrong), "sinks", "must be f32[3]");
  // Was taken for an absent operand, and then read past the end of its shape.
  wrong = sinks.in();
  wrong.rank = -1;
  expect_error(merge({}, o.out(), lse.out(), wrong), "sinks", "rank is -1");
  wrong = lse.in();
  wrong.rank = 1;
  wrong.shape[0] = 3;
  expect_error(merge({}, o.out(), lse.out(), wrong), "lse", "overlaps sinks");
  EXPECT_EQ(o.damage(false), "");
}

TEST(FeatureValidation, FiguresOfKeyLengthsAreUpperBounds) {
  Good good(case_with_lengths());
  for (const Backend backend : {Backend::cpu, Backend::reference}) {
    const auto p = plan(make_problem(good.forward, good.options), {.backend = backend});
    ASSERT_TRUE(p.ok());
    EXPECT_FALSE(p->info().visible_pairs.exact);
    EXPECT_EQ(p->info().visible_pairs.value, 2 * 4 * 4 * 5);
    EXPECT_FALSE(p->info().slow_memory_bytes.exact);
  }
}

}  // namespace
}  // namespace abacist::testing
