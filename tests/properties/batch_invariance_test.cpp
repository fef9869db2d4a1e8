// With PlanOptions::batch_invariant the bits of a sequence do not depend on its neighbours, nor on
// the layout of the batch.
#include <gtest/gtest.h>

#include "support/case.hpp"
#include "support/environment.hpp"

namespace abacist::testing {
namespace {

constexpr PlanOptions kInvariant{.backend = Backend::cpu, .batch_invariant = true};

struct Shape {
  std::int64_t len_q, len_k;
};

/// Copies row `from_row + i` of sequence `from` to row `to_row + i` of sequence `to`.
void copy_rows(Buffer& to, std::int64_t to_n, std::int64_t to_row, const Buffer& from,
               std::int64_t from_n, std::int64_t rows) {
  const bool packed = to.spec().rank == 3;
  const auto& shape = from.spec().shape;
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t h = 0; h < shape[2]; ++h) {
      for (std::int64_t e = 0; e < shape[3]; ++e) {
        const double value = from.at({from_n, i, h, e});
        if (packed) {
          to.set({to_row + i, h, e}, value);
        } else {
          to.set({to_n, i, h, e}, value);
        }
      }
    }
  }
  to.freeze();
}

void expect_rows(const Buffer& whole, std::int64_t n, std::int64_t row, const Buffer& alone,
                 const std::string& what) {
  const bool packed = whole.spec().rank == 3;
  alone.for_each([&](const auto& i, std::int64_t) {
    const double value =
        packed ? whole.at({row + i[1], i[2], i[3]}) : whole.at({n, i[1], i[2], i[3]});
    ASSERT_EQ(value, alone.at(i)) << what;
  });
}

/// The sequence under test among others: dense with key lengths, varlen, paged.
class Invariance : public ::testing::TestWithParam<DType> {
 protected:
  void check(Case c, const Shape& shape, const std::vector<Shape>& others) {
    c.dtype = c.o_dtype = c.grad_dtype = GetParam();
    c.s_q = shape.len_q;
    c.s_k = shape.len_k;
    const Instance alone(c);
    for_each_target([&](const std::string& target) {
      const Both expected = alone.run_both(kInvariant);
      varlen(c, shape, others, alone, expected, target);
      dense(c, shape, alone, expected, target);
    });
  }

 private:
  static void varlen(Case c, const Shape& shape, const std::vector<Shape>& others,
                     const Instance& alone, const Both& expected, const std::string& target) {
    std::int64_t row_q = 0;
    std::int64_t row_k = 0;
    for (const Shape& other : others) {
      c.lens_q.push_back(other.len_q);
      c.lens_k.push_back(other.len_k);
      row_q += other.len_q;
      row_k += other.len_k;
    }
    c.lens_q.push_back(shape.len_q);
    c.lens_k.push_back(shape.len_k);
    c.lens_q.push_back(3);
    c.lens_k.push_back(700);
    Instance x(c);
    copy_rows(x.q, 0, row_q, alone.q, 0, shape.len_q);
    copy_rows(x.d_o, 0, row_q, alone.d_o, 0, shape.len_q);
    copy_rows(x.k, 0, row_k, alone.k, 0, shape.len_k);
    copy_rows(x.v, 0, row_k, alone.v, 0, shape.len_k);
    const Both r = x.run_both(kInvariant);
    expect_rows(r.results.o, 0, row_q, expected.results.o, target + " varlen O");
    expect_rows(r.gradients.dq, 0, row_q, expected.gradients.dq, target + " varlen dQ");
    expect_rows(r.gradients.dk, 0, row_k, expected.gradients.dk, target + " varlen dK");
    expect_rows(r.gradients.dv, 0, row_k, expected.gradients.dv, target + " varlen dV");
  }

