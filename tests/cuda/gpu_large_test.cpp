// Sizes that break 32-bit arithmetic and grids: checked by sample, each row as float64 sums.
#include <cmath>
#include <cstring>

#include "core/numeric.hpp"
#include "cuda/support/gpu.hpp"
#include "support/environment.hpp"

namespace abacist::testing {
namespace {

/// bf16 numbers in [-1, 1), fast.
std::vector<std::uint16_t> numbers(std::size_t count, std::uint64_t seed) {
  std::vector<std::uint16_t> values(count);
  std::uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (std::uint16_t& value : values) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const float x = static_cast<float>(static_cast<std::int32_t>(state >> 32)) * 0x1p-31f;
    std::uint32_t bits = 0;
    std::memcpy(&bits, &x, sizeof(bits));
    value = static_cast<std::uint16_t>(bits >> 16);
  }
  return values;
}

double at(const std::vector<std::uint16_t>& values, std::int64_t index) {
  return core::load_element(values.data(), DType::bf16, index);
}

/// One head's [rows, d] inside an array.
struct View {
  const std::vector<std::uint16_t>& values;
  std::int64_t first = 0, row = 0;
};

struct Row {
  std::vector<double> o;
  double lse = -std::numeric_limits<double>::infinity();
};

/// Attention of one query row over keys [begin, end), in float64.
Row attend(const View& q, std::int64_t i, const View& k, const View& v, std::int64_t begin,
           std::int64_t end, std::int64_t d) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(d));
  std::vector<double> scores;
  double top = -std::numeric_limits<double>::infinity();
  for (std::int64_t j = begin; j < end; ++j) {
    double sum = 0.0;
    for (std::int64_t e = 0; e < d; ++e) {
      sum += at(q.values, q.first + i * q.row + e) * at(k.values, k.first + j * k.row + e);
    }
    scores.push_back(scale * sum);
    top = std::max(top, scores.back());
  }
  Row row{std::vector<double>(static_cast<std::size_t>(d), 0.0)};
  double total = 0.0;
  for (std::int64_t j = begin; j < end; ++j) {
    const double p = std::exp(scores[static_cast<std::size_t>(j - begin)] - top);
    total += p;
    for (std::int64_t e = 0; e < d; ++e) {
      row.o[static_cast<std::size_t>(e)] += p * at(v.values, v.first + j * v.row + e);
    }
  }
  for (double& value : row.o) value /= total;
  row.lse = top + std::log(total);
  return row;
}

struct Device4 {
  explicit Device4(std::size_t q_count, std::size_t k_count, std::size_t lse_count)
      : q_host(numbers(q_count, 1)),
        k_host(numbers(k_count, 2)),
        v_host(numbers(k_count, 3)),
        q(2 * q_count),
        k(2 * k_count),
        v(2 * k_count),
        o(2 * q_count),
        lse(4 * lse_count) {
    q.write(std::as_bytes(std::span(q_host)));
    k.write(std::as_bytes(std::span(k_host)));
    v.write(std::as_bytes(std::span(v_host)));
  }

  std::vector<std::uint16_t> read_o() const {
    std::vector<std::uint16_t> values(q_host.size());
    o.read(std::as_writable_bytes(std::span(values)));
    return values;
  }
  std::vector<float> read_lse() const {
    std::vector<float> values(lse.bytes() / 4);
    lse.read(std::as_writable_bytes(std::span(values)));
    return values;
  }

  std::vector<std::uint16_t> q_host, k_host, v_host;
  DeviceMemory q, k, v, o, lse;
};

/// o at `first` in the array against a row; |v| <= 1, so bf16 of P and of the result bound it.
void expect_row(const std::vector<std::uint16_t>& o, std::int64_t first, const Row& row, double lse,
                const std::string& where) {
  for (std::size_t e = 0; e < row.o.size(); ++e) {
    const double is = at(o, first + static_cast<std::int64_t>(e));
    ASSERT_NEAR(is, row.o[e], 2e-3 + std::fabs(row.o[e]) * 0x1p-7) << where << " e " << e;
  }
  ASSERT_NEAR(lse, row.lse, 1e-4) << where;
}

using GpuLarge = GpuTest;

