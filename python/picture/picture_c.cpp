// The command line tool's picture of a plan, for ctypes: a library of its own beside libabacist,
// which itself draws nothing (docs/decisions/005-python-binding.md).
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <optional>
#include <string>

#include "abacist/export.h"
#include "api/c/plan_handle.hpp"
#include "picture/picture.hpp"

/// Stores as much of the SVG as fits, always with a final 0, and its whole length in `*length`; if
/// it cannot be drawn, the reason instead. 0, or 1 for a reason. Of dense problems.
extern "C" ABACIST_API int abacist_picture_svg(const abacist_plan* plan, char* text,
                                               std::size_t capacity, std::size_t* length) noexcept {
  int failed = 0;
  try {
    std::string svg;
    try {
      svg = abacist::cli::picture_svg(plan->plan, std::nullopt);
    } catch (const std::exception& reason) {
      svg = reason.what();
      failed = 1;
    }
    *length = svg.size();
    if (capacity == 0) return failed;
    const std::size_t stored = std::min(svg.size(), capacity - 1);
    std::memcpy(text, svg.data(), stored);
    text[stored] = '\0';
    return failed;
  } catch (...) {
    *length = 0;
    return 1;
  }
}
