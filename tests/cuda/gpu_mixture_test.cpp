// Hundreds of sequences of a few kinds in random order, so that every block has many tiles, some of
// them to be done again: the bits of a sequence are those of its kind, wherever it stands.
#include <algorithm>
#include <cstring>
#include <limits>

#include "cuda/support/gpu.hpp"
#include "support/bounds.hpp"

namespace abacist::testing {
namespace {

struct Shape {
  const char* name;
  const char* ending;  ///< of the kernel's name in the plan of the mixture
  std::int64_t group, longest_q, longest_k, d_qk, d_v;
  DType dtype;
};

class GpuMixture : public GpuTest, public ::testing::WithParamInterface<Shape> {};

/// One sequence of each kind: ordinary, scores that rise, a late key that takes it all (its tiles
/// are done again), scores past what is rounded once, a NaN query, no keys, no queries.
Instance kinds(const Shape& shape) {
  const std::int64_t q = shape.longest_q;
  const std::int64_t k = shape.longest_k;
  Case c{.h_k = 2,
         .group = shape.group,
         .d_qk = shape.d_qk,
         .d_v = shape.d_v,
         .lens_q = {q, q - 1, q, (q + 1) / 2, q - 2, 3, 0},
         .lens_k = {k, k, k - 1, k - 2, (k + 1) / 2, 0, 5},
         .dtype = shape.dtype,
         .o_dtype = shape.dtype};
  c.options.mask.causal = true;
  Instance x(c);
  const double unit = std::sqrt(static_cast<double>(shape.d_qk)) / 8.0;  // a score of 1, q being 8
  x.k.for_each([&](const auto& i, std::int64_t) {
    const std::int64_t rising = i[0] - k;
    const std::int64_t late = i[0] - 2 * k;
    if (i[2] != 0) return;
    if (rising >= 0 && rising < k) x.k.set(i, unit * static_cast<double>(rising));
    if (late >= 0 && late < k - 1) x.k.set(i, late == k - 3 ? unit * 500.0 : 0.0);
  });
  x.q.for_each([&](const auto& i, std::int64_t) {
    if (i[2] == 0 && i[0] >= q && i[0] < 3 * q - 1) x.q.set(i, 8.0);
    const bool huge = i[0] >= 3 * q - 1 && i[0] < 3 * q - 1 + (q + 1) / 2;
    if (huge) x.q.set(i, 6000.0 * x.q.at(i));
  });
  x.q.set({3 * q - 1 + (q + 1) / 2 + 1, 1, 3}, std::numeric_limits<double>::quiet_NaN());
  x.q.freeze();
  x.k.freeze();
  return x;
}

/// The sequences in `order` behind one another, on the device.
class Mixture {
 public:
  Mixture(const Instance& x, std::vector<std::size_t> order) : c_(x.c), order_(std::move(order)) {
    cu_q_ = starts(c_.lens_q);
    cu_k_ = starts(c_.lens_k);
    q_ = gather(x.q, c_.lens_q);
    k_ = gather(x.k, c_.lens_k);
    v_ = gather(x.v, c_.lens_k);
    const auto row = static_cast<std::size_t>(c_.h_q() * c_.d_v * size_of(c_.dtype));
    o_ = DeviceMemory(total_q() * row);
    lse_ = DeviceMemory(total_q() * static_cast<std::size_t>(c_.h_q()) * sizeof(float));
    const auto lengths = [](const std::vector<std::int32_t>& cu) {
      DeviceMemory memory(cu.size() * sizeof(std::int32_t));
      memory.write(std::as_bytes(std::span(cu)));
      return memory;
    };
    device_cu_q_ = lengths(cu_q_);
    device_cu_k_ = lengths(cu_k_);
  }

  ForwardTensors tensors() const {
    const auto b = static_cast<std::int64_t>(order_.size());
    const auto rows = static_cast<std::int64_t>(total_q());
    const std::int64_t keys = cu_k_.back();
    const TensorSpec cu = contiguous(DType::i32, {b + 1}, kGpu);
    return {.q = {q_.data(), contiguous(c_.dtype, {rows, c_.h_q(), c_.d_qk}, kGpu)},
            .k = {k_.data(), contiguous(c_.dtype, {keys, c_.h_k, c_.d_qk}, kGpu)},
            .v = {v_.data(), contiguous(c_.dtype, {keys, c_.h_k, c_.d_v}, kGpu)},
            .o = {o_.data(), contiguous(c_.dtype, {rows, c_.h_q(), c_.d_v}, kGpu)},
            .lse = {lse_.data(), contiguous(DType::f32, {c_.h_q(), rows}, kGpu)},
            .cu_seqlens_q = {device_cu_q_.data(), cu},
            .cu_seqlens_k = {device_cu_k_.data(), cu}};
  }

