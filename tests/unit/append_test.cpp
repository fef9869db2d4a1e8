// Appending to caches, dense and paged, and rotary embedding.
#include <gtest/gtest.h>

#include <cmath>

#include "abacist/abacist.hpp"
#include "support/buffer.hpp"

namespace abacist::testing {
namespace {

constexpr std::int64_t kB = 2, kNew = 3, kHeads = 2, kDqk = 6, kDv = 5, kKeys = 12, kPage = 4;

/// New rows for caches that hold 5 and 0 keys; of a paged cache pages 4, 1, 3 and 0, 2, 5.
struct Step {
  explicit Step(DType dtype, bool paged, bool random_layout = false) {
    const Layout layout{.random = random_layout};
    std::int64_t next = 0;
    const auto count = [&next] { return static_cast<double>(next++ % 97) / 4.0 - 12.0; };
    k = Buffer(dtype, {kB, kNew, kHeads, kDqk}, layout, 1);
    v = Buffer(dtype, {kB, kNew, kHeads, kDv}, layout, 2);
    k.fill(count);
    v.fill(count);
    const std::int64_t outer = paged ? 6 : kB;
    const std::int64_t inner = paged ? kPage : kKeys;
    k_cache = Buffer(dtype, {outer, inner, kHeads, kDqk}, layout, 3);
    v_cache = Buffer(dtype, {outer, inner, kHeads, kDv}, layout, 4);
    k_cache.fill(-1.0);
    v_cache.fill(-1.0);
    lengths = Buffer(DType::i32, {kB});
    lengths.fill({5.0, 0.0});
    if (paged) {
      table = Buffer(DType::i32, {kB, 3});
      table.fill({4.0, 1.0, 3.0, 0.0, 2.0, 5.0});
    }
    cos = Buffer(DType::f32, {9, 2});  // d_rot = 4
    sin = Buffer(DType::f32, {9, 2});
    std::int64_t at = 0;
    cos.fill([&] { return std::cos(0.3 * static_cast<double>(at++)); });
    at = 0;
    sin.fill([&] { return std::sin(0.3 * static_cast<double>(at++)); });
    for (Buffer* buffer : {&lengths, &table}) buffer->freeze();
  }

  AppendTensors tensors() {
    return {.k = k.in(),
            .v = v.in(),
            .k_cache = k_cache.out(),
            .v_cache = v_cache.out(),
            .lengths = lengths.in(),
            .block_table = table.in()};
  }
  Rotary rotary(RotaryStyle style) const { return {cos.in(), sin.in(), style}; }

  /// Key `j` of sequence n in the cache.
  std::array<std::int64_t, 4> place(std::int64_t n, std::int64_t j) const {
    if (!table.present()) return {n, j, 0, 0};
    return {static_cast<std::int64_t>(table.at({n, j / kPage})), j % kPage, 0, 0};
  }

  Buffer k, v, k_cache, v_cache, lengths, table, cos, sin;
};

void expect_appended(DType dtype, bool paged, bool random_layout) {
  Step step(dtype, paged, random_layout);
  const Status status = append(step.tensors());
  ASSERT_TRUE(status.ok()) << to_string(status.error());
  std::int64_t written = 0;
  for (std::int64_t n = 0; n < kB; ++n) {
    for (std::int64_t r = 0; r < kNew; ++r) {
      auto at = step.place(n, r + (n == 0 ? 5 : 0));
      for (at[2] = 0; at[2] < kHeads; ++at[2]) {
        for (at[3] = 0; at[3] < kDqk; ++at[3], ++written) {
          EXPECT_EQ(step.k_cache.at(at), step.k.at({n, r, at[2], at[3]}));
        }
        for (at[3] = 0; at[3] < kDv; ++at[3]) {
          EXPECT_EQ(step.v_cache.at(at), step.v.at({n, r, at[2], at[3]}));
        }
      }
    }
  }
  std::int64_t untouched = 0;
  for (const double value : step.k_cache.values()) untouched += value == -1.0 ? 1 : 0;
  std::int64_t new_ones = 0;
  for (const double value : step.k.values()) new_ones += value == -1.0 ? 1 : 0;
  EXPECT_EQ(untouched, step.k_cache.size() - written + new_ones);
  EXPECT_EQ(step.k_cache.damage(true), "");
  EXPECT_EQ(step.v_cache.damage(true), "");
}

TEST(Append, RowsGoBehindTheKeysThatAreThere) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const bool paged : {false, true}) {
      for (const bool random_layout : {false, true}) expect_appended(dtype, paged, random_layout);
    }
  }
}

