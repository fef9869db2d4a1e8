#include "picture/picture.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "picture/svg.hpp"
#include "picture/tiles.hpp"
#include "text.hpp"

namespace abacist::cli {
namespace {

using Anchor = Svg::Anchor;

constexpr double kWidth = 960, kMargin = 28;
constexpr double kTop = 118;    // of the two upper panels
constexpr double kMap = 400;    // longest side of the tile map
constexpr double kRight = 520;  // where the bars begin
constexpr double kBars = 230;   // length of the longest bar

std::string title_text(const Problem& problem) {
  return problem.pass == Pass::forward ? "Attention, forward pass" : "Attention, backward pass";
}

/// "2,048 queries, 2,048 keys, 9 query heads over 3, d 64, batch 1, bf16"
std::string sizes_text(const Problem& problem) {
  const Operands& x = problem.operands;
  const auto& q = x.q.shape;
  const auto& k = x.k.shape;
  std::string heads = fmt::format("{} {}", q[2], q[2] == 1 ? "head" : "heads");
  if (q[2] != k[2]) heads = fmt::format("{} query heads over {}", q[2], k[2]);
  std::string d = fmt::format("d {}", q[3]);
  if (q[3] != x.v.shape[3]) d += fmt::format("/{}", x.v.shape[3]);
  return fmt::format("{} queries, {} keys, {}, {}, batch {}, {}", count_text(q[1]),
                     count_text(k[1]), heads, d, q[0], to_string(x.q.dtype));
}

/// The line of explain() that says which mask and score.
std::string mask_text(const Plan& plan) {
  const std::string text = explain(plan);
  std::size_t begin = text.find("\nmask ");
  if (begin == text.npos) return "";
  begin = text.find_first_not_of(' ', begin + 5);
  return text.substr(begin, text.find('\n', begin) - begin);
}

std::string share_text(std::int64_t part, std::int64_t all) {
  if (all == 0) return count_text(part);
  return fmt::format("{} ({:.1f}%)", count_text(part),
                     100.0 * static_cast<double>(part) / static_cast<double>(all));
}

/// Numbers of a map's axes, and where they lie on the paper.
struct Axes {
  double x = kMargin, y = kTop + 38, width = kMap, height = kMap;
  double keys = 1, queries = 1;

