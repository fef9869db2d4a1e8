// The CUDA backend against the float64 oracle, through the public API.
#include <algorithm>
#include <array>
#include <cmath>

#include "conformance/table.hpp"
#include "cuda/support/gpu.hpp"
#include "support/bounds.hpp"
#include "support/environment.hpp"

namespace abacist::testing {
namespace {

/// Runs twice, each time with poisoned outputs and workspace: the bounds hold, and the bits are the
/// same.
void check_on_gpu(const Instance& x) {
  Results first = gpu_results(x);
  const Status status = run_on_gpu(x, first);
  ASSERT_TRUE(status.ok()) << to_string(status.error()) << "\n" << x.c.text();
  check_forward(x, first, Expected(x, false), "cuda");
  Results second = gpu_results(x);
  ASSERT_TRUE(run_on_gpu(x, second).ok());
  EXPECT_EQ(bits_of(first), bits_of(second)) << "other bits the second time\n" << x.c.text();
}

/// Failed checks of the running test so far.
int failures() {
  return ::testing::UnitTest::GetInstance()->current_test_info()->result()->total_part_count();
}

std::int64_t gpu_head_dim(std::int64_t d) { return std::clamp<std::int64_t>(d / 8 * 8, 8, 256); }

/// A case of the CPU's table, moved to where the GPU serves.
Case gpu_case(const Menu& menu, std::uint64_t n) {
  Case c = random_case(menu, n);
  c.o_dtype = c.dtype;
  c.d_qk = gpu_head_dim(c.d_qk);
  c.d_v = gpu_head_dim(c.d_v);
  c.alibi_rank = std::min(c.alibi_rank, 1);
  c.bias.present = c.visible.present = false;
  c.options.dropout = {};
  c.layout.tma = true;
  return c;
}

std::vector<Chunk> chunks() {
  std::vector<Chunk> all;
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const bool varlen : {false, true}) {
      for (int number = 0; number < 3; ++number) all.push_back({dtype, varlen, number});
    }
  }
  return all;
}

class GpuConformance : public GpuTest, public ::testing::WithParamInterface<Chunk> {};

