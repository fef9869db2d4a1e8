#pragma once

#include <string>

#include "abacist/problem.hpp"
#include "core/geometry.hpp"

namespace abacist::api {

Error invalid(std::string argument, std::string message);

/// Extents and strides are sane; as an output, no element lies twice at the same place.
Status check_view(const char* name, const TensorSpec& spec, bool output);

/// `validate`, and the problem in plain numbers.
Result<core::Resolved> resolve(const Problem& problem);

}  // namespace abacist::api
