// Overlap of strided views against sets of bytes.
#include "api/overlap.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "support/buffer.hpp"
#include "support/random.hpp"

namespace abacist::api {
namespace {

using abacist::testing::Buffer;
using abacist::testing::Random;

/// Adds the byte addresses of all elements, relative to `base`; false if one comes twice.
bool add_bytes(const ConstTensor& t, const std::byte* base, std::set<std::int64_t>& bytes) {
  bool distinct = true;
  std::array<std::int64_t, kMaxRank> shape = {1, 1, 1, 1};
  std::array<std::int64_t, kMaxRank> stride{};
  for (std::size_t a = 0; a < static_cast<std::size_t>(t.rank); ++a) {
    shape[a] = t.shape[a];
    stride[a] = t.stride[a];
  }
  const std::int64_t origin = static_cast<const std::byte*>(t.data) - base;
  for (std::int64_t i = 0; i < shape[0]; ++i) {
    for (std::int64_t j = 0; j < shape[1]; ++j) {
      for (std::int64_t k = 0; k < shape[2]; ++k) {
        for (std::int64_t l = 0; l < shape[3]; ++l) {
          const std::int64_t element =
              i * stride[0] + j * stride[1] + k * stride[2] + l * stride[3];
          for (std::int64_t byte = 0; byte < size_of(t.dtype); ++byte) {
            distinct = bytes.insert(origin + element * size_of(t.dtype) + byte).second && distinct;
          }
        }
      }
    }
  }
  return distinct;
}

bool share_bytes(const ConstTensor& a, const ConstTensor& b, const std::byte* base) {
  std::set<std::int64_t> of_a;
  std::set<std::int64_t> of_b;
  add_bytes(a, base, of_a);
  add_bytes(b, base, of_b);
  for (const std::int64_t byte : of_a) {
    if (of_b.contains(byte)) return true;
  }
  return false;
}

/// A small view of any strides, somewhere in `memory` (whose bounds do not matter: nothing is
/// read).
ConstTensor random_view(Random& random, const std::byte* memory) {
  TensorSpec spec;
  spec.dtype = random.pick({DType::bf16, DType::f32, DType::f64});
  spec.rank = static_cast<int>(random.integer(1, 4));
  for (std::size_t a = 0; a < static_cast<std::size_t>(spec.rank); ++a) {
    spec.shape[a] = random.chance(0.05) ? 0 : random.integer(1, 4);
    spec.stride[a] = random.integer(-12, 12);
  }
  return {memory + random.integer(0, 60) * size_of(spec.dtype), spec};
}

TEST(Overlap, AgreesWithByteSetsOnRandomViews) {
  alignas(8) std::byte memory[4096];
  Random random(3);
  int overlapping = 0;
  for (int round = 0; round < 30'000; ++round) {
    const ConstTensor a = random_view(random, memory + 2048);
    const ConstTensor b = random_view(random, memory + 2048);
    const bool expected = share_bytes(a, b, memory);
    overlapping += expected ? 1 : 0;
    ASSERT_EQ(may_overlap(a, b), expected) << round;
    ASSERT_EQ(may_overlap(b, a), expected) << round;
  }
  EXPECT_GT(overlapping, 5'000);  // both answers were common
  EXPECT_LT(overlapping, 25'000);
}

TEST(Overlap, SelfOverlapIsNeverMissed) {
  alignas(8) std::byte memory[4096];
  Random random(4);
  for (int round = 0; round < 30'000; ++round) {
    const ConstTensor a = random_view(random, memory + 2048);
    std::set<std::int64_t> bytes;
    const bool distinct = add_bytes(a, memory, bytes);
    ASSERT_TRUE(distinct || may_overlap_itself(a)) << round;
  }
}

TEST(Overlap, PermutedAndPaddedArraysDoNotOverlapThemselves) {
  for (std::uint64_t stream = 0; stream < 2'000; ++stream) {
    Random random(stream);
    const Buffer buffer(
        DType::f32,
        {random.integer(0, 3), random.integer(1, 3), random.integer(1, 3), random.integer(1, 3)},
        {.random = true}, stream);
    ASSERT_FALSE(may_overlap_itself(buffer.spec())) << stream;
  }
}

TEST(Overlap, SlicesOfAPackedArrayAreApart) {
  // qkv packed as [b, s, 3, h, d]; its three slices interleave but share nothing.
  constexpr std::int64_t b = 2, s = 1000, h = 12, d = 64;
  const float* const memory = nullptr;  // addresses only
  TensorSpec spec = contiguous(DType::f32, {b, s, h, d});
  spec.stride = {s * 3 * h * d, 3 * h * d, d, 1};
  const auto slice = [&](std::int64_t n) {
    return ConstTensor{
        reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(memory) + 4096 +
                                      static_cast<std::uintptr_t>(n * h * d) * 4),
        spec};
  };
  for (std::int64_t m = 0; m < 3; ++m) {
    for (std::int64_t n = 0; n < 3; ++n) EXPECT_EQ(may_overlap(slice(m), slice(n)), m == n);
  }
  // Heads interleaved, odd rows against even rows, halves of every head.
  TensorSpec halves = contiguous(DType::f16, {b, s, h, d / 2});
  halves.stride = {s * h * d, h * d, d, 1};
  const auto half = [&](std::uintptr_t offset) {
    return ConstTensor{reinterpret_cast<const void*>(4096 + offset * 2), halves};
  };
  EXPECT_FALSE(may_overlap(half(0), half(d / 2)));
  EXPECT_TRUE(may_overlap(half(0), half(d / 2 - 1)));
}

TEST(Overlap, EmptyAndAbsentViewsShareNothing) {
  float x = 0;
  const ConstTensor empty{&x, contiguous(DType::f32, {0})};
  const ConstTensor one{&x, contiguous(DType::f32, {1})};
  EXPECT_FALSE(may_overlap(empty, one));
  EXPECT_FALSE(may_overlap(ConstTensor{}, one));
  EXPECT_TRUE(may_overlap(one, one));
}

TEST(Overlap, AStrideThatIsNeverTakenMayBeAnything) {
  float x[2] = {};
  TensorSpec spec = contiguous(DType::f32, {1, 1, 1, 1});
  spec.stride = {std::numeric_limits<std::int64_t>::min(), 1, std::int64_t{1} << 62, 1};
  EXPECT_TRUE(may_overlap(ConstTensor{x, spec}, ConstTensor{x, spec}));
  EXPECT_FALSE(may_overlap(ConstTensor{x, spec}, ConstTensor{x + 1, spec}));
}

}  // namespace
}  // namespace abacist::api
