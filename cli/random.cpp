#include "random.hpp"

#include <cmath>
#include <numbers>

#include "core/numeric.hpp"

namespace abacist::cli {

void fill_normal(void* data, DType dtype, std::int64_t count, std::uint64_t seed,
                 std::uint64_t stream) {
  RandomBits bits(seed, stream);
  for (std::int64_t i = 0; i < count; i += 2) {
    // Box-Muller: two uniform numbers make two normal ones.
    const std::uint64_t pair = bits();
    const float u = (static_cast<float>(pair >> 40) + 1.0f) * 0x1p-24f;  // (0, 1]
    const float v = static_cast<float>(pair & 0xffffffu) * 0x1p-24f;
    const float radius = std::sqrt(-2.0f * std::log(u));
    const float angle = 2.0f * std::numbers::pi_v<float> * v;
    core::store_element(data, dtype, i, radius * std::cos(angle));
    if (i + 1 < count) core::store_element(data, dtype, i + 1, radius * std::sin(angle));
  }
}

}  // namespace abacist::cli
