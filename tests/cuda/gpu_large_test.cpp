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

/// Lengths and groups for which the plan takes each kernel in turn.
struct Taken {
  std::int64_t s_q, s_k, group;
  const char* kernel;  ///< the end of its name
};
constexpr Taken kEachKernel[] = {{16, 16, 1, ".short"}, {20, 80, 1, "x64"}, {3, 80, 4, ".packed"}};

/// Plans, sees that the kernel is the one that is meant, runs, waits.
void run_as(const Taken& taken, const ForwardTensors& tensors, const Options& options) {
  const auto planned = plan(make_problem(tensors, options));
  ASSERT_TRUE(planned.ok()) << to_string(planned.error());
  ASSERT_TRUE(planned->info().kernel.ends_with(taken.kernel)) << planned->info().kernel;
  const DeviceMemory workspace(planned->info().workspace_bytes);
  const RunOptions run{.workspace = {workspace.data(), workspace.bytes()}};
  const Status status = planned->run(tensors, run);
  ASSERT_TRUE(status.ok()) << to_string(status.error());
  ABACIST_CUDA_OK(cudaDeviceSynchronize());
  const Status lengths = planned->device_status(run);
  EXPECT_TRUE(lengths.ok()) << to_string(lengths.error());
}

TEST_F(GpuLarge, Row15_MoreThan65535Heads) {
  const std::int64_t b = 2, h_k = 40'000, d = 8;
  for (const Taken& taken : kEachKernel) {
    const std::int64_t s_q = taken.s_q, s_k = taken.s_k, h_q = h_k * taken.group;
    const Device4 t(static_cast<std::size_t>(b * s_q * h_q * d),
                    static_cast<std::size_t>(b * s_k * h_k * d),
                    static_cast<std::size_t>(b * h_q * s_q));
    const TensorSpec q = contiguous(DType::bf16, {b, s_q, h_q, d}, kGpu);
    const TensorSpec k = contiguous(DType::bf16, {b, s_k, h_k, d}, kGpu);
    run_as(taken,
           {.q = {t.q.data(), q},
            .k = {t.k.data(), k},
            .v = {t.v.data(), k},
            .o = {t.o.data(), q},
            .lse = {t.lse.data(), contiguous(DType::f32, {b, h_q, s_q}, kGpu)}},
           {});
    const auto o = t.read_o();
    const auto sums = t.read_lse();
    for (const std::int64_t head : {std::int64_t{0}, std::int64_t{1}, h_q / 2 - 1, h_q - 1}) {
      for (std::int64_t n = 0; n < b; ++n) {
        const std::int64_t first = (n * s_q * h_q + head) * d;
        const std::int64_t keys = (n * s_k * h_k + head / taken.group) * d;
        for (std::int64_t i = 0; i < s_q; i += 5) {
          const Row row = attend({t.q_host, first, h_q * d}, i, {t.k_host, keys, h_k * d},
                                 {t.v_host, keys, h_k * d}, 0, s_k, d);
          expect_row(o, first + i * h_q * d, row,
                     sums[static_cast<std::size_t>((n * h_q + head) * s_q + i)],
                     taken.kernel + (" head " + std::to_string(head)));
        }
      }
    }
  }
}

