// Edge cases of shapes, strides and sizes; numbers are rows of tests/edge_cases.md.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "core/numeric.hpp"
#include "support/bounds.hpp"
#include "support/case.hpp"
#include "support/environment.hpp"

namespace abacist::testing {
namespace {

void check(const Case& c) { check_on_every_target(Instance(c)); }

TEST(Edge, Row7_VarlenLseIsHeadsByTotal) {
  Case c{.h_k = 2, .group = 1};
  c.lens_q = {3, 7};  // cu = [0, 3, 10]
  c.lens_k = {4, 7};
  const Instance x(c);
  Results r = x.make_results(DType::f32);
  EXPECT_EQ(r.lse.spec().shape[0], 2);
  EXPECT_EQ(r.lse.spec().shape[1], 10);
  check(c);
}

// More heads, batches or sequences than a 16-bit grid index holds.
TEST(Edge, Row15_MoreThan65535HeadsBatchesAndSequences) {
  const std::int64_t many = by_effort<std::int64_t>(300, 65'537, 80'000);
  const auto forward_agrees = [](const Case& c) {
    const Instance x(c);
    const Expected expected(x, false);
    Results r = x.make_results(DType::f32);
    x.forward(r, {.backend = Backend::cpu});
    check_forward(x, r, expected, "cpu");
  };
  forward_agrees({.h_k = many, .s_q = 3, .s_k = 3, .d_qk = 2, .d_v = 2});
  forward_agrees({.b = many, .s_q = 3, .s_k = 3, .d_qk = 2, .d_v = 2});
  Case varlen{.d_qk = 2, .d_v = 2};
  varlen.lens_q.assign(static_cast<std::size_t>(many), 3);
  varlen.lens_k.assign(static_cast<std::size_t>(many), 2);
  forward_agrees(varlen);
}

/// Address space that costs memory only where it is touched.
class Reserved {
 public:
  explicit Reserved(std::size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~Reserved() {
    if (ok()) munmap(data_, bytes_);
  }
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;
  bool ok() const { return data_ != MAP_FAILED; }
  void* data() { return data_; }

 private:
  std::size_t bytes_;
  void* data_;
};

/// Copies a contiguous buffer into a view with huge strides, and back.
Tensor spread(Reserved& memory, const Buffer& from, const Extents& stride) {
  TensorSpec spec = from.spec();
  spec.stride = stride;
  const Tensor to{memory.data(), spec};
  from.for_each([&](const auto& i, std::int64_t) {
    std::int64_t offset = 0;
    for (std::size_t a = 0; a < kMaxRank; ++a) offset += i[a] * stride[a];
    core::store_element(memory.data(), spec.dtype, offset, from.at(i));
  });
  return to;
}

std::vector<double> gather(const Tensor& from, const Buffer& shape) {
  std::vector<double> values;
  shape.for_each([&](const auto& i, std::int64_t) {
    std::int64_t offset = 0;
    for (std::size_t a = 0; a < kMaxRank; ++a) offset += i[a] * from.stride[a];
    values.push_back(core::load_element(from.data, from.dtype, offset));
  });
  return values;
}

// Rows 16 and 17: element offsets beyond 2^31 and byte offsets beyond 2^32, by batch and by row.
TEST(Edge, Row16And17_OffsetsBeyond32Bits) {
  for (const bool by_row : {false, true}) {
    Case c = by_row ? Case{.s_q = 600, .s_k = 600, .d_qk = 4, .d_v = 4}
                    : Case{.b = 5, .s_q = 3, .s_k = 4, .d_qk = 4, .d_v = 4};
    c = typed(c, DType::bf16);
    const std::int64_t far = by_row ? std::int64_t{1} << 22 : std::int64_t{1} << 30;
    const Extents stride = by_row ? Extents{0, far, 4, 1} : Extents{far, 4, 4, 1};
    const auto bytes = static_cast<std::size_t>(2 * far * (by_row ? 600 : 5));
    std::vector<std::unique_ptr<Reserved>> memory;
    for (int n = 0; n < 8; ++n) {
      memory.push_back(std::make_unique<Reserved>(bytes));
      if (!memory.back()->ok())
        GTEST_SKIP() << "cannot reserve " << 8 * bytes << " bytes of addresses";
    }
    const Instance x(c);
    const Both near = x.run_both();
    Buffer zeros_q(DType::bf16, {c.b, c.s_q, 1, 4});
    Buffer zeros_k(DType::bf16, {c.b, c.s_k, 1, 4});
    zeros_q.fill(0.0);
    zeros_k.fill(0.0);
    ForwardTensors f;
    f.q = spread(*memory[0], x.q, stride);
    f.k = spread(*memory[1], x.k, stride);
    f.v = spread(*memory[2], x.v, stride);
    f.o = spread(*memory[3], zeros_q, stride);
    Buffer lse(DType::f32, {c.b, 1, c.s_q});
    f.lse = lse.out();
    const Status forward_status = forward(f, c.options, {.backend = Backend::cpu});
    ASSERT_TRUE(forward_status.ok()) << to_string(forward_status.error());
    EXPECT_EQ(gather(f.o, zeros_q), near.results.o.values());
    BackwardTensors g;
    g.q = f.q;
    g.k = f.k;
    g.v = f.v;
    g.o = f.o;
    g.lse = f.lse;
    g.d_o = spread(*memory[4], x.d_o, stride);
    g.dq = spread(*memory[5], zeros_q, stride);
    g.dk = spread(*memory[6], zeros_k, stride);
    g.dv = spread(*memory[7], zeros_k, stride);
    const Status backward_status = backward(g, c.options, {.backend = Backend::cpu});
    ASSERT_TRUE(backward_status.ok()) << to_string(backward_status.error());
    EXPECT_EQ(gather(g.dq, zeros_q), near.gradients.dq.values());
    EXPECT_EQ(gather(g.dk, zeros_k), near.gradients.dk.values());
    EXPECT_EQ(gather(g.dv, zeros_k), near.gradients.dv.values());
  }
}

TEST(Edge, Row18_MillionsOfKeys) {
  Case c{
      .s_q = 1, .s_k = by_effort<std::int64_t>(100'000, 4'000'000, 4'200'000), .d_qk = 2, .d_v = 2};
  c.data.v_mean = 1.0;
  const Instance x(c);
  const Expected expected(x, true);
  const Both both = x.run_both();
  check_forward(x, both.results, expected, "cpu");
  check_backward(x, both.gradients, expected, "cpu");
}

// Every head dimension, forward and backward, workspace full of NaN.
TEST(Edge, Row19_EveryHeadDimension) {
  Random random(19);
  const std::int64_t step = by_effort(37, 3, 1);
  for (std::int64_t d = 1; d <= 512; d += step) {
    Case c{.group = 2,
           .s_q = random.integer(1, 9),
           .s_k = random.integer(1, 40),
           .d_qk = d,
           .d_v = random.chance(0.5) ? d : random.integer(1, 512)};
    c.stream = static_cast<std::uint64_t>(d);
    c.options.mask.causal = random.chance(0.5);
    check(typed(c, random.pick({DType::f32, DType::bf16, DType::f16})));
    if (HasFailure()) return;
  }
  check(typed({.s_q = 100, .s_k = 100, .d_qk = 72, .d_v = 72}, DType::bf16));
  check(typed({.s_q = 100, .s_k = 100, .d_qk = 104, .d_v = 104}, DType::bf16));
}

TEST(Edge, Row22_HeadDimensionsOfKeysAndValuesDiffer) {
  for (const auto& [d_qk, d_v] : {std::pair{192, 128}, {64, 128}, {128, 64}, {1, 512}, {512, 1}}) {
    Case c{.h_k = 2, .group = 4, .s_q = 20, .s_k = 70, .d_qk = d_qk, .d_v = d_v};
    check(c);
    check(typed(c, DType::bf16));
  }
}

// dO as sum() expands it: one element, every stride 0. Sums of equal terms: few of them.
TEST(Edge, Row23_ExpandedGradientOfTheOutput) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Case c = typed({.b = 2, .h_k = 2, .s_q = 9, .s_k = 20, .d_qk = 8, .d_v = 4}, dtype);
    Instance x(c);
    x.d_o.fill(1.0);
    const Expected expected(x, true);
    Buffer one(dtype, {1});
    one.fill(1.0);
    TensorSpec expanded = x.d_o.spec();
    expanded.stride = {0, 0, 0, 0};
    for_each_target([&](const std::string& target) {
      Both both = x.run_both();
      BackwardTensors t = x.tensors(std::as_const(both.results), both.gradients);
      t.d_o = {one.in().data, expanded};
      const Status status = run_poisoned(t, c.options, {.backend = Backend::cpu});
      ASSERT_TRUE(status.ok()) << to_string(status.error());
      check_backward(x, both.gradients, expected, target);
    });
  }
}

// An axis of one element never moves, whatever its stride says.
TEST(Edge, Row24_StridesOfAxesOfOneElementDoNotMatter) {
  const Case c{.b = 1, .h_k = 1, .group = 1, .s_q = 1, .s_k = 1, .d_qk = 1, .d_v = 1};
  const Instance x(c);
  Both both = x.run_both();
  const auto expected = both.results.o.values();
  ForwardTensors t = x.tensors(both.results);
  for (TensorSpec* spec : {static_cast<TensorSpec*>(&t.q), static_cast<TensorSpec*>(&t.k),
                           static_cast<TensorSpec*>(&t.v), static_cast<TensorSpec*>(&t.o)}) {
    spec->stride = {1 << 20, -12345, 0, std::int64_t{1} << 40};
  }
  t.lse.stride = {77, 0, -5, 0};
  for_each_target([&](const std::string& target) {
    const Status status = run_poisoned(t, c.options, {.backend = Backend::cpu});
    ASSERT_TRUE(status.ok()) << to_string(status.error());
    EXPECT_EQ(both.results.o.values(), expected) << target;
  });
}

TEST(Edge, Row25_DataAlignedToOneElementOnly) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Case c =
        typed({.b = 2, .h_k = 2, .group = 2, .s_q = 33, .s_k = 70, .d_qk = 64, .d_v = 64}, dtype);
    c.layout.odd_offset = true;
    check(c);
  }
}

TEST(Edge, Row26_ZeroLengthsBetweenOthers) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Case c = typed({.h_k = 1, .group = 2, .d_qk = 8, .d_v = 8}, dtype);
    const std::int64_t part = by_effort(100, 600, 1208);
    c.lens_q = {0, 0, part, part - 100, 0};
    c.lens_k = {5, 0, 0, part, 3};
    check(c);
    c.options.mask.causal = true;
    check(c);
  }
}