TEST_F(GpuLarge, Row15_MoreThan65535Heads) {
  const std::int64_t b = 2, s = 16, h = 40'000, d = 8;
  const Device4 t(static_cast<std::size_t>(b * s * h * d), static_cast<std::size_t>(b * s * h * d),
                  static_cast<std::size_t>(b * h * s));
  const TensorSpec spec = contiguous(DType::bf16, {b, s, h, d}, kGpu);
  const TensorSpec lse = contiguous(DType::f32, {b, h, s}, kGpu);
  const Status status = forward({.q = {t.q.data(), spec},
                                 .k = {t.k.data(), spec},
                                 .v = {t.v.data(), spec},
                                 .o = {t.o.data(), spec},
                                 .lse = {t.lse.data(), lse}});
  ASSERT_TRUE(status.ok()) << to_string(status.error());
  const auto o = t.read_o();
  const auto sums = t.read_lse();
  for (const std::int64_t head : {0, 1, 32'767, 39'999}) {
    for (std::int64_t n = 0; n < b; ++n) {
      const std::int64_t first = n * s * h * d + head * d;
      for (std::int64_t i = 0; i < s; i += 5) {
        const Row row = attend({t.q_host, first, h * d}, i, {t.k_host, first, h * d},
                               {t.v_host, first, h * d}, 0, s, d);
        expect_row(o, first + i * h * d, row,
                   sums[static_cast<std::size_t>((n * h + head) * s + i)],
                   "head " + std::to_string(head));
      }
    }
  }
}

