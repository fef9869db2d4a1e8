// Tile shapes of the Hopper forward kernel. This is the only place where they are written down.
#pragma once
#include <cstddef>
#include <cstdint>

namespace abacist::cuda::sm90 {

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// One kernel shape: a block of `groups` consumer warpgroups of 64 query rows each and one producer
// warpgroup. d_qk and d_v are the widths computed with; a narrower problem runs with the missing
// columns read as zeros by TMA.
struct ForwardTile {
  int d_qk;
  int d_v;
  int groups;    // consumer warpgroups
  int keys;      // keys per tile
  int stages;    // K stages and, separately, V stages in shared memory
  int q_steps;   // steps of 16 columns whose Q fragments live in registers
  int q_stages;  // Q buffers. One and not all in registers: query tiles are not chained
  int longest;   // chosen for lengths up to this; 0: any
  bool staged;   // P is packed, and P V waited for, under the last quarter of the exponentials
  // Query heads of a group may share a tile. Only in kernels that can modify scores: what asks for
  // the place of each row (RowPlace) costs a change of query tile a hundred instructions.
  bool packs = false;
  // Keys may be cut into parts, of which unfinished rows are left (partial.cuh). Packs, too.
  // Kernels of their own: asking whether there are parts cost the others up to 4%. (At d 256, where
  // O is stored straight from registers anyway, no more than 2%: only_splits.)
  bool splits = false;

  constexpr ForwardTile with(bool packed, bool split) const {
    ForwardTile tile = *this;
    tile.packs = packed;
    tile.splits = split;
    return tile;
  }
  // The kernel for split keys of d 256 serves where they are not, too.
  constexpr bool only_splits() const { return splits && d_qk != 256; }
  constexpr int rows() const { return groups * 64; }
  // Q's buffer is free early.
  constexpr bool q_registers() const { return q_steps == ceil_div(d_qk, 16); }
  constexpr bool chained() const { return q_registers() || q_stages > 1; }
  constexpr int threads() const { return groups * 128 + 128; }
  constexpr int qk_panels() const { return ceil_div(d_qk, 64); }
  constexpr int v_panels() const { return ceil_div(d_v, 64); }
  constexpr int q_bytes() const { return rows() * qk_panels() * 128; }
  constexpr int k_bytes() const { return keys * qk_panels() * 128; }
  // O goes through shared memory of its own.
  constexpr bool staged_output() const { return chained() && !splits; }
  constexpr int o_bytes() const { return staged_output() ? rows() * v_panels() * 128 : 0; }
  constexpr int v_bytes() const { return keys * v_panels() * 128; }
  // Registers after setmaxnreg: the sum over warpgroups is at most 512. With 32 the producer of
  // wide tiles spills.
  constexpr int consumer_registers() const { return groups == 3 ? 152 : 232; }
  constexpr int producer_registers() const { return groups == 3 ? 56 : 40; }
};

// Figures: one H200, TFLOP/s sustained, see docs/kernels/sm90-forward.md. The first that fits is
// taken.
inline constexpr ForwardTile kForwardTiles[] = {
    // 128 x 128 fits short lengths without waste: s 1k full 441 -> 479, causal 320 -> 360; 2k full
    // 502 -> 512, causal 436 -> 436; 16k full 580 -> 532.
    {64, 64, 2, 128, 4, 4, 1, 2048, true},
    // d 64 is bound by exp and issue slots: three groups hide more softmax. 128 keys spill.
    {64, 64, 3, 96, 4, 4, 1, 0, false},
    {96, 96, 2, 128, 2, 6, 1, 0, false},
    // Q in registers: free early, and one read of shared memory less per score. 144 keys: 733
    // against 745.
    {128, 128, 2, 128, 2, 8, 1, 0, false},
    {192, 128, 2, 112, 2, 12, 1, 0, true},
    {192, 192, 2, 96, 2, 0, 1, 0, false},
    // Smaller boundary tiles: s 512 full 456 -> 495, s 2k 630 -> 650; s 16k full 731 -> 712.
    {256, 256, 2, 64, 2, 4, 1, 4096, true},
    {256, 256, 2, 80, 2, 4, 1, 0, true},  // 224 KB of shared memory: nothing larger fits
};
inline constexpr int kForwardTileCount = sizeof(kForwardTiles) / sizeof(kForwardTiles[0]);

// Parts that the keys of a query tile are cut into at most.
inline constexpr int kMostSplits = 256;

// The kernel for short sequences (short.cuh): blocks of four warps, each with 16 rows of its own.
inline constexpr int kShortThreads = 128;
inline constexpr int kShortRows = 16;
// Chosen for lengths up to this: at d 64 half the time of tiles at 64 tokens, at d 128 4% more.
constexpr int short_longest(int d) { return d <= 64 ? 64 : 48; }

}  // namespace abacist::cuda::sm90
