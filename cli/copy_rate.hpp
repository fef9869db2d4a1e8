// How fast this machine copies memory: the ceiling of what reads much and computes little.
#pragma once

#include <cstdint>
#include <memory>

#include "memory.hpp"

namespace abacist::cli {

/// Copies between two buffers of 256 MiB each, a contiguous part per thread.
class CopyRate {
 public:
  /// `threads` 0: all that are allowed. Throws UserError when there is no memory.
  explicit CopyRate(int threads);

  int threads() const { return threads_; }
  /// Bytes read plus bytes written, a second: copies of at least `min_seconds`, after one that is
  /// not timed.
  double burst(double min_seconds) const;

 private:
  void copy() const;

  int threads_;
  std::shared_ptr<void> from_, to_;
};

}  // namespace abacist::cli
