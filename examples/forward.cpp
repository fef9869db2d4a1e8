// Attention in one call: a causal layer with grouped heads (8 query heads over 2 key/value heads)
// and a window, in bfloat16, with LSE. Prints a row's output, and checks a row that can be known.
#include <abacist/abacist.hpp>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

namespace {

std::uint16_t to_bf16(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

std::vector<std::uint16_t> waves(std::int64_t count, double step) {
  std::vector<std::uint16_t> values;
  for (std::int64_t i = 0; i < count; ++i) {
    values.push_back(to_bf16(static_cast<float>(std::sin(step * static_cast<double>(i)))));
  }
  return values;
}

}  // namespace

int main() {
  const std::int64_t b = 2, s = 300, h_q = 8, h_k = 2, d = 64;
  const auto q = waves(b * s * h_q * d, 0.37), k = waves(b * s * h_k * d, 0.11);
  const auto v = waves(b * s * h_k * d, 0.05);
  std::vector<float> o(static_cast<std::size_t>(b * s * h_q * d));  // f32 out of bf16: no rounding
  std::vector<float> lse(static_cast<std::size_t>(b * h_q * s));

  using abacist::DType;
  const auto queries = abacist::contiguous(DType::bf16, {b, s, h_q, d});
  const auto keys = abacist::contiguous(DType::bf16, {b, s, h_k, d});
  const abacist::Status status = abacist::forward(
      {.q = {q.data(), queries},
       .k = {k.data(), keys},
       .v = {v.data(), keys},
       .o = {o.data(), abacist::contiguous(DType::f32, {b, s, h_q, d})},
       .lse = {lse.data(), abacist::contiguous(DType::f32, {b, h_q, s})}},
      {.mask = {.causal = true, .window = {.left = 127}}});  // itself and 127 keys before
  if (!status) {
    std::fprintf(stderr, "%s\n", abacist::to_string(status.error()).c_str());
    return 1;
  }
  std::printf("o[0, 299, 0, 0:4] = %.4f %.4f %.4f %.4f, lse = %.4f\n", o[299 * h_q * d],
              o[299 * h_q * d + 1], o[299 * h_q * d + 2], o[299 * h_q * d + 3], lse[299]);

  // Query 0 sees key 0 alone: its output is v[0], exactly.
  for (std::int64_t c = 0; c < d; ++c) {
    if (to_bf16(o[static_cast<std::size_t>(c)]) != v[static_cast<std::size_t>(c)]) return 1;
  }
  return 0;
}
