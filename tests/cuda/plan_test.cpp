// What the plans of the CUDA backend say: a function of the problem and of facts about the GPU, so
// that no GPU is needed here.
#include <gtest/gtest.h>

#include <algorithm>

#include "cuda/support/problems.hpp"

namespace abacist::testing {
namespace {

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

bool is_packed(const PlanInfo& info) { return info.kernel.find(".packed") != std::string::npos; }
bool is_split(const PlanInfo& info) { return info.kernel.ends_with(".split"); }

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
    const std::int64_t s_k = b == 1 ? 250 : 1000;  // too few to be split
    const auto draft = plan_of(grouped(b, h_q, h_k, s_q, s_k));
    ASSERT_TRUE(draft.ok()) << to_string(draft.error());
    const PlanInfo& info = draft->info;
    ASSERT_FALSE(is_split(info));
    const std::string what = std::to_string(b) + " x " + std::to_string(h_q) + "/" +
                             std::to_string(h_k) + " heads, s_q " + std::to_string(s_q) + ": " +
                             info.kernel;
    EXPECT_EQ(is_packed(info), tiles > 0) << what;
    const std::int64_t expected = tiles > 0 ? tiles : h_q * ((s_q + 127) / 128);
    EXPECT_EQ(info.work_items, b * expected) << what;
    EXPECT_EQ(info.grid, std::min<std::int64_t>(132, b * expected)) << what;
    // Q and O once, K and V once for each tile.
    EXPECT_EQ(info.slow_memory_bytes.value,
              b * (h_q * s_q * 2 * 128 * 2 + expected * s_k * 2 * 128 * 2))
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

/// 132 multiprocessors: keys are split where query tiles leave most of them idle for long, into as
/// many parts as fill them, and nowhere else.
TEST(CudaPlan, KeysAreSplitWhereTilesAreTooFew) {
  const struct {
    std::int64_t b, h_q, h_k, s_q, s_k;
    std::int64_t least, most;  // splits
    bool packed;
  } cases[] = {{1, 64, 8, 1, 1024, 8, 8, true},
               {1, 64, 8, 1, 8192, 11, 13, true},
               {1, 64, 8, 1, 131072, 8, 9, true},  // bound by memory, which half of the blocks fill
               {4, 64, 8, 1, 32768, 2, 2, true},
               {1, 64, 8, 64, 32768, 4, 4, true},   // by work
               {1, 32, 32, 1, 16384, 2, 3, false},  // one head a tile
               {1, 71, 1, 1, 32768, 26, 43, true},
               {1, 32, 1, 1, 32768, 52, 86, true},
               {1, 1, 1, 1, 131072, 66, 99, false},
               {2, 8, 8, 1, 65536, 4, 6, false},
               {20, 64, 8, 1, 8192, 3, 4, true},  // a last wave of 28 tiles
               // Tiles enough, or all that the memory gives already.
               {16, 64, 8, 1, 8192, 1, 1, true},
               {64, 64, 8, 1, 8192, 1, 1, true},
               {8, 64, 8, 1, 8192, 1, 1, true},
               {132, 1, 1, 1, 32768, 1, 1, false},
               {16, 64, 8, 64, 8192, 1, 1, true},
               {16, 64, 8, 4096, 8192, 1, 1, false},
               {8, 16, 16, 2048, 2048, 1, 1, false},
               // Too few keys for a merge to pay.
               {1, 64, 8, 1, 256, 1, 1, true},
               {1, 8, 8, 512, 512, 1, 1, false},
               {1, 1, 1, 128, 128, 1, 1, false},
               {1, 16, 16, 1024, 1024, 1, 1, false}};
  for (const auto& [b, h_q, h_k, s_q, s_k, least, most, packed] : cases) {
    const auto draft = plan_of(grouped(b, h_q, h_k, s_q, s_k));
    ASSERT_TRUE(draft.ok()) << to_string(draft.error());
    const PlanInfo& info = draft->info;
    const std::string what = std::to_string(b) + " x " + std::to_string(h_q) + "/" +
                             std::to_string(h_k) + " heads, " + std::to_string(s_q) + " x " +
                             std::to_string(s_k) + ": " + info.kernel;
    EXPECT_GE(info.splits, least) << what;
    EXPECT_LE(info.splits, most) << what;
    EXPECT_EQ(is_split(info), info.splits > 1) << what;
    EXPECT_EQ(is_packed(info), packed) << what;
  }
}

/// What a split plan says of itself.
TEST(CudaPlan, SplitsAreInTheFigures) {
  for (const std::int64_t h_k : {8, 32}) {
    Problem problem = grouped(1, 32, h_k, 3, 9000);
    problem.operands.lse = contiguous(DType::f32, {1, 32, 3}, kGpu);
    const auto draft = plan_of(problem);
    ASSERT_TRUE(draft.ok()) << to_string(draft.error());
    const PlanInfo& info = draft->info;
    ASSERT_TRUE(is_split(info)) << info.kernel;
    ASSERT_EQ(is_packed(info), h_k == 8) << info.kernel;
    EXPECT_EQ(info.work_items, h_k * info.splits);
    EXPECT_EQ(info.grid, std::min<std::int64_t>(132, info.work_items));
    // O, maximum and sum of each row and split, float.
    const std::int64_t partial = info.splits * 32 * 3 * (128 + 2) * 4;
    EXPECT_EQ(info.workspace_bytes, static_cast<std::size_t>(partial));
    // At most: rows that see no key of a split leave less, and the merge loads in groups of eight.
    EXPECT_FALSE(info.slow_memory_bytes.exact);
    const std::int64_t least = info.splits * 32 * 3 * 128 * 2 + 32 * 3 * (128 * 2 + 4) +
                               2 * partial + h_k * 9000 * 2 * 128 * 2;
    EXPECT_GE(info.slow_memory_bytes.value, least);
    EXPECT_LE(info.slow_memory_bytes.value, least + 2 * partial + 32 * 3 * 8 * 8 * 128 * 4);
    EXPECT_TRUE(info.deterministic);
  }
}

/// Rows of a split are a multiple of four, behind the status word of lengths on the device.
TEST(CudaPlan, SplitsOfRaggedLengths) {
  Problem p;
  Operands& x = p.operands;
  x.q = x.o = contiguous(DType::bf16, {5, 3, 64}, kGpu);
  x.k = x.v = contiguous(DType::bf16, {60'000, 3, 64}, kGpu);
  x.cu_seqlens_q = x.cu_seqlens_k = contiguous(DType::i32, {4}, kGpu);
  p.options.max_lengths = {2, 50'000};  // one long sequence: splits for it, not for the mean
  const auto draft = plan_of(p);
  ASSERT_TRUE(draft.ok()) << to_string(draft.error());
  const PlanInfo& info = draft->info;
  ASSERT_TRUE(is_split(info)) << info.kernel;
  EXPECT_GE(info.splits, 16);
  EXPECT_EQ(info.workspace_bytes,
            256 + static_cast<std::size_t>(info.splits) * 16 * (64 + 2) * sizeof(float));
  EXPECT_FALSE(info.slow_memory_bytes.exact);
  // A window leaves few keys of however many.
  p.options.mask.window = {100, 0};
  const auto window = plan_of(p);
  ASSERT_TRUE(window.ok()) << to_string(window.error());
  EXPECT_FALSE(is_split(window->info)) << window->info.kernel;
}

/// Whatever the problem: a bounded workspace, no more splits than tiles of keys, and none without
/// the name that says so.
TEST(CudaPlan, SplitsAreBounded) {
  for (const std::int64_t b : {1, 3, 17}) {
    for (const std::int64_t h_k : {1, 5, 40}) {
      for (const std::int64_t s_q : {1, 30, 1000, 20'000}) {
        for (const std::int64_t s_k : {1, 100, 5000, 1'000'000}) {
          const auto draft = plan_of(grouped(b, h_k * 2, h_k, s_q, s_k));
          ASSERT_TRUE(draft.ok()) << to_string(draft.error());
          const PlanInfo& info = draft->info;
          EXPECT_EQ(is_split(info), info.splits > 1);
          EXPECT_LE(info.splits, (s_k + 127) / 128);
          EXPECT_LE(info.splits, 256);
          EXPECT_LE(info.workspace_bytes, std::size_t{64} << 20);
          EXPECT_EQ(info.workspace_bytes > 0, info.splits > 1);
          if (info.splits > 1) {
            EXPECT_LE(info.work_items, 5 * 132);
          }
        }
      }
    }
  }
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
          EXPECT_EQ(info.workspace_bytes > 0, is_split(info));
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

}  // namespace
}  // namespace abacist::testing
