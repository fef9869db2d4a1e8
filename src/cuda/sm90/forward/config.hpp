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
  int groups;         // consumer warpgroups
  int keys;           // keys per tile
  int stages;         // K stages and, separately, V stages in shared memory
  bool q_registers;   // Q fragments live in registers, so that Q's buffer is free early
  int q_stages;       // Q buffers. One and not in registers: query tiles are not chained (kernel.cuh)

  constexpr int rows() const { return groups * 64; }
  constexpr bool chained() const { return q_registers || q_stages > 1; }
  constexpr int threads() const { return groups * 128 + 128; }
  constexpr int qk_panels() const { return ceil_div(d_qk, 64); }
  constexpr int v_panels() const { return ceil_div(d_v, 64); }
  constexpr int q_bytes() const { return rows() * qk_panels() * 128; }
  constexpr int k_bytes() const { return keys * qk_panels() * 128; }
  constexpr bool staged_output() const { return chained(); }  // O goes through shared memory of its own
  constexpr int o_bytes() const { return staged_output() ? rows() * v_panels() * 128 : 0; }
  constexpr int v_bytes() const { return keys * v_panels() * 128; }
  // Registers after setmaxnreg: the sum over warpgroups is at most 512. With 32 the producer of wide
  // tiles spills.
  constexpr int consumer_registers() const { return groups == 3 ? 152 : 232; }
  constexpr int producer_registers() const { return groups == 3 ? 56 : 40; }
};

// Figures: one H200, main loop alone or whole kernel, see docs/kernels/sm90-forward.md.
inline constexpr ForwardTile kForwardTiles[] = {
    {64, 64, 3, 96, 2, true, 1},    // three groups: exp-bound, so hide more softmax (575..603 in the lab)
    {96, 96, 2, 128, 2, true, 1},
    {128, 128, 2, 128, 2, true, 1},   // Q in registers: one shared-memory read less per score (+2% in the lab)
    {192, 128, 2, 112, 2, true, 1},
    {192, 192, 2, 96, 2, false, 1},
    {256, 256, 2, 80, 2, false, 1},   // 224 KB of shared memory: nothing larger fits
};

// The shape listed for exactly this pair (used by the generated instances).
constexpr ForwardTile forward_tile(int d_qk, int d_v) {
  for (const ForwardTile& tile : kForwardTiles) {
    if (tile.d_qk == d_qk && tile.d_v == d_v) return tile;
  }
  throw "no such tile";  // a compile-time error
}

}  // namespace abacist::cuda::sm90
