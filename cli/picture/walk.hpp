// The online softmax of one query row, block of keys by block of keys.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "abacist/problem.hpp"

namespace abacist::cli {

struct Operand;

/// The row's state after a block.
struct WalkStep {
  std::int64_t first_key = 0, last_key = 0;
  double lowest = 0.0, highest = 0.0;  ///< scores of the block
  double maximum = 0.0;                ///< m
  double correction = 1.0;             ///< exp(m_old - m_new), what l and O were multiplied by
  double sum = 0.0;                    ///< l, in units of exp(m)
};

struct Walk {
  std::int64_t row = 0;
  std::int64_t first_key = 0;  ///< visible keys are [first_key, first_key + scores.size())
  std::vector<double> scores;  ///< after scale, softcap and ALiBi
  std::vector<WalkStep> steps;

  double lse() const {
    return steps.empty() ? -std::numeric_limits<double>::infinity()
                         : steps.back().maximum + std::log(steps.back().sum);
  }
};

/// Row `row` of the first sequence and query head; q [1, 1, 1, d], k [1, visible keys, 1, d];
/// blocks of `block` keys from the first visible key on.
Walk walk_row(const Operand& q, const Operand& k, const Problem& problem, std::int64_t row,
              double slope, std::int64_t block);

class Svg;

/// Draws it (walk_chart.cpp); returns the y below.
double draw_walk(Svg& svg, const Walk& walk, double top, double width, double margin);

}  // namespace abacist::cli