TEST(Edge, Row26_NothingAtAll) {
  for (const Case& c : {Case{.b = 0}, Case{.s_q = 0}, Case{.s_q = 0, .s_k = 0}, Case{.h_k = 0},
                        Case{.b = 0, .s_q = 0, .s_k = 0}}) {
    check(c);
  }
  Case none;
  none.lens_q = {0};
  none.lens_k = {0};
  check(none);
}

// h_q = 0 over two key/value heads: their gradients are sums over nothing.
TEST(Edge, Row26_NoQueryHeads) {
  Case c{.h_k = 2, .group = 1};
  Instance x(c);
  x.q = Buffer(DType::f32, {1, 16, 0, 16});
  x.d_o = Buffer(DType::f32, {1, 16, 0, 16});
  for (const Backend backend : {Backend::cpu, Backend::reference}) {
    Both both{{Buffer(DType::f32, {1, 16, 0, 16}), Buffer(DType::f32, {1, 0, 16})},
              x.make_gradients(DType::f32)};
    both.gradients.dq = Buffer(DType::f32, {1, 16, 0, 16});
    x.forward(both.results, {.backend = backend});
    x.backward(both.results, both.gradients, {.backend = backend});
    for (const double dk : both.gradients.dk.values()) EXPECT_EQ(dk, 0.0);
    for (const double dv : both.gradients.dv.values()) EXPECT_EQ(dv, 0.0);
  }
}