/// Of 16 keys; the stated maximum alone tells short sequences from others.
TEST_F(GpuLarge, Row15_EightyThousandSequences) {
  const std::int64_t b = 80'000, s = 16, d = 32;
  for (const Taken& taken : kEachKernel) {
    const std::int64_t h = taken.group, s_q = std::min(s, taken.s_q);
    const Device4 t(static_cast<std::size_t>(b * s_q * h * d), static_cast<std::size_t>(b * s * d),
                    static_cast<std::size_t>(b * s_q * h));
    std::vector<std::int32_t> cu_host(static_cast<std::size_t>(b) + 1);
    const DeviceMemory cu_q(cu_host.size() * 4);
    const DeviceMemory cu_k(cu_host.size() * 4);
    for (const auto& [cu, length] : {std::pair{&cu_q, s_q}, {&cu_k, s}}) {
      for (std::size_t n = 0; n < cu_host.size(); ++n) {
        cu_host[n] = static_cast<std::int32_t>(n) * static_cast<std::int32_t>(length);
      }
      cu->write(std::as_bytes(std::span(cu_host)));
    }
    const TensorSpec q = contiguous(DType::bf16, {b * s_q, h, d}, kGpu);
    const TensorSpec k = contiguous(DType::bf16, {b * s, 1, d}, kGpu);
    const TensorSpec cu_spec = contiguous(DType::i32, {b + 1}, kGpu);
    run_as(taken,
           {.q = {t.q.data(), q},
            .k = {t.k.data(), k},
            .v = {t.v.data(), k},
            .o = {t.o.data(), q},
            .lse = {t.lse.data(), contiguous(DType::f32, {h, b * s_q}, kGpu)},
            .cu_seqlens_q = {cu_q.data(), cu_spec},
            .cu_seqlens_k = {cu_k.data(), cu_spec}},
           {.mask = {.causal = true}, .max_lengths = {s_q, taken.s_k}});
    const auto o = t.read_o();
    const auto sums = t.read_lse();
    for (const std::int64_t n : {0, 1, 65'535, 65'536, 79'999}) {
      for (std::int64_t row = 0; row < s_q * h; row += 3) {
        const std::int64_t i = row / h, head = row % h, first = (n * s_q * h + head) * d;
        const Row must = attend({t.q_host, first, h * d}, i, {t.k_host, n * s * d, d},
                                {t.v_host, n * s * d, d}, 0, i + 1 + s - s_q, d);
        expect_row(o, first + i * h * d, must,
                   sums[static_cast<std::size_t>(head * b * s_q + n * s_q + i)],
                   taken.kernel + (" sequence " + std::to_string(n)));
      }
    }
  }
}

/// A step of decoding over four million keys.
TEST_F(GpuLarge, Row18_MillionsOfKeys) {
  const std::int64_t s = by_effort<std::int64_t>(1 << 18, 1 << 22, 1 << 22), h = 4, d = 64;
  const Device4 t(static_cast<std::size_t>(h * d), static_cast<std::size_t>(s * d),
                  static_cast<std::size_t>(h));
  const TensorSpec q = contiguous(DType::bf16, {1, 1, h, d}, kGpu);
  const TensorSpec k = contiguous(DType::bf16, {1, s, 1, d}, kGpu);
  run_as({1, s, h, ".packed.split"},
         {.q = {t.q.data(), q},
          .k = {t.k.data(), k},
          .v = {t.v.data(), k},
          .o = {t.o.data(), q},
          .lse = {t.lse.data(), contiguous(DType::f32, {1, h, 1}, kGpu)}},
         {.mask = {.causal = true}});
  const auto o = t.read_o();
  const auto sums = t.read_lse();
  for (const std::int64_t head : {std::int64_t{0}, h - 1}) {
    const Row row = attend({t.q_host, head * d, d}, 0, {t.k_host, 0, d}, {t.v_host, 0, d}, 0, s, d);
    expect_row(o, head * d, row, sums[static_cast<std::size_t>(head)], "head");
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

/// Batch strides of 2^32 elements and head strides of 2^31: every offset needs 64 bits.
TEST_F(GpuLarge, Row16_OffsetsBeyond32Bits) {
  const std::int64_t d = 64, far = std::int64_t{1} << 32;
  std::size_t free = 0, all = 0;
  ABACIST_CUDA_OK(cudaMemGetInfo(&free, &all));
  if (free < (std::size_t{90} << 30)) GTEST_SKIP() << "less than 90 GiB free";
  const auto bytes = static_cast<std::size_t>(2 * 2 * far);  // two heads of two sequences
  const DeviceMemory memory[4] = {DeviceMemory(bytes), DeviceMemory(bytes), DeviceMemory(bytes),
                                  DeviceMemory(bytes)};
  for (const Taken& taken : kEachKernel) {
    const std::int64_t s[4] = {taken.s_q, taken.s_k, taken.s_k, taken.s_q};
    const std::int64_t h[4] = {2 * taken.group, 2, 2, 2 * taken.group};
    std::vector<std::uint16_t> values[4];  // q, k, v, o: [2, h, s, d]
    TensorSpec spec[4];
    // Where a head's rows are: groups of heads lie 2^31 apart.
    const auto place = [&](std::size_t n, std::int64_t head) {
      return h[n] == 2 ? head * (far / 2) : head * (far / 2 / taken.group);
    };
    for (std::size_t n = 0; n < 4; ++n) {
      values[n] = numbers(static_cast<std::size_t>(2 * h[n] * s[n] * d), n + 1);
      spec[n] = contiguous(DType::bf16, {2, s[n], h[n], d}, kGpu);
      spec[n].stride = {far, d, place(n, 1), 1};
      for (std::int64_t row = 0; row < 2 * h[n] && n < 3; ++row) {
        const auto to = static_cast<std::size_t>(2 * (row / h[n] * far + place(n, row % h[n])));
        const auto size = static_cast<std::size_t>(2 * s[n] * d);
        ABACIST_CUDA_OK(cudaMemcpy(memory[n].data() + to,
                                   &values[n][static_cast<std::size_t>(row * s[n] * d)], size,
                                   cudaMemcpyHostToDevice));
      }
    }
    const DeviceMemory lse(static_cast<std::size_t>(2 * h[0] * s[0] * 4));
    run_as(taken,
           {.q = {memory[0].data(), spec[0]},
            .k = {memory[1].data(), spec[1]},
            .v = {memory[2].data(), spec[2]},
            .o = {memory[3].data(), spec[3]},
            .lse = {lse.data(), contiguous(DType::f32, {2, h[0], s[0]}, kGpu)}},
           {});
    std::vector<float> sums(lse.bytes() / 4);
    lse.read(std::as_writable_bytes(std::span(sums)));
    for (std::int64_t row = 0; row < 2 * h[3]; ++row) {
      const auto from = static_cast<std::size_t>(2 * (row / h[3] * far + place(3, row % h[3])));
      ABACIST_CUDA_OK(cudaMemcpy(&values[3][static_cast<std::size_t>(row * s[3] * d)],
                                 memory[3].data() + from, static_cast<std::size_t>(2 * s[3] * d),
                                 cudaMemcpyDeviceToHost));
      const std::int64_t keys = row / taken.group * s[1] * d;
      for (std::int64_t i = 0; i < s[0]; i += 7) {
        const Row must = attend({values[0], row * s[0] * d, d}, i, {values[1], keys, d},
                                {values[2], keys, d}, 0, s[1], d);
        expect_row(values[3], (row * s[3] + i) * d, must,
                   sums[static_cast<std::size_t>(row * s[0] + i)],
                   taken.kernel + (" row of heads " + std::to_string(row)));
      }
    }
  }
}

}  // namespace
}  // namespace abacist::testing
