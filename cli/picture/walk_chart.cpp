// Draws the online softmax of a row: scores and running maximum above, running sum below.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "picture/svg.hpp"
#include "picture/walk.hpp"
#include "text.hpp"

namespace abacist::cli {
namespace {

using Anchor = Svg::Anchor;

constexpr std::size_t kMostDots = 1500;
constexpr std::size_t kMostSteps = 64;
constexpr double kScores = 190, kSums = 120;  // heights of the charts

/// Several blocks as one: what the row looks like after the last of them.
std::vector<WalkStep> merged_steps(const std::vector<WalkStep>& steps) {
  const std::size_t take = (steps.size() + kMostSteps - 1) / kMostSteps;
  std::vector<WalkStep> merged;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if (i % take == 0) {
      merged.push_back(steps[i]);
      continue;
    }
    WalkStep& step = merged.back();
    step.last_key = steps[i].last_key;
    step.lowest = std::min(step.lowest, steps[i].lowest);
    step.highest = std::max(step.highest, steps[i].highest);
    step.correction *= steps[i].correction;
    step.maximum = steps[i].maximum;
    step.sum = steps[i].sum;
  }
  return merged;
}

struct Frame {
  double left, right, top, height;
  double low, high;
  double first_key, keys;

  double x(double key) const { return left + (right - left) * (key - first_key) / keys; }
  double y(double value) const { return top + height * (high - value) / (high - low); }
};

void draw_frame(Svg& svg, const Frame& frame) {
  svg.line("rule", frame.left, frame.top + frame.height, frame.right, frame.top + frame.height);
  svg.line("rule", frame.left, frame.top, frame.left, frame.top + frame.height);
  svg.text("small", frame.left - 6, frame.top + 9, fmt::format("{:.3g}", frame.high), Anchor::end);
  svg.text("small", frame.left - 6, frame.top + frame.height, fmt::format("{:.3g}", frame.low),
           Anchor::end);
}

void draw_scores(Svg& svg, const Frame& frame, const Walk& walk,
                 const std::vector<WalkStep>& steps) {
  draw_frame(svg, frame);
  if (walk.scores.size() <= kMostDots) {
    for (std::size_t j = 0; j < walk.scores.size(); ++j) {
      const double key = frame.first_key + static_cast<double>(j);
      svg.circle("dot", frame.x(key + 0.5), frame.y(walk.scores[j]), 1.6);
    }
  } else {
    for (const WalkStep& step : steps) {
      const double x = frame.x(static_cast<double>(step.first_key));
      svg.rect("range", x + 0.5, frame.y(step.highest),
               frame.x(static_cast<double>(step.last_key)) - x - 1.0,
               frame.y(step.lowest) - frame.y(step.highest));
    }
  }
  std::string points;
  for (const WalkStep& step : steps) {
    const double y = frame.y(step.maximum);
    points +=
        fmt::format("{:.2f},{:.2f} {:.2f},{:.2f} ", frame.x(static_cast<double>(step.first_key)), y,
                    frame.x(static_cast<double>(step.last_key)), y);
  }
  svg.polyline("walk", points);
}

void draw_sums(Svg& svg, const Frame& frame, const std::vector<WalkStep>& steps) {
  draw_frame(svg, frame);
  for (const WalkStep& step : steps) {
    const double x = frame.x(static_cast<double>(step.first_key));
    const double width = frame.x(static_cast<double>(step.last_key)) - x;
    svg.rect("full", x + 0.5, frame.y(step.sum), std::max(width - 1.0, 0.5),
             frame.y(0.0) - frame.y(step.sum),
             fmt::format("after keys {} to {}: m = {:.4f}, l = {:.4f}", count_text(step.first_key),
                         count_text(step.last_key - 1), step.maximum, step.sum));
    if (step.correction == 1.0) continue;
    svg.triangle("mark", x + width / 2, frame.top - 4, 9,
                 fmt::format("the maximum rose: l and O times {:.4f}", step.correction));
    if (steps.size() <= 16) {
      svg.text("small", x + width / 2, frame.top - 18,
               fmt::format("\u00d7 {:.2f}", step.correction), Anchor::middle);
    }
  }
}

}  // namespace

double draw_walk(Svg& svg, const Walk& walk, double top, double width, double margin) {
  const std::vector<WalkStep> steps = merged_steps(walk.steps);
  svg.text("head", margin, top,
           fmt::format("Online softmax of query {}: one walk over the keys it sees, block by block",
                       count_text(walk.row)));
  if (steps.empty()) {
    svg.text("soft", margin, top + 24, "It sees no key: O = 0, LSE = -inf.");
    return top + 34;
  }
  double lowest = steps[0].lowest, highest = steps[0].highest, most = 0.0;
  for (const WalkStep& step : steps) {
    lowest = std::min(lowest, step.lowest);
    highest = std::max(highest, step.highest);
    most = std::max(most, step.sum);
  }
  if (!std::isfinite(lowest) || !std::isfinite(highest) || !std::isfinite(most)) {
    svg.text("soft", margin, top + 24, "Its scores are not all finite.");
    return top + 34;
  }
  if (highest - lowest < 1e-9) highest = lowest + 1.0;
  const double left = margin + 46, right = width - margin;
  const auto first = static_cast<double>(walk.first_key);
  const auto keys = static_cast<double>(walk.scores.size());
  svg.text("soft", margin, top + 22, "Scores (dots or ranges) and the running maximum m (line)");
  const Frame scores{left, right, top + 34, kScores, lowest, highest, first, keys};
  draw_scores(svg, scores, walk, steps);
  const double below = top + 34 + kScores + 34;
  svg.text("soft", margin, below,
           "Running sum l in units of exp(m); a triangle where m rose, so that l and O were scaled "
           "down");
  const Frame sums{left, right, below + 44, kSums, 0.0, most, first, keys};
  draw_sums(svg, sums, steps);
  const double bottom = below + 44 + kSums;
  svg.text("small", left, bottom + 16, fmt::format("key {}", count_text(walk.first_key)));
  svg.text("small", right, bottom + 16,
           count_text(walk.first_key + static_cast<std::int64_t>(walk.scores.size()) - 1),
           Anchor::end);
  svg.text(
      "", margin, bottom + 40,
      fmt::format("LSE = m + log l = {:.4f} + {:.4f} = {:.4f}; only this number and O leave the "
                  "fast memory.",
                  steps.back().maximum, std::log(steps.back().sum), walk.lse()));
  return bottom + 48;
}

}  // namespace abacist::cli