TEST_F(GpuLarge, Row15_EightyThousandSequences) {
  const std::int64_t b = 80'000, s = 16, d = 32;
  const auto count = static_cast<std::size_t>(b * s * d);
  const Device4 t(count, count, static_cast<std::size_t>(b * s));
  std::vector<std::int32_t> cu_host(static_cast<std::size_t>(b) + 1);
  for (std::size_t n = 0; n < cu_host.size(); ++n) cu_host[n] = static_cast<std::int32_t>(n * 16);
  const DeviceMemory cu(cu_host.size() * 4);
  cu.write(std::as_bytes(std::span(cu_host)));
  const TensorSpec spec = contiguous(DType::bf16, {b * s, 1, d}, kGpu);
  const TensorSpec cu_spec = contiguous(DType::i32, {b + 1}, kGpu);
  const ForwardTensors tensors{.q = {t.q.data(), spec},
                               .k = {t.k.data(), spec},
                               .v = {t.v.data(), spec},
                               .o = {t.o.data(), spec},
                               .lse = {t.lse.data(), contiguous(DType::f32, {1, b * s}, kGpu)},
                               .cu_seqlens_q = {cu.data(), cu_spec},
                               .cu_seqlens_k = {cu.data(), cu_spec}};
  const Options options{.mask = {.causal = true}, .max_lengths = {16, 16}};
  const auto planned = plan(make_problem(tensors, options));
  ASSERT_TRUE(planned.ok()) << to_string(planned.error());
  const DeviceMemory workspace(planned->info().workspace_bytes);
  const RunOptions run{.workspace = {workspace.data(), workspace.bytes()}};
  ASSERT_TRUE(planned->run(tensors, run).ok());
  const Status lengths = planned->device_status(run);
  EXPECT_TRUE(lengths.ok()) << to_string(lengths.error());
  const auto o = t.read_o();
  const auto sums = t.read_lse();
  for (const std::int64_t n : {0, 1, 65'535, 65'536, 79'999}) {
    for (std::int64_t i = 0; i < s; i += 3) {
      const std::int64_t first = n * s * d;
      const Row row =
          attend({t.q_host, first, d}, i, {t.k_host, first, d}, {t.v_host, first, d}, 0, i + 1, d);
      expect_row(o, first + i * d, row, sums[static_cast<std::size_t>(n * s + i)],
                 "sequence " + std::to_string(n));
    }
  }
}

TEST_F(GpuLarge, Row18_AMillionTokensInLinearMemory) {
  const std::int64_t s = by_effort<std::int64_t>(1 << 18, 1 << 20, 1 << 20), d = 64;
  const auto count = static_cast<std::size_t>(s * d);
  const Device4 t(count, count, static_cast<std::size_t>(s));
  const TensorSpec spec = contiguous(DType::bf16, {1, s, 1, d}, kGpu);
  const ForwardTensors tensors{.q = {t.q.data(), spec},
                               .k = {t.k.data(), spec},
                               .v = {t.v.data(), spec},
                               .o = {t.o.data(), spec},
                               .lse = {t.lse.data(), contiguous(DType::f32, {1, 1, s}, kGpu)}};
  const Options options{.mask = {.causal = true}};
  const auto planned = plan(make_problem(tensors, options));
  ASSERT_TRUE(planned.ok()) << to_string(planned.error());
  EXPECT_EQ(planned->info().workspace_bytes, 0u);
  std::size_t before = 0, after = 0, all = 0;
  ASSERT_TRUE(planned->run(tensors, {}).ok());
  ABACIST_CUDA_OK(cudaMemGetInfo(&before, &all));
  ASSERT_TRUE(planned->run(tensors, {}).ok());
  ABACIST_CUDA_OK(cudaDeviceSynchronize());
  ABACIST_CUDA_OK(cudaMemGetInfo(&after, &all));
  EXPECT_LE(before, after + (std::size_t{1} << 26)) << "a run took device memory";
  const auto o = t.read_o();
  const auto sums = t.read_lse();
  for (const std::int64_t i : {std::int64_t{0}, std::int64_t{191}, s / 2, s - 1}) {
    const Row row = attend({t.q_host, 0, d}, i, {t.k_host, 0, d}, {t.v_host, 0, d}, 0, i + 1, d);
    expect_row(o, i * d, row, sums[static_cast<std::size_t>(i)], "row " + std::to_string(i));
  }
}

/// Batch strides of 2^32 elements: every offset needs 64 bits.
TEST_F(GpuLarge, Row16_OffsetsBeyond32Bits) {
  const std::int64_t s = 100, h = 2, d = 64, far = std::int64_t{1} << 32;
  const auto small = static_cast<std::size_t>(s * h * d);
  std::size_t free = 0, all = 0;
  ABACIST_CUDA_OK(cudaMemGetInfo(&free, &all));
  if (free < (std::size_t{40} << 30)) GTEST_SKIP() << "less than 40 GiB free";
  TensorSpec spec = contiguous(DType::bf16, {2, s, h, d}, kGpu);
  spec.stride[0] = far;
  const std::vector<std::uint16_t> values[3] = {numbers(2 * small, 1), numbers(2 * small, 2),
                                                numbers(2 * small, 3)};
  const DeviceMemory memory[4] = {DeviceMemory(2 * (static_cast<std::size_t>(far) + small)),
                                  DeviceMemory(2 * (static_cast<std::size_t>(far) + small)),
                                  DeviceMemory(2 * (static_cast<std::size_t>(far) + small)),
                                  DeviceMemory(2 * (static_cast<std::size_t>(far) + small))};
  for (std::size_t n = 0; n < 3; ++n) {
    for (std::size_t half = 0; half < 2; ++half) {
      ABACIST_CUDA_OK(cudaMemcpy(memory[n].data() + half * 2 * static_cast<std::size_t>(far),
                                 values[n].data() + half * small, 2 * small,
                                 cudaMemcpyHostToDevice));
    }
  }
  const DeviceMemory lse(2 * h * s * 4);
  const Status status = forward({.q = {memory[0].data(), spec},
                                 .k = {memory[1].data(), spec},
                                 .v = {memory[2].data(), spec},
                                 .o = {memory[3].data(), spec},
                                 .lse = {lse.data(), contiguous(DType::f32, {2, h, s}, kGpu)}});
  ASSERT_TRUE(status.ok()) << to_string(status.error());
  std::vector<std::uint16_t> o(2 * small);
  for (std::size_t half = 0; half < 2; ++half) {
    ABACIST_CUDA_OK(cudaMemcpy(o.data() + half * small,
                               memory[3].data() + half * 2 * static_cast<std::size_t>(far),
                               2 * small, cudaMemcpyDeviceToHost));
  }
  std::vector<float> sums(static_cast<std::size_t>(2 * h * s));
  lse.read(std::as_writable_bytes(std::span(sums)));
  for (std::int64_t n = 0; n < 2; ++n) {
    for (std::int64_t head = 0; head < h; ++head) {
      const std::int64_t first = n * s * h * d + head * d;
      for (std::int64_t i = 0; i < s; i += 33) {
        const Row row = attend({values[0], first, h * d}, i, {values[1], first, h * d},
                               {values[2], first, h * d}, 0, s, d);
        expect_row(o, first + i * h * d, row,
                   sums[static_cast<std::size_t>((n * h + head) * s + i)],
                   "batch " + std::to_string(n));
      }
    }
  }
}

}  // namespace
}  // namespace abacist::testing