  static void dense(Case c, const Shape& shape, const Instance& alone, const Both& expected,
                    const std::string& target) {
    c.b = 4;
    c.s_k = shape.len_k + 150;
    c.key_lengths = {c.s_k, 7, shape.len_k, 0};
    Instance x(c);
    copy_rows(x.q, 2, 0, alone.q, 0, shape.len_q);
    copy_rows(x.d_o, 2, 0, alone.d_o, 0, shape.len_q);
    copy_rows(x.k, 2, 0, alone.k, 0, shape.len_k);
    copy_rows(x.v, 2, 0, alone.v, 0, shape.len_k);
    const Both r = x.run_both(kInvariant);
    expect_rows(r.results.o, 2, 0, expected.results.o, target + " dense O");
    expect_rows(r.gradients.dq, 2, 0, expected.gradients.dq, target + " dense dQ");
    expect_rows(r.gradients.dk, 2, 0, expected.gradients.dk, target + " dense dK");
    for (const std::int64_t page_size : {16, 100}) {
      x.c.page_size = page_size;
      x.make_pages();
      Results paged = x.make_results(c.o_dtype);
      x.forward(paged, kInvariant);
      expect_rows(paged.o, 2, 0, expected.results.o, target + " paged O");
      paged.lse.for_each([&](const auto& i, std::int64_t) {
        if (i[0] == 2) {
          ASSERT_EQ(paged.lse.at(i), expected.results.lse.at({0, i[1], i[2]}));
        }
      });
    }
  }
};

TEST_P(Invariance, OfOneSequenceAmongOthers) {
  Case c;
  c.h_k = 2;
  c.group = 3;
  c.d_qk = 40;
  c.d_v = 24;
  const std::int64_t s = by_effort<std::int64_t>(150, 500, 1500);
  const std::vector<Shape> others = {{2 * s, 3 * s}, {1, 40}, {0, 5}, {17, 0}};
  c.options.mask.causal = true;
  check(c, {s, s}, others);
  check(c, {1, 3 * s}, others);  // a decode step, whose keys a plan would split
  check(c, {9, s / 2}, others);
  c.options.mask = {.window = {100, 20}};
  c.options.score.softcap = 4.0;
  check(c, {s / 3, s}, others);
}

std::string name_of(const ::testing::TestParamInfo<DType>& info) { return to_string(info.param); }

INSTANTIATE_TEST_SUITE_P(Batch, Invariance, ::testing::Values(DType::f32, DType::bf16, DType::f16),
                         name_of);

TEST(BatchInvariance, OfABiasThatIsLongerThanTheKeys) {
  // The last keys of a sequence are read one by one where its bias ends with them, by lines where
  // the bias goes on.
  Case c{.b = 1, .h_k = 1, .group = 3, .s_q = 60, .s_k = 151, .d_qk = 24, .d_v = 16};
  c.options.mask.causal = true;
  c.options.score.scale = 1.7;  // beyond 1 it is applied to the products
  c.bias.present = true;
  const Instance alone(c);
  Case longer = c;
  longer.s_k = 300;
  longer.key_lengths = {c.s_k};
  Instance x(longer);
  copy_rows(x.q, 0, 0, alone.q, 0, c.s_q);
  copy_rows(x.k, 0, 0, alone.k, 0, c.s_k);
  copy_rows(x.v, 0, 0, alone.v, 0, c.s_k);
  alone.bias.for_each([&](const auto& i, std::int64_t) { x.bias.set(i, alone.bias.at(i)); });
  x.bias.freeze();
  for_each_target([&](const std::string& target) {
    Results expected = alone.make_results(c.o_dtype);
    alone.forward(expected, kInvariant);
    Results r = x.make_results(c.o_dtype);
    x.forward(r, kInvariant);
    expect_rows(r.o, 0, 0, expected.o, target + " O");
  });
}

TEST(BatchInvariance, PlansOfAnyBatchHaveTheSameTilesAndNoSplits) {
  PlanInfo first;
  for (const std::int64_t b : {1, 3, 200}) {
    for (const std::int64_t s_k : {1, 64, 5000}) {
      Case c{.b = b, .h_k = 2, .group = 2, .s_q = 33, .s_k = s_k, .d_qk = 64, .d_v = 64};
      Problem problem;
      Operands& x = problem.operands;
      x.q = contiguous(DType::f32, {c.b, c.s_q, c.h_q(), c.d_qk});
      x.k = x.v = contiguous(DType::f32, {c.b, c.s_k, c.h_k, c.d_qk});
      x.o = x.q;
      const auto p = plan(problem, kInvariant);
      ASSERT_TRUE(p.ok());
      EXPECT_TRUE(p->info().batch_invariant);
      EXPECT_EQ(p->info().splits, 1);
      if (first.rows == 0) first = p->info();
      EXPECT_EQ(p->info().rows, first.rows);
      EXPECT_EQ(p->info().keys, first.keys);
      EXPECT_NE(explain(*p).find("whatever else is in the batch"), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace abacist::testing
