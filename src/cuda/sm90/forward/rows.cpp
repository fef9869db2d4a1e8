#include "rows.hpp"

#include <algorithm>
#include <cmath>
#include <span>

namespace abacist::cuda::sm90 {
namespace {

constexpr int64_t kMostPartialBytes = int64_t(64) << 20;
constexpr int64_t kMostRows = int64_t(1) << 30;

int64_t ceil_quotient(int64_t a, int64_t b) { return (a + b - 1) / b; }

// As many query heads of a kv head as fit into 64 rows, in equal parts.
ForwardRows packed_rows(int64_t group) {
  const int64_t parts = ceil_quotient(group, 64), heads = ceil_quotient(group, parts);
  return {int(heads), int(64 / heads)};
}

// What the query tiles of a problem cost, each with the same keys.
struct TileCost {
  int64_t tiles;
  int64_t per_keys;  // a tile of keys; with one busy warpgroup: 4
  int64_t time;      // of the SM with the most to do
};

// Lengths on the device: of the same sum.
TileCost cost_of(const ForwardGeometry& g, const ForwardRows& rows, int groups,
                 int multiprocessors) {
  const int64_t positions = int64_t{groups} * rows.positions;
  int64_t tiles = g.b * ceil_quotient(g.s_q, positions);
  if (g.cu_seqlens_q) tiles = std::min(tiles, ceil_quotient(g.total_q, positions) + g.b);
  tiles *= rows.tile_heads(g.h_q, g.h_k);
  const int64_t busy = ceil_quotient(std::min(g.s_q, positions), rows.positions);
  return {tiles, 3 + busy, ceil_quotient(tiles, multiprocessors) * (3 + busy)};
}

// Tiles of the keys that a query tile sees: the mean of all sequences, and at most.
struct KeyTiles {
  double mean, most;
};

KeyTiles key_tiles(const ForwardArguments& arguments, const ForwardRows& rows,
                   const ForwardTile& tile) {
  const ForwardGeometry& g = arguments.geometry;
  const double positions = std::min<double>(double(g.s_q), double(tile.groups) * rows.positions);
  const double left = double(arguments.mask.left), right = double(arguments.mask.right);
  double most = std::min(double(g.s_k), left + right + positions);
  if (arguments.mask.top_left) most = std::min(most, double(g.s_q) + right);
  double mean = most;
  if (g.cu_seqlens_k) mean = std::min(most, double(g.total_k) / double(g.b));
  return {std::ceil(std::max(mean, 0.0) / tile.keys), std::ceil(std::max(most, 0.0) / tile.keys)};
}

// Time of a forward pass, in quarters of what a tile of 128 keys takes a block with one busy
// warpgroup: 0.23 us of an H200 at d 128, in which its memory moves 1 MB. With few rows half of
// that does not depend on the tile's size. Constants: measured (docs/kernels/sm90-forward.md).
struct SplitCost {
  static constexpr double kItem = 8, kMerge = 8, kMergeSplit = 0.125, kAllBusy = 4;
  static constexpr double kBytes = 1 << 20, kCrowded = 1.05;
  TileCost tiles;
  KeyTiles keys;
  double per_keys;   // a tile of keys
  double memory;     // K and V once
  double per_split;  // partial results
  double multiprocessors;

