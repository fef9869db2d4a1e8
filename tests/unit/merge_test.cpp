// Arguments of merge() that need no operands of an attention problem.
#include <gtest/gtest.h>

#include "abacist/abacist.hpp"

namespace abacist::testing {
namespace {

TEST(Merge, WorksOnTheHost) {
  static float memory[8] = {};
  Tensor o(memory, contiguous(DType::f32, {1, 1, 1, 4}));
  o.device = {DeviceType::cuda, 1};
  const Status status = merge({}, o);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::unsupported);
  EXPECT_NE(status.error().message.find("cuda:1"), std::string::npos);
}

TEST(Merge, OfNoHeadsTakesNoTime) {
  const TensorSpec rows = contiguous(DType::f32, {1 << 20, 1 << 20, 0, 4});
  EXPECT_TRUE(merge({}, Tensor(nullptr, rows)).ok());  // 2^40 rows
}

}  // namespace
}  // namespace abacist::testing