// A bias summed over rows that are not there: items added to sums that had no place in their
// memory.
TEST(Edge, Row26_NoQueryHeadsWithBias) {
  for (const std::int64_t b : {1, 2}) {
    for (const Extents& shape : {Extents{1, 0, 1, 9}, {b, 0, 1, 9}, {1, 0, 9, 9}, {1, 1, 1, 9}}) {
      Case c{.b = 2, .h_k = 2, .group = 1, .s_q = 9, .s_k = 9, .d_qk = 8, .d_v = 8};
      c.bias = {.present = true};
      Instance x(c);
      const auto buffer = [](const Extents& n) {
        return Buffer(DType::f32, {n[0], n[1], n[2], n[3]});
      };
      x.q = buffer({2, 9, 0, 8});
      x.d_o = buffer({2, 9, 0, 8});
      x.bias = buffer(shape);
      x.bias.fill(0.0);
      Both both{{buffer({2, 9, 0, 8}), Buffer(DType::f32, {2, 0, 9})},
                x.make_gradients(DType::f32)};
      both.gradients.dq = buffer({2, 9, 0, 8});
      both.gradients.d_bias = buffer(shape);
      x.forward(both.results, {.backend = Backend::cpu});
      x.backward(both.results, both.gradients, {.backend = Backend::cpu});
      for (const double dk : both.gradients.dk.values()) EXPECT_EQ(dk, 0.0);
      for (const double d_bias : both.gradients.d_bias.values()) EXPECT_EQ(d_bias, 0.0);
    }
  }
}

