// Runs the tests; prints the seed with every failure, since most data is random.
#include <gtest/gtest.h>

#include <cstdio>

#include "support/environment.hpp"
#include "support/random.hpp"

namespace {

class SeedPrinter : public ::testing::EmptyTestEventListener {
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::printf("  (reproduce with ABACIST_TEST_SEED=%llu)\n",
                static_cast<unsigned long long>(abacist::testing::base_seed()));
  }
};

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  abacist::testing::tested_targets();  // before any test forces one
  ::testing::UnitTest::GetInstance()->listeners().Append(new SeedPrinter);
  return RUN_ALL_TESTS();
}