TEST_P(GpuConformance, RandomProblems) {
  const auto [dtype, varlen, number] = GetParam();
  const Menu menu{dtype, varlen, by_effort(2e6, 1e7, 4e7)};
  const int cases = by_effort(3, 20, 150);
  int bad = 0;
  for (int n = 0; n < cases && bad < 5; ++n) {
    const int before = failures();
    check_on_gpu(Instance(gpu_case(menu, static_cast<std::uint64_t>(10'000 + number * 1000 + n))));
    if (failures() > before) ++bad;
  }
}

INSTANTIATE_TEST_SUITE_P(Table, GpuConformance, ::testing::ValuesIn(chunks()), name_of);

/// One for every kernel: head dimensions, and whether the shape for long sequences is meant.
struct Shape {
  std::int64_t d_qk, d_v;
  bool is_long;
};

std::string shape_name(const ::testing::TestParamInfo<Shape>& info) {
  return std::to_string(info.param.d_qk) + "x" + std::to_string(info.param.d_v) +
         (info.param.is_long ? "_long" : "");
}

class GpuTiles : public GpuTest, public ::testing::WithParamInterface<Shape> {
 protected:
  const FewMultiprocessors few_{1};

  /// The tile that the plan chooses for lengths like these.
  PlanInfo plan_for(const Case& c) {
    const TensorSpec q = contiguous(c.dtype, {c.b, c.s_q, c.h_q(), c.d_qk}, kGpu);
    Problem p;
    p.operands.q = q;
    p.operands.k = contiguous(c.dtype, {c.b, c.s_k, c.h_k, c.d_qk}, kGpu);
    p.operands.v = contiguous(c.dtype, {c.b, c.s_k, c.h_k, c.d_v}, kGpu);
    p.operands.o = contiguous(c.dtype, {c.b, c.s_q, c.h_q(), c.d_v}, kGpu);
    const auto planned = plan(p);
    EXPECT_TRUE(planned.ok());
    return planned.ok() ? planned->info() : PlanInfo{};
  }
};

TEST_P(GpuTiles, LengthsAroundTheTile) {
  const Shape shape = GetParam();
  for (const DType dtype : {DType::bf16, DType::f16}) {
    if (shape.is_long && dtype == DType::f16) continue;  // the oracle takes its time
    Case c{.d_qk = shape.d_qk, .d_v = shape.d_v, .dtype = dtype, .o_dtype = dtype};
    // A long key side chooses the long shape; a short query side keeps the oracle cheap.
    c.s_q = 50;
    c.s_k = shape.is_long ? 4500 : 500;
    const PlanInfo info = plan_for(c);
    EXPECT_TRUE(is_kernel(info.kernel, "")) << info.kernel;
    const std::int64_t rows = info.rows;
    const std::int64_t keys = info.keys;
    const std::int64_t base = shape.is_long ? 4480 / keys * keys : 2 * keys;
    for (const auto& [s_q, s_k] : {std::pair{rows, base},
                                   {rows + 1, base + 1},
                                   {rows - 1, base - 1},
                                   {rows + 17, base + 40}}) {
      for (const bool causal : {false, true}) {
        c.s_q = s_q;
        c.s_k = s_k;
        c.options.mask.causal = causal;
        c.options.mask.window.left = s_k % 2 == 0 ? kUnbounded : keys + 3;
        c.stream = static_cast<std::uint64_t>(s_q * 10'000 + s_k);
        EXPECT_EQ(plan_for(c).keys, keys);
        check_on_gpu(Instance(c));
        if (HasFailure()) return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, GpuTiles,
                         ::testing::Values(Shape{64, 64, false}, Shape{64, 64, true},
                                           Shape{96, 96, false}, Shape{128, 128, false},
                                           Shape{192, 128, false}, Shape{192, 192, false},
                                           Shape{256, 256, false}, Shape{256, 256, true}),
                         shape_name);

Case small_case(DType dtype) {
  return {.b = 2,
          .h_k = 2,
          .group = 2,
          .s_q = 70,
          .s_k = 90,
          .d_qk = 64,
          .d_v = 64,
          .dtype = dtype,
          .o_dtype = dtype};
}

using GpuEdge = GpuTest;

TEST_F(GpuEdge, Row1And4_RowsThatSeeNoKey) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const std::int64_t d : {64, 128, 192, 256}) {
      Case c = small_case(dtype);
      c.d_qk = c.d_v = d;
      c.s_q = 300;
      c.s_k = 40;
      c.options.mask.causal = true;
      check_on_gpu(Instance(c));
      c.s_k = 0;
      check_on_gpu(Instance(c));
      c.sinks = true;
      check_on_gpu(Instance(c));
    }
  }
}

TEST_F(GpuEdge, Row19_EveryHeadDimension) {
  for (std::int64_t d = 8; d <= 256; d += 8) {
    Case c = small_case(d % 16 == 0 ? DType::bf16 : DType::f16);
    c.d_qk = d;
    c.d_v = 264 - d;
    c.layout = {.random = true, .tma = true};
    c.stream = static_cast<std::uint64_t>(d);
    check_on_gpu(Instance(c));
  }
}

/// The same with few queries, heads packed, and, up to 128, with short sequences.
TEST_F(GpuEdge, Row19_EveryHeadDimensionWithFewQueries) {
  for (std::int64_t d = 8; d <= 256; d += 8) {
    for (const std::int64_t s_k : {std::int64_t{40}, std::int64_t{130}}) {
      Case c = small_case(d % 16 == 0 ? DType::f16 : DType::bf16);
      c.group = 3;
      c.s_q = 7;
      c.s_k = s_k;
      c.d_qk = d;
      c.d_v = s_k == 40 ? 128 - (d - 8) % 128 : 264 - d;
      c.options.mask.causal = true;
      c.layout = {.random = true, .tma = true};
      c.stream = static_cast<std::uint64_t>(d);
      check_on_gpu(Instance(c));
    }
  }
}

TEST_F(GpuEdge, Row26_ZeroLengths) {
  Case c = small_case(DType::bf16);
  c.lens_q = {0, 0, 130, 0, 64, 0};
  c.lens_k = {0, 77, 0, 0, 129, 1};
  c.slack_q = 3;
  c.slack_k = 2;
  check_on_gpu(Instance(c));
  for (std::int64_t Case::*extent : {&Case::b, &Case::s_q, &Case::h_k}) {
    Case none = small_case(DType::bf16);
    none.*extent = 0;
    check_on_gpu(Instance(none));
  }
}

TEST_F(GpuEdge, Row49_NanQueryRowGivesItsNanRowAlone) {
  for (const std::int64_t d : {64, 128, 256}) {
    Case c = small_case(DType::bf16);
    c.d_qk = c.d_v = d;
    Instance x(c);
    x.q.set({1, 13, 2, 5}, std::numeric_limits<double>::quiet_NaN());
    x.q.freeze();
    check_on_gpu(x);
  }
}

TEST_F(GpuEdge, Row38_HalfPrecisionSumsDoNotOverflow) {
  Case c = small_case(DType::f16);
  c.data = {.query_key_std = 0.0, .v_mean = 60'000.0, .v_std = 0.0};
  check_on_gpu(Instance(c));
}

/// Rounding that is biased adds up over many keys. Tensor cores cut off what does not fit the
/// accumulator, half a unit of it on average a step of 16 keys: O loses up to 2^-27 of its size a
/// key (every kernel's on this GPU; measured 2^-27.3). All else is unbiased, and no element is off
/// by more than its type costs.
TEST_F(GpuEdge, Row48_ErrorAndBiasUpToLengthsOf128K) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const std::int64_t s_k : {4096, 131072}) {
      for (const std::int64_t group : {1, 8}) {
        Case c{.h_k = 1, .group = group, .s_q = 40 / group, .s_k = s_k, .d_qk = 64, .d_v = 64};
        if (effort() == Effort::reduced) c.s_k = std::min<std::int64_t>(c.s_k, 20'000);
        c.dtype = c.o_dtype = dtype;
        c.data.v_mean = 2.0;
        const Instance x(c);
        Results results = gpu_results(x);
        ASSERT_TRUE(run_on_gpu(x, results).ok());
        const Expected expected(x, false);
        const std::vector<double> o = results.o.values();
        const std::vector<double> oracle = expected.oracle.o.values();
        double mean = 0.0, worst = 0.0, largest = 0.0, squares = 0.0;
        for (std::size_t i = 0; i < o.size(); ++i) {
          mean += (o[i] - oracle[i]) / static_cast<double>(o.size());
          worst = std::max(worst, std::fabs(expected.plain.o[i] - oracle[i]));
          largest = std::max(largest, std::fabs(oracle[i]));
          squares += std::pow(expected.plain.o[i] - oracle[i], 2) / static_cast<double>(o.size());
        }
        const double u = unit_roundoff(dtype);
        const std::string who = std::to_string(c.s_k) + " keys, group " + std::to_string(group);
        check_within("o", results.o.spec(), o, oracle, 2.0 * (worst + u * largest), who);
        check_within("lse", results.lse.spec(), results.lse.values(), expected.oracle.lse.values(),
                     kFloatRoundoff * 12.0 * *std::ranges::max_element(expected.plain.score_size),
                     who);
        const double cut = static_cast<double>(c.s_k) * 0x1p-27 * largest;
        EXPECT_LE(std::fabs(mean), cut + 6.0 * std::sqrt(squares / 40.0)) << who;
      }
    }
  }
}

/// Query heads of a group share tiles where queries are few, and short sequences have a kernel of
/// their own: every group with every length, each with another mask, score, layout and kind of
/// lengths.
TEST_F(GpuEdge, EveryGroupOfHeadsWithFewQueries) {
  int n = 0;
  for (const std::int64_t group : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 64, 71}) {
    for (const std::int64_t s_q : {1, 2, 3, 7, 16, 33, 127, 128, 129}) {
      ++n;
      Case c = small_case(n % 2 == 0 ? DType::bf16 : DType::f16);
      c.h_k = group > 8 ? 1 : 2;
      c.group = group;
      c.s_q = s_q;
      c.s_k = std::array{150, 40, 16, 64, 270}[static_cast<std::size_t>(n % 5)];
      c.d_qk = c.d_v = std::array{64, 128, 40, 192, 256}[static_cast<std::size_t>(n / 2 % 5)];
      c.options.mask.causal = n % 3 != 0;
      c.options.mask.align = n % 4 == 1 ? Align::top_left : Align::bottom_right;
      c.options.mask.window.left = n % 5 == 2 ? 20 : kUnbounded;
      c.options.score.softcap = n % 7 == 3 ? 10.0 : 0.0;
      c.alibi_rank = n % 6 == 4 ? 1 : 0;
      c.sinks = n % 4 == 2;
      c.layout = {.random = n % 2 == 1, .tma = true};
      c.stream = static_cast<std::uint64_t>(n);
      if (n % 3 == 1) {
        c.lens_q = {1, s_q, 0, s_q};
        c.lens_k = {c.s_k, c.s_k, 3, 0};
      } else if (n % 3 == 2) {
        c.key_lengths = {c.s_k, c.s_k / 3};
      }
      check_on_gpu(Instance(c));
      if (HasFailure()) return;
    }
  }
}

/// Many keys and few queries: keys are cut into parts, with heads packed and without; sequences
/// with fewer keys than parts, and with none.
TEST_F(GpuEdge, KeysInPartsWithEveryMaskAndScore) {
  int n = 0;
  int split = 0;
  for (const std::int64_t group : {1, 2, 5, 8, 71}) {
    for (const std::int64_t s_q : {1, 3, 16, 70}) {
      ++n;
      Case c = small_case(n % 2 == 0 ? DType::bf16 : DType::f16);
      c.h_k = group > 8 ? 1 : 2;
      c.group = group;
      c.s_q = std::min(s_q, 150 / group);
      c.s_k = std::array{2600, 4100, 1700, 3333}[static_cast<std::size_t>(n % 4)];
      c.d_qk = c.d_v = std::array{64, 128, 40, 192, 256}[static_cast<std::size_t>(n / 2 % 5)];
      c.options.mask.causal = n % 3 != 0;
      c.options.mask.align = n % 12 == 1 ? Align::top_left : Align::bottom_right;
      c.options.mask.window.left = n % 7 == 2 ? 1500 : kUnbounded;
      c.options.score.softcap = n % 7 == 3 ? 10.0 : 0.0;
      c.alibi_rank = n % 6 == 4 ? 1 : 0;
      c.sinks = n % 4 == 2;
      c.layout = {.random = n % 2 == 1, .tma = true};
      c.stream = static_cast<std::uint64_t>(n);
      if (n % 3 == 1) {
        c.lens_q = {1, c.s_q, 0, c.s_q};
        c.lens_k = {c.s_k, c.s_k, 3, 0};
        c.slack_q = 2;
      } else if (n % 3 == 2) {
        c.key_lengths = {c.s_k, 1};
      }
      const Instance x(c);
      split += splits_of(x) > 1;
      check_on_gpu(x);
      if (HasFailure()) return;
    }
  }
  EXPECT_GE(split, 16);
}

/// A row's bits are a function of its own query, keys and values.
TEST_F(GpuEdge, HeadsOfAGroupNeverInfluenceEachOther) {
  for (const std::int64_t s : {16, 700}) {
    Case c = small_case(DType::bf16);
    c.group = 5;
    c.s_q = 16;
    c.s_k = s;
    c.d_qk = c.d_v = 128;
    Instance x(c);
    Results alone = gpu_results(x);
    ASSERT_TRUE(run_on_gpu(x, alone).ok());
    x.q.for_each([&](const auto& index, std::int64_t) {  // NaN or overflow in two of three rows
      const std::int64_t kind = (index[1] + index[2]) % 3;
      if (kind == 1) x.q.set(index, std::numeric_limits<double>::quiet_NaN());
      if (kind == 2) x.q.set(index, index[3] == 0 ? 3e38 : 1.0);
    });
    x.q.freeze();
    Results poisoned = gpu_results(x);
    ASSERT_TRUE(run_on_gpu(x, poisoned).ok());
    poisoned.o.for_each([&](const auto& index, std::int64_t) {
      if ((index[1] + index[2]) % 3 != 0) return;
      ASSERT_EQ(poisoned.o.at(index), alone.o.at(index)) << index[1] << " " << index[2];
    });
  }
}

/// Scores that rise or jump along the keys force the frozen maximum to be raised, and a tile to be
/// done again.
TEST_F(GpuEdge, ScoresThatOutgrowTheFrozenMaximum) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const double top : {20.0, 120.0, 400.0}) {
      Case c = small_case(dtype);
      c.b = 1;
      c.s_k = 900;
      c.s_q = 200;
      Instance x(c);
      x.k.for_each([&](const auto& index, std::int64_t) {
        const double rise = top * static_cast<double>(index[1]) / 900.0 / 8.0;
        x.k.set(index, index[3] == 0
                           ? rise
                           : (index[1] == 700 ? 2.0 : 0.1 * static_cast<double>(index[3] % 3)));
      });
      x.q.for_each(
          [&](const auto& index, std::int64_t) { x.q.set(index, index[3] == 0 ? 8.0 : 0.5); });
      x.k.freeze();
      x.q.freeze();
      check_on_gpu(x);
    }
  }
}

}  // namespace
}  // namespace abacist::testing