  /// O and LSE of sequence n.
  std::vector<std::byte> bits(std::size_t n, const std::vector<std::byte>& o,
                              const std::vector<std::byte>& lse) const {
    const auto first = static_cast<std::size_t>(cu_q_[n]);
    const auto rows = static_cast<std::size_t>(cu_q_[n + 1]) - first;
    const std::size_t row = o.size() / total_q();
    std::vector<std::byte> all(o.begin() + std::ptrdiff_t(first * row),
                               o.begin() + std::ptrdiff_t((first + rows) * row));
    for (std::size_t head = 0; head < static_cast<std::size_t>(c_.h_q()); ++head) {
      const auto from = lse.begin() + std::ptrdiff_t((head * total_q() + first) * sizeof(float));
      all.insert(all.end(), from, from + std::ptrdiff_t(rows * sizeof(float)));
    }
    return all;
  }

  std::vector<std::byte> o() const { return o_.read(); }
  std::vector<std::byte> lse() const { return lse_.read(); }

 private:
  std::size_t total_q() const { return static_cast<std::size_t>(cu_q_.back()); }

  std::vector<std::int32_t> starts(const std::vector<std::int64_t>& lens) const {
    std::vector<std::int32_t> cu = {0};
    for (const std::size_t kind : order_) {
      cu.push_back(cu.back() + static_cast<std::int32_t>(lens[kind]));
    }
    return cu;
  }

  DeviceMemory gather(const Buffer& from, const std::vector<std::int64_t>& lens) const {
    const std::vector<std::byte> bytes = from.element_bytes();
    const std::size_t row = bytes.size() / static_cast<std::size_t>(from.spec().shape[0]);
    std::vector<std::byte> all;
    for (const std::size_t kind : order_) {
      std::int64_t first = 0;
      for (std::size_t before = 0; before < kind; ++before) first += lens[before];
      const auto at = bytes.begin() + first * static_cast<std::ptrdiff_t>(row);
      all.insert(all.end(), at, at + lens[kind] * static_cast<std::ptrdiff_t>(row));
    }
    DeviceMemory memory(all.size());
    memory.write(all);
    return memory;
  }

  Case c_;
  std::vector<std::size_t> order_;
  std::vector<std::int32_t> cu_q_, cu_k_;
  DeviceMemory q_, k_, v_, o_, lse_, device_cu_q_, device_cu_k_;
};

TEST_P(GpuMixture, BitsOfASequenceWhereverItStands) {
  const Instance x = kinds(GetParam());
  Results alone = gpu_results(x);
  ASSERT_TRUE(run_on_gpu(x, alone).ok());
  check_forward(x, alone, Expected(x, false), GetParam().name);

  Random random(7);
  std::vector<std::size_t> order(400);
  for (std::size_t& kind : order) kind = static_cast<std::size_t>(random.integer(0, 6));
  const Mixture mixture(x, order);
  const auto planned = plan(make_problem(mixture.tensors(), x.c.options));
  ASSERT_TRUE(planned.ok()) << to_string(planned.error());
  const std::string& kernel = planned->info().kernel;
  EXPECT_TRUE(is_kernel(kernel, GetParam().ending)) << kernel;
  const DeviceMemory workspace(planned->info().workspace_bytes);
  const RunOptions options{.workspace = {workspace.data(), workspace.bytes()}};
  ASSERT_TRUE(planned->run(mixture.tensors(), options).ok());
  const Status status = planned->device_status(options);
  ASSERT_TRUE(status.ok()) << to_string(status.error());
  const std::vector<std::byte> o = mixture.o();
  const std::vector<std::byte> lse = mixture.lse();
  std::vector<std::vector<std::byte>> of_kind(7);
  for (std::size_t n = 0; n < order.size(); ++n) {
    std::vector<std::byte> bits = mixture.bits(n, o, lse);
    std::vector<std::byte>& first = of_kind[order[n]];
    if (first.empty())
      first = std::move(bits);
    else
      ASSERT_EQ(bits, first) << "kind " << order[n] << ", sequence " << n;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kernels, GpuMixture,
    ::testing::Values(Shape{"tiled64", "", 1, 300, 500, 64, 64, DType::bf16},
                      Shape{"tiled64long", "", 1, 200, 2100, 64, 64, DType::f16},
                      Shape{"tiled96", "", 1, 300, 400, 96, 96, DType::f16},
                      Shape{"tiled128", "", 1, 300, 500, 128, 128, DType::bf16},
                      Shape{"tiled192x128", "", 1, 200, 400, 192, 128, DType::f16},
                      Shape{"tiled192", "", 1, 200, 400, 192, 192, DType::bf16},
                      Shape{"tiled256", "", 1, 200, 300, 256, 256, DType::f16},
                      Shape{"packed64", ".packed", 8, 20, 500, 64, 64, DType::f16},
                      Shape{"packed128", ".packed", 5, 30, 500, 128, 128, DType::bf16},
                      Shape{"packed192x128", ".packed", 12, 9, 300, 192, 128, DType::bf16},
                      Shape{"short64", ".short", 2, 60, 60, 64, 64, DType::f16},
                      Shape{"short128", ".short", 1, 40, 48, 128, 128, DType::bf16}),
    [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace abacist::testing
