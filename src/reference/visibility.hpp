// Who sees whom, written from the contract's text (docs/contract.md, "Visible keys"), one pair at a
// time. Nothing here may come from core/mask.hpp: a shared rule would hide its own bugs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "abacist/problem.hpp"

namespace abacist::reference {

class Visibility {
 public:
  Visibility(const Mask& mask, std::int64_t len_q, std::int64_t len_k)
      : mask_(mask), len_k_(len_k), shift_(mask.align == Align::top_left ? 0 : len_k - len_q) {}

  /// How far key j stands to the right of query i's own position; lengths are below 2^40, so no
  /// bound, however large, is ever added to anything.
  std::int64_t distance(std::int64_t i, std::int64_t j) const { return j - (i + shift_); }

  bool sees(std::int64_t i, std::int64_t j) const {
    if (j < 0 || j >= len_k_) return false;
    const std::int64_t d = distance(i, j);
    if (mask_.causal && d > 0) return false;
    if (mask_.window.left != kUnbounded && -d > mask_.window.left) return false;
    if (mask_.window.right != kUnbounded && d > mask_.window.right) return false;
    return true;
  }

  /// Keys that query i sees, counted from the distances -position ... len_k - 1 - position.
  std::int64_t count(std::int64_t i) const {
    std::int64_t least = distance(i, 0);
    std::int64_t most = distance(i, len_k_ - 1);
    if (mask_.causal) most = std::min<std::int64_t>(most, 0);
    if (mask_.window.right != kUnbounded) most = std::min(most, mask_.window.right);
    if (mask_.window.left != kUnbounded) least = std::max(least, -mask_.window.left);
    return most < least ? 0 : most - least + 1;
  }

 private:
  Mask mask_;
  std::int64_t len_k_;
  std::int64_t shift_;
};

}  // namespace abacist::reference
