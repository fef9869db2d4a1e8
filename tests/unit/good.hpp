// A valid call to be spoilt, and what must come of it.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "abacist/abacist.hpp"
#include "support/case.hpp"

namespace abacist::testing {

/// A valid call of either pass, to be spoilt.
struct Good {
  Good() : Good(Case{.b = 2, .h_k = 2, .group = 2, .s_q = 4, .s_k = 5, .d_qk = 3, .d_v = 2}) {}
  explicit Good(const Case& c)
      : x(c), results(x.make_results(c.o_dtype)), gradients(x.make_gradients(c.grad_dtype)) {
    forward = x.tensors(results);
    x.d_o.freeze();
    backward = x.tensors(std::as_const(results), gradients);
    options = x.c.options;
  }

  Instance x;
  Results results;
  Gradients gradients;
  ForwardTensors forward;
  BackwardTensors backward;
  Options options;
};

inline Case varlen_case() {
  Case c;
  c.h_k = 2;
  c.group = 2;
  c.d_qk = 3;
  c.d_v = 2;
  c.lens_q = {3, 0, 2};
  c.lens_k = {1, 4, 2};
  return c;
}

inline void expect_untouched(const Good& good) {
  EXPECT_EQ(good.results.o.damage(false), "");
  EXPECT_EQ(good.results.lse.damage(false), "");
  EXPECT_EQ(good.gradients.dq.damage(false), "");
  EXPECT_EQ(good.gradients.dk.damage(false), "");
  EXPECT_EQ(good.gradients.dv.damage(false), "");
}

inline void expect_error(const Status& status, const std::string& argument,
                         const std::string& says) {
  ASSERT_FALSE(status.ok()) << "expected an error about " << argument << ": " << says;
  EXPECT_EQ(status.error().code, ErrorCode::invalid_argument) << to_string(status.error());
  EXPECT_EQ(status.error().argument, argument) << to_string(status.error());
  EXPECT_NE(status.error().message.find(says), std::string::npos) << to_string(status.error());
}

/// Spoils a forward call; it must fail naming `argument`, leaving the outputs alone.
inline void expect_forward_error(const std::string& argument, const std::string& says,
                                 const std::function<void(Good&)>& spoil, const Case* c = nullptr) {
  Good good = c != nullptr ? Good(*c) : Good();
  spoil(good);
  expect_error(forward(good.forward, good.options), argument, says);
  expect_error(forward(good.forward, good.options, {.backend = Backend::reference}), argument,
               says);
  expect_untouched(good);
}

inline void expect_backward_error(const std::string& argument, const std::string& says,
                                  const std::function<void(Good&)>& spoil,
                                  const Case* c = nullptr) {
  Good good = c != nullptr ? Good(*c) : Good();
  spoil(good);
  expect_error(backward(good.backward, good.options, {.backend = Backend::reference}), argument,
               says);
  expect_untouched(good);
}

}  // namespace abacist::testing