TEST(Append, KeysTurnByTheirPosition) {
  for (const RotaryStyle style : {RotaryStyle::interleaved, RotaryStyle::half_split}) {
    for (const bool paged : {false, true}) {
      Step step(DType::f32, paged);
      ASSERT_TRUE(append(step.tensors(), step.rotary(style)).ok());
      const bool split = style == RotaryStyle::half_split;
      for (std::int64_t n = 0; n < kB; ++n) {
        for (std::int64_t r = 0; r < kNew; ++r) {
          const std::int64_t position = r + (n == 0 ? 5 : 0);
          auto at = step.place(n, position);
          at[2] = 1;
          const auto turned = [&](std::int64_t e) {
            auto place = at;
            place[3] = e;
            return step.k_cache.at(place);
          };
          for (std::int64_t i = 0; i < 2; ++i) {
            const std::int64_t first = split ? i : 2 * i;
            const std::int64_t second = split ? i + 2 : 2 * i + 1;
            const double a = step.k.at({n, r, 1, first});
            const double b = step.k.at({n, r, 1, second});
            const double angle = 0.3 * static_cast<double>(position * 2 + i);
            EXPECT_NEAR(turned(first), a * std::cos(angle) - b * std::sin(angle), 1e-5);
            EXPECT_NEAR(turned(second), a * std::sin(angle) + b * std::cos(angle), 1e-5);
          }
          EXPECT_EQ(turned(4), step.k.at({n, r, 1, 4}));  // past d_rot
          auto value = at;
          value[3] = 0;
          EXPECT_EQ(step.v_cache.at(value), step.v.at({n, r, 1, 0}));  // values never turn
        }
      }
    }
  }
}

TEST(Append, ScoresDependOnDistancesAlone) {
  // The point of rotary embedding: q at position p and k at position r give the same product as
  // both moved on.
  Step step(DType::f32, false);
  for (const RotaryStyle style : {RotaryStyle::interleaved, RotaryStyle::half_split}) {
    const auto product = [&](double q_at, double k_at) {
      Buffer q(DType::f32, {1, 1, 1, 4});
      Buffer k(DType::f32, {1, 1, 1, 4});
      q.fill({1.0, -2.0, 0.5, 3.0});
      k.fill({0.25, 1.5, -1.0, 2.0});
      Buffer position(DType::i32, {1});
      position.fill(q_at);
      EXPECT_TRUE(rotate(q.in(), position.in(), step.rotary(style), q.out()).ok());  // in place
      position.fill(k_at);
      EXPECT_TRUE(rotate(k.in(), position.in(), step.rotary(style), k.out()).ok());
      double sum = 0.0;
      for (std::int64_t e = 0; e < 4; ++e) sum += q.at({0, 0, 0, e}) * k.at({0, 0, 0, e});
      return sum;
    };
    EXPECT_NEAR(product(3, 1), product(8, 6), 1e-5);
    EXPECT_GT(std::fabs(product(3, 1) - product(3, 2)), 0.1);
  }
}

void expect_refused(Step& step, const AppendTensors& t, const Rotary& rotary,
                    const std::string& argument, const std::string& says) {
  const Status status = append(t, rotary);
  ASSERT_FALSE(status.ok()) << argument;
  EXPECT_EQ(status.error().argument, argument) << to_string(status.error());
  EXPECT_NE(status.error().message.find(says), std::string::npos) << to_string(status.error());
  EXPECT_EQ(step.k_cache.damage(false), "");
  EXPECT_EQ(step.v_cache.damage(false), "");
}