// Rows past cu[b]: not read (they hold NaN), not written (they keep their bytes).
TEST(Edge, Row27_RowsPastTheLastSequenceAreLeftAlone) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Case c = typed({.h_k = 2, .group = 2, .d_qk = 8, .d_v = 8}, dtype);
    c.lens_q = {300, 644};  // 944 of 946 rows
    c.lens_k = {200, 100};
    c.slack_q = 2;
    c.slack_k = 3;
    const Instance x(c);
    check_on_every_target(x);
    for_each_target([&](const std::string& target) {
      const Both both = x.run_both();
      const auto untouched = [&](const Buffer& buffer, std::int64_t first, std::size_t axis,
                                 const char* name) {
        buffer.for_each([&](const auto& i, std::int64_t) {
          if (i[axis] >= first) {
            ASSERT_TRUE(std::isnan(buffer.at(i))) << target << ": " << name;
          } else {
            ASSERT_FALSE(std::isnan(buffer.at(i))) << target << ": " << name;
          }
        });
      };
      untouched(both.results.o, 944, 0, "o");
      untouched(both.results.lse, 944, 1, "lse");
      untouched(both.gradients.dq, 944, 0, "dq");
      untouched(both.gradients.dk, 300, 0, "dk");
      untouched(both.gradients.dv, 300, 0, "dv");
    });
  }
}

// K and V with layouts of their own and b > 1: a swapped batch stride would show.
TEST(Edge, KeysAndValuesOfDifferentLayouts) {
  for (std::uint64_t stream = 0; stream < by_effort<std::uint64_t>(3, 10, 60); ++stream) {
    Case c{.b = 3, .h_k = 2, .group = 2, .s_q = 17, .s_k = 40, .d_qk = 16, .d_v = 16};
    c.stream = 5000 + stream;
    c.layout.random = true;
    check(c);
    check(typed(c, DType::f16));
  }
}

