// The random cases of the conformance table.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/case.hpp"
#include "support/environment.hpp"

namespace abacist::testing {

/// What a random case may hold. Lengths shrink until a case costs no more than `budget`
/// multiply-adds.
struct Menu {
  DType dtype = DType::f32;
  bool varlen = false;
  double budget = 6e6;
};

/// Case number `n` of a menu: lengths around every tile size, primes and powers of two, grouped
/// heads, masks of every kind, awkward layouts, unusual scales.
Case random_case(const Menu& menu, std::uint64_t n);

/// A run of random cases that is one test.
struct Chunk {
  DType dtype;
  bool varlen;
  int number;
};

inline std::string name_of(const ::testing::TestParamInfo<Chunk>& info) {
  return std::string(to_string(info.param.dtype)) + (info.param.varlen ? "_varlen_" : "_dense_") +
         std::to_string(info.param.number);
}

}  // namespace abacist::testing