  explicit Axes(const TileMap& map)
      : keys(static_cast<double>(std::max<std::int64_t>(map.s_k, 1))),
        queries(static_cast<double>(std::max<std::int64_t>(map.s_q, 1))) {
    // To scale, unless one side would be too thin to see.
    const double ratio = std::clamp(queries / keys, 0.12, 1.0 / 0.12);
    ratio < 1.0 ? height *= ratio : width /= ratio;
  }
  double at_key(std::int64_t key) const { return x + width * static_cast<double>(key) / keys; }
  double at_query(std::int64_t i) const { return y + height * static_cast<double>(i) / queries; }
};

std::string tile_row_title(const TileMap& map, const TileRow& row) {
  std::string text = fmt::format("queries {} to {}: ", count_text(row.first_query),
                                 count_text(row.last_query - 1));
  if (row.run.empty()) return text + "no key is visible";
  text += fmt::format("keys {} to {} run", count_text(row.run.begin), count_text(row.run.end - 1));
  if (map.tiles_of_row > 1) return text;
  const std::int64_t run = (row.run.size() + map.keys - 1) / map.keys;
  const std::int64_t full = (row.full.size() + map.keys - 1) / map.keys;
  return text + fmt::format(", {} full and {} masked", full, run - full);
}

/// Returns the y below the panel.
double draw_tiles(Svg& svg, const TileMap& map) {
  const Axes axes(map);
  svg.text("head", kMargin, kTop, "Tiles of the score matrix (one head)");
  svg.text("small", axes.x, axes.y - 8, fmt::format("keys 0 to {}", count_text(map.s_k)));
  svg.text("small", axes.x, axes.y + axes.height + 16,
           fmt::format("queries 0 to {}", count_text(map.s_q)));
  svg.rect("skipped", axes.x, axes.y, axes.width, axes.height);
  for (const TileRow& row : map.drawn) {
    const double y = axes.at_query(row.first_query);
    const double height = axes.at_query(row.last_query) - y;
    const auto draw = [&](const char* type, core::Interval keys) {
      if (keys.empty()) return;
      const double x = axes.at_key(keys.begin);
      svg.rect(type, x, y, axes.at_key(keys.end) - x, height, tile_row_title(map, row));
    };
    draw("masked", row.run);
    draw("full", row.full);
    const double block = axes.width * static_cast<double>(map.keys) / axes.keys;
    if (map.tiles_of_row > 1 || block < 4.0 || height < 4.0) continue;
    for (std::int64_t key = row.run.begin + map.keys; key < row.run.end; key += map.keys) {
      svg.line("cut", axes.at_key(key), y, axes.at_key(key), y + height);
    }
    if (!row.run.empty()) svg.line("cut", axes.x, y, axes.x + axes.width, y);
  }
  double y = axes.y + axes.height + 40;
  const std::int64_t all = map.full + map.masked + map.skipped;
  const struct {
    const char* type;
    const char* name;
    std::int64_t count;
  } legend[] = {{"full", "full: every pair visible, no mask arithmetic", map.full},
                {"masked", "masked: an edge of the mask or of the keys runs through", map.masked},
                {"skipped", "skipped: never read, never computed", map.skipped}};
  for (const auto& [type, name, count] : legend) {
    svg.rect(type, kMargin, y - 11, 14, 14);
    svg.text("", kMargin + 22, y, fmt::format("{}  {}", share_text(count, all), name));
    y += 21;
  }
  std::string size = fmt::format("A tile is {} query rows (heads of a group packed in) by {} keys.",
                                 map.rows, map.keys);
  if (map.tiles_of_row > 1) {
    size += fmt::format(" {} rows of tiles are drawn as one.", map.tiles_of_row);
  }
  svg.text("small", kMargin, y, size);
  return y + 10;
}

struct Bar {
  const char* type;
  std::string name;
  double value;
  std::string text;
};

double draw_bars(Svg& svg, double y, const char* head, const std::vector<Bar>& bars) {
  double most = 0.0;
  for (const Bar& bar : bars) most = std::max(most, bar.value);
  svg.text("head", kRight, y, head);
  y += 10;
  for (const Bar& bar : bars) {
    const double length = most > 0.0 ? kBars * bar.value / most : 0.0;
    svg.text("small", kRight, y + 12, bar.name);
    svg.rect(bar.type, kRight, y + 18, std::max(length, 1.0), 13);
    svg.text("", kRight + std::max(length, 1.0) + 8, y + 29, bar.text);
    y += 38;
  }
  return y + 22;
}

std::string bytes_of(const Figure& figure) {
  return (figure.exact ? "" : "at most ") + bytes_text(static_cast<double>(figure.value));
}

double draw_costs(Svg& svg, const Problem& problem, const PlanInfo& info) {
  const Operands& x = problem.operands;
  double pairs = 1.0;
  for (const std::int64_t extent : {x.q.shape[0], x.q.shape[1], x.q.shape[2], x.k.shape[1]}) {
    pairs *= static_cast<double>(extent);
  }
  const double visible = static_cast<double>(info.visible_pairs.value);
  const double flops = static_cast<double>(info.flops.value);
  const double all_flops = visible > 0.0 ? flops / visible * pairs : 0.0;
  double y =
      draw_bars(svg, kTop, "Arithmetic",
                {{"full", "this plan: visible pairs", flops, flops_text(flops)},
                 {"other", "every pair, masked ones too", all_flops, flops_text(all_flops)}});
  y = draw_bars(svg, y, "Traffic to and from slow memory",
                {{"full", "this plan", static_cast<double>(info.slow_memory_bytes.value),
                  bytes_of(info.slow_memory_bytes)},
                 {"other", "each operand once, the least there is",
                  static_cast<double>(info.operand_bytes.value), bytes_of(info.operand_bytes)},
                 {"other", "standard attention, which writes its scores",
                  static_cast<double>(info.standard_memory_bytes.value),
                  bytes_of(info.standard_memory_bytes)}});
  const double matrix = pairs * 4.0;
  const double workspace = static_cast<double>(info.workspace_bytes);
  return draw_bars(svg, y, "Memory beside the operands",
                   {{"full", "this plan's workspace", workspace, bytes_text(workspace)},
                    {"other", "the score matrix, f32", matrix, bytes_text(matrix)}});
}

}  // namespace

std::string picture_svg(const Plan& plan, const std::optional<Walk>& walk) {
  const Problem& problem = plan.problem();
  const PlanInfo& info = plan.info();
  Svg svg;
  const std::string title = title_text(problem);
  svg.text("title", kMargin, 40, title);
  svg.text("", kMargin, 64, sizes_text(problem) + "; " + mask_text(plan));
  svg.text("soft", kMargin, 84,
           fmt::format("{}, {} work item{}", info.kernel, count_text(info.work_items),
                       info.work_items == 1 ? "" : "s"));
  double y = std::max(draw_tiles(svg, map_tiles(problem, info)), draw_costs(svg, problem, info));
  if (walk) y = draw_walk(svg, *walk, y + 34, kWidth, kMargin);
  return svg.document(kWidth, y + 20, title);
}

std::string picture_html(const Plan& plan, const std::optional<Walk>& walk) {
  return fmt::format(
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width\">\n"
      "<meta name=\"color-scheme\" content=\"light dark\">\n<title>{0}</title>\n"
      "<style>\nbody {{ margin: 0 auto; max-width: 960px; background: #ffffff; color: #1f2328;\n"
      "  font: 14px/1.5 system-ui, \"DejaVu Sans\", sans-serif; }}\n"
      "svg {{ width: 100%; height: auto; }}\npre {{ padding: 0 28px 28px; overflow-x: auto; }}\n"
      "@media (prefers-color-scheme: dark) {{ body {{ background: #0d1117; color: #e6edf3; }} }}\n"
      "</style>\n</head>\n<body>\n{1}<pre>{2}</pre>\n</body>\n</html>\n",
      escaped(title_text(plan.problem())), picture_svg(plan, walk), escaped(explain(plan)));
}

}  // namespace abacist::cli