// Outputs interleaved with each other: slices of one packed array.
TEST(Edge, PackedInputsAndOutputs) {
  const Case c{.b = 2, .h_k = 3, .s_q = 20, .s_k = 20, .d_qk = 8, .d_v = 8};
  const Instance x(c);
  const Both apart = x.run_both();
  std::vector<float> qkv(2 * 20 * 3 * 3 * 8);
  std::vector<float> gradients(qkv.size(), std::numeric_limits<float>::quiet_NaN());
  TensorSpec spec = x.q.spec();
  spec.stride = {20 * 72, 72, 8, 1};  // [b, s, 3, h, d]
  const auto slice = [&](std::vector<float>& of, std::int64_t n) {
    return Tensor{of.data() + n * 24, spec};
  };
  const Buffer* const sources[] = {&x.q, &x.k, &x.v};
  for (std::int64_t n = 0; n < 3; ++n) {
    float* const to = static_cast<float*>(slice(qkv, n).data);
    sources[n]->for_each([&](const auto& i, std::int64_t) {
      to[i[0] * 20 * 72 + i[1] * 72 + i[2] * 8 + i[3]] = static_cast<float>(sources[n]->at(i));
    });
  }
  Buffer o(DType::f32, {2, 20, 3, 8});
  Buffer lse(DType::f32, {2, 3, 20});
  const ForwardTensors f{
      .q = slice(qkv, 0), .k = slice(qkv, 1), .v = slice(qkv, 2), .o = o.out(), .lse = lse.out()};
  ASSERT_TRUE(forward(f, {}, {.backend = Backend::cpu}).ok());
  EXPECT_EQ(o.values(), apart.results.o.values());
  const BackwardTensors g{.q = slice(qkv, 0),
                          .k = slice(qkv, 1),
                          .v = slice(qkv, 2),
                          .o = o.in(),
                          .lse = lse.in(),
                          .d_o = x.d_o.in(),
                          .dq = slice(gradients, 0),
                          .dk = slice(gradients, 1),
                          .dv = slice(gradients, 2)};
  const Status status = backward(g, {}, {.backend = Backend::cpu});
  ASSERT_TRUE(status.ok()) << to_string(status.error());
  const auto read = [&](std::int64_t n, const Buffer& shape) {
    return gather(slice(gradients, n), shape);
  };
  EXPECT_EQ(read(0, apart.gradients.dq), apart.gradients.dq.values());
  EXPECT_EQ(read(1, apart.gradients.dk), apart.gradients.dk.values());
  EXPECT_EQ(read(2, apart.gradients.dv), apart.gradients.dv.values());
}

// Null is allowed where there is no element; negative strides then led to null - something (UBSan).
TEST(Edge, NullWithoutElements) {
  const auto backwards = [](std::initializer_list<std::int64_t> shape) {
    TensorSpec spec = contiguous(DType::f32, shape);
    spec.stride[1] = -5;
    spec.stride[2] = -3;
    return spec;
  };
  Buffer k(DType::f32, {1, 3, 2, 4}), dk = k, dv = k;
  k.fill(1.0);
  const Tensor rows(nullptr, backwards({1, 0, 2, 4}));
  const Tensor lse(nullptr, backwards({1, 2, 0}));
  const Tensor pairs(nullptr, backwards({1, 2, 0, 3}));
  ForwardTensors f;
  f.q = rows;
  f.k = f.v = k.in();
  f.o = rows;
  f.lse = lse;
  f.bias = pairs;
  ASSERT_TRUE(forward(f, {}, {.backend = Backend::cpu}).ok());
  BackwardTensors g;
  g.q = g.o = g.d_o = rows;
  g.dq = rows;
  g.k = g.v = k.in();
  g.dk = dk.out();
  g.dv = dv.out();
  g.lse = g.d_lse = lse;
  g.bias = pairs;
  g.d_bias = pairs;
  const Status status = backward(g, {}, {.backend = Backend::cpu});
  ASSERT_TRUE(status.ok()) << to_string(status.error());
  for (const double value : dk.values()) EXPECT_EQ(value, 0.0);
  for (const double value : dv.values()) EXPECT_EQ(value, 0.0);
}

}  // namespace
}  // namespace abacist::testing
