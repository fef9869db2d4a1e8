#include "text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace abacist::cli {
namespace {

/// In the largest unit, each 1,000 of the one before, that leaves at least 1.
template <std::size_t Units>
std::string scaled_text(double value, const char* const (&units)[Units]) {
  std::size_t unit = 0;
  while (value >= 999.95 && unit + 1 < Units) {
    value /= 1000.0;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} {}", value, units[0])
                   : fmt::format("{:.1f} {}", value, units[unit]);
}

}  // namespace

std::string bytes_text(double bytes) {
  constexpr const char* kUnits[] = {"bytes", "kB", "MB", "GB", "TB", "PB", "EB"};
  return scaled_text(bytes, kUnits);
}

std::string count_text(std::int64_t count) {
  std::string text = fmt::format("{}", count);
  for (auto at = static_cast<std::int64_t>(text.size()) - 3; at > (count < 0 ? 1 : 0); at -= 3) {
    text.insert(static_cast<std::size_t>(at), ",");
  }
  return text;
}

std::string duration_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.1f} us", seconds * 1e6);
  if (seconds < 1.0) return fmt::format("{:.1f} ms", seconds * 1e3);
  if (seconds < 100.0) return fmt::format("{:.1f} s", seconds);
  // Past a thousand hours (or for an estimate that is infinite) the exact figure says nothing.
  const auto whole = static_cast<std::int64_t>(std::lround(std::min(seconds, 3.6e6)));
  if (whole < 3600) return fmt::format("{} min {} s", whole / 60, whole % 60);
  return fmt::format("{} h {} min", whole / 3600, whole / 60 % 60);
}

std::string flops_text(double flops) {
  constexpr const char* kUnits[] = {"FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"};
  return scaled_text(flops, kUnits);
}

std::string rate_text(double flops_per_second) { return flops_text(flops_per_second) + "/s"; }

std::string shape_text(const TensorSpec& spec) {
  const auto begin = spec.shape.begin();
  return fmt::format("[{}]", fmt::join(begin, begin + std::clamp(spec.rank, 0, kMaxRank), ", "));
}

}  // namespace abacist::cli
