#pragma once

#include <span>

#include "core/backend.hpp"

namespace abacist::api {

/// All implementations in the order in which the planner asks them.
std::span<const core::Implementation* const> implementations();

}  // namespace abacist::api
