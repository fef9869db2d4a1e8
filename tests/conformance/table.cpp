#include "conformance/table.hpp"

#include <algorithm>
#include <cmath>

namespace abacist::testing {
namespace {

std::int64_t random_length(Random& random) {
  switch (random.integer(0, 4)) {
    case 0:
      return random.integer(0, 9);
    case 1:
      return random.pick({11, 13, 31, 61, 97, 127, 251, 509});  // primes
    case 2:  // around multiples of likely tile and vector sizes
      return std::max<std::int64_t>(
          random.pick({8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512}) + random.integer(-1, 1),
          0);
    default:
      return random.integer(1, 400);
  }
}

std::int64_t random_head_dim(Random& random) {
  switch (random.integer(0, 4)) {
    case 0:
      return random.integer(1, 16);
    case 1:
      return random.integer(1, 512);
    default:
      return random.pick({1, 8, 15, 16, 17, 32, 40, 64, 72, 80, 96, 100, 104, 128, 192, 256, 257});
  }
}

Options random_options(Random& random, std::int64_t s) {
  Options options;
  const auto side = [&] {
    return random.pick({std::int64_t{0}, random.integer(0, 8), random.integer(0, s + 3), kUnbounded,
                        kUnbounded - 1});
  };
  options.mask.causal = random.chance(0.45);
  if (random.chance(0.35)) options.mask.window = {side(), side()};
  if (random.chance(0.35)) options.mask.align = Align::top_left;
  if (random.chance(0.25)) {
    options.score.scale = random.pick({0.0, -0.3, 1.0, 0.01, 2.5, -1e-3});
  }
  if (random.chance(0.2)) options.score.softcap = random.pick({0.5, 5.0, 30.0, 1e4});
  if (random.chance(0.2)) {
    options.dropout = {.p = random.pick({0.1, 0.5, 0.9, 1.0}), .seed = random.bits()};
  }
  return options;
}

double cost(const Case& c) {
  double pairs = 0.0;
  if (!c.varlen()) {
    pairs = static_cast<double>(c.b) * static_cast<double>(c.s_q * c.s_k);
  } else {
    for (std::size_t n = 0; n < c.lens_q.size(); ++n) {
      pairs += static_cast<double>(c.lens_q[n] * c.lens_k[n]);
    }
  }
  return pairs * static_cast<double>(c.h_q() * (c.d_qk + c.d_v));
}

/// A decode step: few query rows of many heads, which a backend may serve together.
void few_rows(Case& c, Random& random) {
  c.h_k = random.pick({1, 3, 6, 7, 13, 25, 49});
  c.s_q = random.integer(1, 3);
  for (std::int64_t& len : c.lens_q) len = std::min(len, c.s_q);
}

void halve_lengths(Case& c, Random& random) {
  if (c.h_k > 3) c.h_k /= 2;
  std::int64_t& length = random.chance(0.5) ? c.s_q : c.s_k;
  length = (length + 1) / 2;
  for (std::int64_t& len : c.key_lengths) len = std::min(len, c.s_k);
  for (auto* lens : {&c.lens_q, &c.lens_k}) {
    for (std::int64_t& len : *lens) len -= len > 2 ? len / 3 : len / 2;
  }
}

}  // namespace

Case random_case(const Menu& menu, std::uint64_t n) {
  const std::uint64_t stream =
      n * 64 + static_cast<std::uint64_t>(menu.dtype) * 2 + (menu.varlen ? 1 : 0) + 1'000'000;
  Random random(stream);
  Case c;
  c.stream = stream;
  c.dtype = menu.dtype;
  c.o_dtype = random.chance(0.75) ? menu.dtype : DType::f32;
  c.grad_dtype = random.chance(0.75) ? menu.dtype : DType::f32;
  c.b = random.pick({1, 1, 2, 2, 3});
  c.h_k = random.pick({1, 1, 2, 3});
  c.group = random.pick({1, 1, 2, 3, 4, 7});
  c.s_q = random_length(random);
  c.s_k = random.chance(0.3) ? c.s_q : random_length(random);
  c.d_qk = random_head_dim(random);
  c.d_v = random.chance(0.5) ? c.d_qk : random_head_dim(random);
  if (menu.varlen) {
    const std::int64_t sequences = random.integer(1, 6);
    for (std::int64_t s = 0; s < sequences; ++s) {
      c.lens_q.push_back(random.chance(0.15) ? 0 : random_length(random) / 2);
      c.lens_k.push_back(random.chance(0.15) ? 0 : random_length(random) / 2);
    }
    if (random.chance(0.5)) c.slack_q = random.integer(0, 5);
    if (random.chance(0.5)) c.slack_k = random.integer(0, 5);
  }
  if (random.chance(0.2)) few_rows(c, random);
  c.options = random_options(random, std::max(c.s_q, c.s_k));
  if (random.chance(0.25)) c.alibi_rank = static_cast<int>(random.integer(1, 2));
  c.d_lse = random.chance(0.3);
  for (Case::Pairs* pairs : {&c.bias, &c.visible}) {
    *pairs = {random.chance(0.25), random.chance(0.5), random.chance(0.5), random.chance(0.6)};
  }
  c.data.bias_std = random.pick({0.3, 1.0, 5.0});
  c.data.hidden = random.pick({0.0, 0.3, 0.97});
  c.sinks = random.chance(0.25);
  if (!menu.varlen && random.chance(0.25)) {
    for (std::int64_t each = 0; each < c.b; ++each) {
      c.key_lengths.push_back(random.integer(0, c.s_k));
    }
    if (random.chance(0.4)) c.page_size = random.pick({1, 3, 16, 48, 64, 256});
  }
  c.layout.random = random.chance(0.6);
  // Scores of order 10 and more (one key takes it all), a mean of V that shows biases.
  c.data.query_key_std = random.pick({1.0, 1.0, 1.0, 0.1, 4.0});
  c.data.v_mean = random.pick({0.0, 0.0, 1.0});
  while (cost(c) > menu.budget) halve_lengths(c, random);
  return c;
}

}  // namespace abacist::testing
