// The oracle's gradients against finite differences of its own forward pass.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/case.hpp"

namespace abacist::testing {

inline Case float64_case() {
  Case c;
  c.dtype = DType::f64;
  return c;
}

/// Sum of dO O + dLSE LSE, the loss whose gradients the backward pass gives.
inline double loss(const Instance& x) {
  const Results r = x.reference_forward();
  const auto o = r.o.values();
  const auto d_o = x.d_o.values();
  double total = 0.0;
  for (std::size_t i = 0; i < o.size(); ++i) total += std::isnan(o[i]) ? 0.0 : o[i] * d_o[i];
  if (!x.d_lse.present()) return total;
  const auto lse = r.lse.values();
  const auto d_lse = x.d_lse.values();
  for (std::size_t i = 0; i < lse.size(); ++i) {
    if (std::isfinite(lse[i])) total += lse[i] * d_lse[i];
  }
  return total;
}

inline void check_by_differences(const Case& c) {
  Instance x(c);
  const Gradients g = x.reference_backward(x.reference_forward());
  const struct {
    const char* name;
    Buffer& input;
    const Buffer& gradient;
  } sides[] = {{"dq", x.q, g.dq},
               {"dk", x.k, g.dk},
               {"dv", x.v, g.dv},
               {"d_sinks", x.sinks, g.d_sinks},
               {"d_bias", x.bias, g.d_bias}};
  constexpr double kStep = 1e-5;
  for (const auto& side : sides) {
    if (!side.gradient.present()) continue;
    side.gradient.for_each([&](const auto& index, std::int64_t) {
      const double was = side.input.at(index);
      const auto loss_with = [&](double value) {
        side.input.set(index, value);
        side.input.freeze();
        return loss(x);
      };
      if (was == -std::numeric_limits<double>::infinity()) {
        EXPECT_EQ(side.gradient.at(index), 0.0);
        return;
      }
      const double slope = (loss_with(was + kStep) - loss_with(was - kStep)) / (2.0 * kStep);
      side.input.set(index, was);
      side.input.freeze();
      EXPECT_NEAR(side.gradient.at(index), slope, 2e-9 * (1.0 + std::fabs(slope)))
          << side.name << " of " << c.text();
    });
  }
}

inline Case small_case(std::uint64_t stream) {
  Case c = float64_case();
  c.s_q = 4;
  c.s_k = 5;
  c.d_qk = 3;
  c.d_v = 2;
  c.stream = stream;
  return c;
}

}  // namespace abacist::testing