// A full cache was written past its end, into its neighbour.
TEST(Edge, Row30_AFullCacheIsRefused) {
  for (const bool paged : {false, true}) {
    Step step(DType::f32, paged);
    step.lengths.fill({5.0, 10.0});
    expect_refused(step, step.tensors(), {}, "lengths",
                   "[1] is 10, with 3 more it must be in [0, 9]: the cache has room for 12");
    step.lengths.fill({-1.0, 0.0});
    expect_refused(step, step.tensors(), {}, "lengths", "[0] is -1");
  }
}

TEST(Append, InvalidArgumentsAreRefusedBeforeAnythingIsWritten) {
  Step step(DType::f32, true);
  const AppendTensors good = step.tensors();
  const auto refused = [&](const char* argument, const char* says, const auto& spoil) {
    AppendTensors t = good;
    Rotary rotary = step.rotary(RotaryStyle::interleaved);
    spoil(t, rotary);
    expect_refused(step, t, rotary, argument, says);
  };
  refused("k", "is absent", [](auto& t, auto&) { t.k = {}; });
  refused("k", "rank is -1", [](auto& t, auto&) { t.k.rank = -1; });
  refused("rotary.cos", "rank is -1", [](auto&, auto& r) { r.cos.rank = -1; });
  refused("v", "[b, s_new, h_k, d_v]", [](auto& t, auto&) { t.v.shape[1] = 2; });
  refused("k_cache", "[pages, page_size, h_k, d]", [](auto& t, auto&) { t.k_cache.shape[3] = 5; });
  refused("v_cache", "[pages, page_size, h_k, d]", [](auto& t, auto&) { t.v_cache.shape[1] = 3; });
  refused("v_cache", "write an element twice", [](auto& t, auto&) { t.v_cache.stride[0] = 0; });
  refused("lengths", "i32[b]", [](auto& t, auto&) { t.lengths.shape[0] = 1; });
  refused("block_table", "contiguous rows", [](auto& t, auto&) { t.block_table.rank = 1; });
  refused("k_cache", "overlaps v_cache", [&](auto& t, auto&) {
    t.v_cache = t.k_cache;
    t.v.shape[3] = kDqk;
    t.v = t.k;
  });
  refused("rotary.cos", "d_rot at most 6", [](auto&, auto& r) { r.cos.shape[1] = 4; });
  refused("rotary.sin", "is absent", [](auto&, auto& r) { r.sin = {}; });
  refused("rotary.style", "is 7", [](auto&, auto& r) { r.style = static_cast<RotaryStyle>(7); });
  refused("lengths", "rotary.cos has positions up to 6",
          [](auto&, auto& r) { r.cos.shape[0] = r.sin.shape[0] = 6; });
  refused("k", "cuda:0", [](auto& t, auto&) { t.k.device = {DeviceType::cuda, 0}; });
  step.table.fill({4.0, 6.0, 3.0, 0.0, 2.0, 5.0});
  expect_refused(step, step.tensors(), {}, "block_table", "[0, 1] is 6, must be in [0, pages = 6)");
}

