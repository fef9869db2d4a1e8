#include "picture/tiles.hpp"

#include <algorithm>

#include "user_error.hpp"

namespace abacist::cli {
namespace {

constexpr std::int64_t kMostDrawn = 96;
constexpr std::int64_t kMostRows = 1 << 20;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Blocks of `keys` keys from `start` on: those that touch an interval, as keys.
core::Interval touched(core::Interval interval, std::int64_t start, std::int64_t keys,
                       std::int64_t end) {
  if (interval.empty()) return {start, start};
  const std::int64_t first = (interval.begin - start) / keys;
  const std::int64_t last = ceil_div(interval.end - start, keys);
  return {start + first * keys, std::min(start + last * keys, end)};
}

/// Blocks that lie inside an interval; the last block of all ends at `end`.
core::Interval inside(core::Interval interval, std::int64_t start, std::int64_t keys,
                      std::int64_t end) {
  const std::int64_t first =
      start + ceil_div(std::max<std::int64_t>(interval.begin - start, 0), keys) * keys;
  const std::int64_t last =
      interval.end >= end ? end
                          : start + std::max<std::int64_t>(interval.end - start, 0) / keys * keys;
  return last > first ? core::Interval{first, last} : core::Interval{start, start};
}

/// One tile of query rows.
TileRow tile_row(const core::MaskRule& rule, std::int64_t first, std::int64_t last,
                 std::int64_t keys, bool from_first_visible) {
  const core::Interval any = rule.visible_any(first, last);
  const core::Interval all{rule.visible(last - 1).begin, rule.visible(first).end};
  // The CPU's forward kernel starts its blocks at the tile's first visible key.
  const std::int64_t start = from_first_visible && !any.empty() ? any.begin : 0;
  const std::int64_t end = from_first_visible && !any.empty() ? any.end : rule.len_k;
  TileRow row{first, last, touched(any, start, keys, end), inside(all, start, keys, end)};
  return row;
}

}  // namespace

TileMap map_tiles(const Problem& problem, const PlanInfo& info) {
  const Operands& x = problem.operands;
  TileMap map;
  map.s_q = x.q.shape[1];
  map.s_k = x.k.shape[1];
  const std::int64_t group = x.k.shape[2] > 0 ? x.q.shape[2] / x.k.shape[2] : 1;
  map.rows = std::max(info.rows, 1);
  map.keys = std::max(info.keys, 1);
  const std::int64_t packed = map.s_q * std::max<std::int64_t>(group, 1);
  map.tile_rows = ceil_div(packed, map.rows);
  if (map.tile_rows > kMostRows) throw UserError("the problem has too many tiles for a picture");
  map.tiles_of_row = std::max<std::int64_t>(ceil_div(map.tile_rows, kMostDrawn), 1);
  const core::MaskRule rule = core::mask_rule(problem.options.mask, map.s_q, map.s_k);
  const bool from_first_visible = info.kernel.starts_with("cpu.forward");
  for (std::int64_t t = 0; t < map.tile_rows; ++t) {
    const std::int64_t first = t * map.rows / group;
    const std::int64_t last = (std::min((t + 1) * map.rows, packed) - 1) / group + 1;
    const TileRow row = tile_row(rule, first, last, map.keys, from_first_visible);
    const std::int64_t run = ceil_div(row.run.size(), map.keys);
    const std::int64_t full = ceil_div(row.full.size(), map.keys);
    map.full += full;
    map.masked += run - full;
    map.skipped += ceil_div(map.s_k, map.keys) - run;
    if (t % map.tiles_of_row == 0) {
      map.drawn.push_back(row);
      continue;
    }
    TileRow& drawn = map.drawn.back();
    drawn.last_query = row.last_query;
    if (drawn.run.empty()) {
      drawn.run = row.run;
    } else if (!row.run.empty()) {
      drawn.run = {std::min(drawn.run.begin, row.run.begin), std::max(drawn.run.end, row.run.end)};
    }
    drawn.full = {std::max(drawn.full.begin, row.full.begin),
                  std::min(drawn.full.end, row.full.end)};
  }
  return map;
}

}  // namespace abacist::cli
