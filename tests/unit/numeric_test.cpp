// Conversions between the storage types and float, exhaustively: every f16 and bf16 pattern, and
// every midpoint between neighbours with the floats on both sides of it.
#include "core/numeric.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "support/random.hpp"

namespace abacist::core {
namespace {

/// The value of a pattern from its definition: sign, exponent, fraction.
double value_of(std::uint16_t bits, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> fraction_bits) & ((1 << exponent_bits) - 1);
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  const int hidden = exponent == 0 ? 0 : 1 << fraction_bits;
  return sign * std::ldexp(hidden + fraction, std::max(exponent, 1) - bias - fraction_bits);
}

struct Format {
  const char* name;
  int exponent_bits, fraction_bits;
  float (*to_float)(std::uint16_t);
  std::uint16_t (*from_float)(float);
  std::uint16_t infinity;
};

constexpr Format kFormats[] = {
    {"f16", 5, 10, f16_to_float, float_to_f16, 0x7c00},
    {"bf16", 8, 7, bf16_to_float, float_to_bf16, 0x7f80},
};

TEST(Numeric, EveryPatternReadsAsItsDefinitionSays) {
  for (const Format& f : kFormats) {
    for (int bits = 0; bits < 65536; ++bits) {
      const auto pattern = static_cast<std::uint16_t>(bits);
      const double expected = value_of(pattern, f.exponent_bits, f.fraction_bits);
      const float value = f.to_float(pattern);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(value)) << f.name << " " << bits;
      } else {
        ASSERT_EQ(value, expected) << f.name << " " << bits;
        ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0) << f.name << " " << bits;
      }
    }
  }
}

TEST(Numeric, EveryPatternComesBack) {
  for (const Format& f : kFormats) {
    for (int bits = 0; bits < 65536; ++bits) {
      const auto pattern = static_cast<std::uint16_t>(bits);
      const float value = f.to_float(pattern);
      if (std::isnan(value)) {
        ASSERT_TRUE(std::isnan(f.to_float(f.from_float(value)))) << f.name << " " << bits;
      } else {
        ASSERT_EQ(f.from_float(value), pattern) << f.name;
      }
    }
  }
}

TEST(Numeric, RoundsToNearestEvenBetweenAllNeighbours) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const Format& f : kFormats) {
    for (int bits = 0; bits < f.infinity; ++bits) {
      const auto low = static_cast<std::uint16_t>(bits);
      const auto high = static_cast<std::uint16_t>(bits + 1);
      // What lies past the largest finite value counts as one more step of the same size.
      const double low_value = f.to_float(low);
      const double high_value =
          high == f.infinity ? 2.0 * low_value - f.to_float(static_cast<std::uint16_t>(bits - 1))
                             : f.to_float(high);
      const double exact_middle = 0.5 * (low_value + high_value);
      const auto middle = static_cast<float>(exact_middle);
      if (middle == exact_middle) {  // not so for the smallest bf16 subnormal step
        ASSERT_EQ(f.from_float(middle), (bits & 1) == 0 ? low : high) << f.name << " " << bits;
        ASSERT_EQ(f.from_float(-middle), ((bits & 1) == 0 ? low : high) | 0x8000) << f.name;
        ASSERT_EQ(f.from_float(std::nextafter(middle, 0.0f)), low) << f.name << " " << bits;
        ASSERT_EQ(f.from_float(std::nextafter(middle, kInfinity)), high) << f.name << " " << bits;
      }
    }
  }
}

TEST(Numeric, NanOfAnyPayloadStaysNan) {
  for (const std::uint32_t bits : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xff800001u, 0xffffffffu,
                                   0x7f80ffffu, 0xff801000u}) {
    const auto nan = std::bit_cast<float>(bits);
    EXPECT_TRUE(std::isnan(f16_to_float(float_to_f16(nan)))) << std::hex << bits;
    EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(nan)))) << std::hex << bits;
  }
}

TEST(Numeric, OverflowGivesInfinity) {
  EXPECT_EQ(float_to_f16(65519.996f), 0x7bff);
  EXPECT_EQ(float_to_f16(65520.0f), 0x7c00);
  EXPECT_EQ(float_to_f16(-std::numeric_limits<float>::max()), 0xfc00);
  EXPECT_EQ(float_to_bf16(std::numeric_limits<float>::max()), 0x7f80);
}

TEST(Numeric, LoadAndStoreOfEveryType) {
  double storage[2] = {};
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64, DType::i32}) {
    for (const double value : {0.0, 1.0, -3.0, 96.0}) {
      store_element(storage, dtype, 1, value);
      EXPECT_EQ(load_element(storage, dtype, 1), value) << to_string(dtype);
    }
    store_element(storage, dtype, 0, 7.0);
    EXPECT_EQ(load_element(storage, dtype, 1), 96.0) << "neighbour of " << to_string(dtype);
  }
}

}  // namespace
}  // namespace abacist::core
