// What the user can put right.
#pragma once

#include <stdexcept>
#include <string>

#include "abacist/status.hpp"

namespace abacist::cli {

/// Ends the command with one line on stderr and exit code 2.
class UserError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  explicit UserError(const Error& error) : std::runtime_error(to_string(error)) {}
};

inline constexpr int kOverBound = 1;  ///< verify: a result is over its bound
inline constexpr int kBadInput = 2;

}  // namespace abacist::cli
