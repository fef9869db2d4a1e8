// Random problems on every instruction set of this machine against the float64 oracle.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "conformance/table.hpp"
#include "support/bounds.hpp"

namespace abacist::testing {
namespace {

std::vector<Chunk> chunks() {
  std::vector<Chunk> all;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const bool varlen : {false, true}) {
      for (int number = 0; number < (varlen ? 3 : 5); ++number) {
        all.push_back({dtype, varlen, number});
      }
    }
  }
  return all;
}

class RandomConformance : public ::testing::TestWithParam<Chunk> {
 protected:
  static constexpr int kSpan = 1000;  // cases of a chunk at most

  void run() {
    const auto [dtype, varlen, number] = GetParam();
    const Menu menu{dtype, varlen, by_effort(5e5, 4e6, 3e7)};
    const int cases = by_effort(4, 30, 200);
    for (int n = 0; n < cases; ++n) {
      const Case c = random_case(menu, static_cast<std::uint64_t>(number * kSpan + n));
      if (std::getenv("ABACIST_TEST_TRACE") != nullptr) std::puts(c.text().c_str());
      check_on_every_target(Instance(c));
      if (HasFailure()) return;  // one case says enough
    }
  }
};

TEST_P(RandomConformance, ForwardAndBackward) { run(); }

INSTANTIATE_TEST_SUITE_P(Table, RandomConformance, ::testing::ValuesIn(chunks()), name_of);

}  // namespace
}  // namespace abacist::testing
