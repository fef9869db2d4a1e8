// A plan as a picture.
#pragma once

#include <optional>
#include <string>

#include "abacist/plan.hpp"
#include "picture/walk.hpp"

namespace abacist::cli {

/// A self-contained SVG: which tiles are skipped, masked or full; FLOPs, traffic and memory beside
/// standard attention; and the online softmax of one row, if given. Dense problems.
std::string picture_svg(const Plan& plan, const std::optional<Walk>& walk);

/// A self-contained page: that picture, and the plan as text.
std::string picture_html(const Plan& plan, const std::optional<Walk>& walk);

}  // namespace abacist::cli