// Two threads wrote the same row of a page.
TEST(Append, NewKeysOfTwoSequencesInOneRowAreRefused) {
  Step step(DType::f32, true);
  const auto refused = [&](std::initializer_list<double> lengths,
                           std::initializer_list<double> table, const char* says) {
    step.lengths.fill(lengths);
    step.table.fill(table);
    expect_refused(step, step.tensors(), {}, "block_table", says);
  };
  // Rows 1 to 3 of page 1, and 3 of it with two of the next.
  refused({5.0, 7.0}, {4.0, 1.0, 3.0, 0.0, 1.0, 5.0},
          "[0, 1] and [1, 1] are both 1, must differ: new keys of both would go to row 3");
  refused({0.0, 8.0}, {2.0, 1.0, 3.0, 0.0, 1.0, 2.0},
          "[0, 0] and [1, 2] are both 2, must differ: new keys of both would go to row 0");
  // Of one sequence, with itself: keys 2 to 8 in pages of 4.
  AppendTensors t = step.tensors();
  Buffer k(DType::f32, {1, 7, kHeads, kDqk});
  Buffer v(DType::f32, {1, 7, kHeads, kDv});
  step.lengths.fill({2.0, 0.0});
  step.table.fill({4.0, 1.0, 4.0, 0.0, 2.0, 5.0});
  t.k = k.in();
  t.v = v.in();
  t.lengths.shape[0] = t.block_table.shape[0] = 1;
  EXPECT_TRUE(append(t).ok());  // rows 2 and 3 of page 4, and row 0 of it
  step.table.fill({4.0, 4.0, 1.0, 0.0, 2.0, 5.0});
  step.k_cache.freeze();
  step.v_cache.freeze();
  expect_refused(step, t, {}, "block_table",
                 "[0, 1] and [0, 0] are both 4, must differ: new keys of both would go to row 2");
}

TEST(Append, APageMayBeSharedByRowsThatDiffer) {
  Step step(DType::f32, true);
  step.k.fill([i = 0]() mutable { return static_cast<double>(++i); });
  step.lengths.fill({4.0, 7.0});
  step.table.fill({4.0, 1.0, 3.0, 4.0, 1.0, 5.0});  // rows 0 to 2 of page 1, and row 3 of it
  const Status status = append(step.tensors());
  ASSERT_TRUE(status.ok()) << to_string(status.error());
  EXPECT_EQ(step.k_cache.at({1, 2, 0, 0}), step.k.at({0, 2, 0, 0}));
  EXPECT_EQ(step.k_cache.at({1, 3, 0, 0}), step.k.at({1, 0, 0, 0}));
  EXPECT_EQ(step.k_cache.at({5, 1, 0, 0}), step.k.at({1, 2, 0, 0}));
}

// 2^40 pages of 2^40 keys overflowed 64 bits (UBSan).
TEST(Append, RoomPastSixtyThreeBits) {
  AppendTensors t;
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  t.k = t.v = ConstTensor(nullptr, contiguous(DType::f32, {0, 1, 1, 4}));
  t.k_cache = t.v_cache = Tensor(nullptr, contiguous(DType::f32, {0, kMost, 1, 4}));
  t.lengths = ConstTensor(nullptr, contiguous(DType::i32, {0}));
  t.block_table = ConstTensor(nullptr, contiguous(DType::i32, {0, kMost}));
  const Status status = append(t);
  EXPECT_TRUE(status.ok()) << to_string(status.error());
}

TEST(Append, NothingToAppend) {
  Step step(DType::f32, false);
  AppendTensors t = step.tensors();
  t.k.shape[1] = t.v.shape[1] = 0;
  EXPECT_TRUE(append(t).ok());
  EXPECT_EQ(step.k_cache.damage(false), "");
}

TEST(Rotate, OutputsApartOrInPlace) {
  Step step(DType::f32, false);
  Buffer positions(DType::i32, {kB});
  positions.fill({5.0, 0.0});
  Buffer out(DType::f32, {kB, kNew, kHeads, kDqk});
  const Rotary rotary = step.rotary(RotaryStyle::interleaved);
  ASSERT_TRUE(rotate(step.k.in(), positions.in(), rotary, out.out()).ok());
  ASSERT_TRUE(rotate(step.k.in(), positions.in(), rotary, step.k.out()).ok());
  EXPECT_EQ(out.values(), step.k.values());
  Tensor shifted = step.k.out();
  shifted.data = static_cast<float*>(shifted.data) + 1;
  EXPECT_EQ(rotate(step.k.in(), positions.in(), rotary, shifted).error().argument, "out");
  EXPECT_EQ(rotate(step.k.in(), positions.in(), {}, out.out()).error().argument, "rotary.cos");
}

}  // namespace
}  // namespace abacist::testing