  SplitCost(const ForwardArguments& arguments, const ForwardRows& rows, const ForwardTile& tile,
            int sms)
      : tiles(cost_of(arguments.geometry, rows, tile.groups, sms)),
        keys(key_tiles(arguments, rows, tile)),
        multiprocessors(sms) {
    const ForwardGeometry& g = arguments.geometry;
    const double size = double(tile.keys) * (tile.d_qk + tile.d_v) / (128 * 256);
    per_keys = double(tiles.per_keys) * (0.5 + 0.5 * size);
    memory = keys.mean * tile.keys * double(g.b * g.h_k) * double(2 * (g.d_qk + g.d_v)) / kBytes;
    // Written and read, and each costs an instruction more for every few bytes.
    per_split = 4 * double(partial_bytes(g, 1)) / kBytes;
  }
  // Items that run at once, each of so much time by itself. More than half of the multiprocessors
  // get less out of the memory.
  double wave(double items, double item, double moved) const {
    if (2 * items > multiprocessors) moved *= kCrowded;
    return items == 0 ? 0 : std::max(item, moved) + std::min(item, moved) / 16;
  }
  double operator()(int splits) const {
    const double items = double(tiles.tiles) * splits;
    const double item = std::ceil(keys.mean / splits) * per_keys + kItem;
    const double longest = std::ceil(keys.most / splits) * per_keys + kItem;
    const double waves = std::floor(items / multiprocessors);
    const double rest = items - waves * multiprocessors;
    const double time = waves * wave(multiprocessors, item, memory * multiprocessors / items) +
                        wave(rest, item, memory * rest / items);
    if (splits == 1) return std::max(time, longest);
    // The merge's blocks, and those of what follows, wait where there is room.
    const double late = items > 0.75 * multiprocessors ? kAllBusy : 0;
    return std::max(time, longest) + kMerge + (kMergeSplit + per_split) * splits + late;
  }
};

}  // namespace

// Heads are packed if that takes an eighth less time, or as long with an eighth fewer tiles and so
// fewer bytes. Measured (H200, 64 heads on 8, 8k to 32k keys, docs/kernels/sm90-forward.md): 4
// times faster at 1 to 16 queries, 1.5 at 64, 1.16 at 100; with every tile in one wave 0.8 at 64,
// the second warpgroup being busy, too.
ForwardRows choose_rows(const ForwardArguments& arguments, const ForwardTile& tile,
                        const ForwardTile& packed_tile, int multiprocessors) {
  const ForwardGeometry& g = arguments.geometry;
  const ForwardRows plain, packed = packed_rows(g.h_q / g.h_k);
  if (!packed.packed() || arguments.row_choice == 1) return plain;
  if (arguments.row_choice == 2) return packed;
  const TileCost before = cost_of(g, plain, tile.groups, multiprocessors);
  const TileCost after = cost_of(g, packed, packed_tile.groups, multiprocessors);
  const bool faster = 8 * after.time <= 7 * before.time;
  const bool lighter = after.time == before.time && 8 * after.tiles <= 7 * before.tiles;
  return faster || lighter ? packed : plain;
}

// Keys are split if that takes an eighth less time: where the query tiles are too few for the
// multiprocessors, or leave most of them idle in the last wave.
ForwardSplit choose_split(const ForwardArguments& arguments, const ForwardTile& tile,
                          const ForwardTile& split_tile, const ForwardRows& rows,
                          int multiprocessors) {
  const ForwardGeometry& g = arguments.geometry;
  const ForwardRows plain, packed = packed_rows(g.h_q / g.h_k);
  if (arguments.splits > 0)
    return {arguments.splits, arguments.row_choice == 0 && arguments.splits > 1 ? packed : rows};
  if (partial_rows(g) > kMostRows) return {1, rows};
  // Of its own tile, too: else it would be for another size of tile that keys are split.
  double best = 0.875 * std::min(SplitCost(arguments, rows, tile, multiprocessors)(1),
                                 SplitCost(arguments, rows, split_tile, multiprocessors)(1));
  ForwardSplit chosen{1, rows};
  const int64_t room = kMostPartialBytes / int64_t(std::max<size_t>(partial_bytes(g, 1), 1));
  const ForwardRows both[] = {packed, plain};
  for (const ForwardRows& each : std::span(both, packed.packed() ? 2 : 1)) {
    if (arguments.row_choice == (each.packed() ? 1 : 2)) continue;
    const SplitCost cost(arguments, each, split_tile, multiprocessors);
    // More than four waves of items gain nothing. The tiles of a varlen batch are listed as if
    // every sequence were the longest.
    const int64_t listed = g.b * ceil_quotient(g.s_q, int64_t{split_tile.groups} * each.positions) *
                           each.tile_heads(g.h_q, g.h_k);
    const int64_t most = std::min<int64_t>({kMostSplits, room, int64_t(cost.keys.most),
                                            4 * multiprocessors / cost.tiles.tiles + 1,
                                            64 * multiprocessors / listed});
    // One head a tile reads the same keys for each head of a group, from the L2 at best.
    const double handicap = each.packed() == packed.packed() ? 1 : 1.125;
    for (int splits = 2; splits <= most; ++splits) {
      const double time = handicap * cost(splits);
      if (time >= best) continue;
      best = time;
      chosen = {splits, each};
    }
  }
  return chosen;
}

int64_t result_rows(const ForwardGeometry& g) {
  return g.h_q * (g.cu_seqlens_q ? g.total_q : g.b * g.s_q);
}

// Of four rows each, so that every split begins at a multiple of 32 bytes.
int64_t partial_rows(const ForwardGeometry& g) { return ceil_quotient(result_rows(g), 4) * 4; }

size_t partial_bytes(const ForwardGeometry& g, int splits) {
  return size_t(splits) * size_t(partial_rows(g)) * size_t(g.d_v + 2) * sizeof(float);
}

}  // namespace abacist::cuda::sm90
