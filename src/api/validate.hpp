#pragma once

#include <string>

#include "abacist/problem.hpp"
#include "core/geometry.hpp"

namespace abacist::api {

Error invalid(std::string argument, std::string message);

/// `validate`, and the problem in plain numbers.
Result<core::Resolved> resolve(const Problem& problem);

}  // namespace abacist::api
