// Which tiles of one head's score matrix a plan skips, runs, or runs under a mask.
#pragma once

#include <cstdint>
#include <vector>

#include "abacist/plan.hpp"
#include "core/mask.hpp"

namespace abacist::cli {

/// A tile of query rows, or several of them when there are too many to draw.
struct TileRow {
  std::int64_t first_query = 0, last_query = 0;  ///< [first, last)
  core::Interval run{};   ///< keys of all blocks that run, as the first tile of the row cuts them
  core::Interval full{};  ///< keys of those that need no mask arithmetic
};

struct TileMap {
  std::int64_t s_q = 0, s_k = 0;
  std::int64_t rows = 0;  ///< query rows of a tile, heads of a group packed in
  std::int64_t keys = 0;  ///< keys of a block
  std::int64_t skipped = 0, masked = 0, full = 0;  ///< tiles, all of one key/value head
  std::int64_t tile_rows = 0;
  std::int64_t tiles_of_row = 1;  ///< tile rows drawn as one
  std::vector<TileRow> drawn;
};

/// Of a dense problem's first sequence and key/value head. Throws UserError beyond a million rows
/// of tiles.
TileMap map_tiles(const Problem& problem, const PlanInfo& info);

}  // namespace abacist::cli
