#include "support/bounds.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <set>
#include <sstream>

#include "support/environment.hpp"

namespace abacist::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kTrust = 16.0;  // see bounds.hpp

/// With ABACIST_TEST_RATIOS set, prints at exit how close each kind of tensor came to its bound.
class RatioLog {
 public:
  static RatioLog& instance() {
    static RatioLog log;
    return log;
  }
  void note(const std::string& what, double ratio) {
    if (on_) worst_[what] = std::max(worst_[what], ratio);
  }
  ~RatioLog() {
    for (const auto& [what, ratio] : worst_) std::printf("ratio %-24s %.3f\n", what.c_str(), ratio);
  }

 private:
  bool on_ = std::getenv("ABACIST_TEST_RATIOS") != nullptr;
  std::map<std::string, double> worst_;
};

std::string index_text(const TensorSpec& spec, std::size_t flat) {
  std::string text;
  auto rest = static_cast<std::int64_t>(flat);
  for (auto a = static_cast<std::size_t>(spec.rank); a-- > 0;) {
    text = std::to_string(rest % spec.shape[a]) + (text.empty() ? "" : ", ") + text;
    rest /= spec.shape[a];
  }
  return "[" + text + "]";
}

/// |a - b| / bound; infinite where one is not finite and the other not the same.
double error_ratio(double actual, double reference, double bound) {
  if (std::isnan(reference)) return std::isnan(actual) ? 0.0 : kInfinity;
  if (std::isinf(reference)) return actual == reference ? 0.0 : kInfinity;
  if (!std::isfinite(actual) || !std::isfinite(bound)) return kInfinity;
  const double error = std::fabs(actual - reference);
  return error == 0.0 ? 0.0 : error / bound;
}

struct Errors {
  double largest = 0.0;
  double mean = 0.0;
  double growth = 0.0;  ///< mean of the errors away from zero
  double rms = 0.0;
};

/// Over the elements whose reference is finite.
Errors errors_of(const std::vector<double>& actual, const std::vector<double>& reference) {
  Errors e;
  double squares = 0.0;
  double count = 0.0;
  for (std::size_t i = 0; i < reference.size(); ++i) {
    if (!std::isfinite(reference[i])) continue;
    const double error = actual[i] - reference[i];
    e.largest = std::isnan(error) ? kInfinity : std::max(e.largest, std::fabs(error));
    e.mean += error;
    e.growth += reference[i] < 0.0 ? -error : error;
    squares += error * error;
    count += 1.0;
  }
  if (count > 0.0) {
    e.mean /= count;
    e.growth /= count;
    e.rms = std::sqrt(squares / count);
  }
  return e;
}

double largest_of(const std::vector<double>& values) {
  double largest = 0.0;
  for (const double value : values) {
    if (std::isfinite(value)) largest = std::max(largest, std::fabs(value));
  }
  return largest;
}

double product_of_all_but_last(const TensorSpec& spec) {
  double rows = 1.0;
  for (std::size_t a = 0; a + 1 < static_cast<std::size_t>(spec.rank); ++a) {
    rows *= static_cast<double>(spec.shape[a]);
  }
  return rows;
}

/// What rounding errors of a tensor grow with; see bounds.hpp.
struct Sizes {
  std::int64_t terms = 0;          ///< n
  double scores = 0.0;             ///< S
  double before_cancelling = 0.0;  ///< G
  double row = 0.0;                ///< G without p
  bool rows_repeat = false;        ///< biases cannot be told from errors
};

/// The plain version's errors are a yardstick only while they are rounding errors. If they are not,
/// oracle or plain version is wrong, and a bound made of them would let anything pass.
void check_yardstick(const std::string& label, const Case& c, const std::vector<double>& ref,
                     double error, const Sizes& sizes) {
  if (c.dtype != DType::f32) return;  // one code serves every type
  const double growth = std::sqrt(static_cast<double>(sizes.terms)) + sizes.scores;
  const double most = kTrust * kFloatRoundoff * (growth * largest_of(ref) + sizes.row) + 0x1p-126;
  RatioLog::instance().note(label + " yardstick", error / most);
  EXPECT_LE(error, most) << "oracle and plain version disagree about " << label << "\n  "
                         << c.text();
}

/// Whether rows of the inputs repeat (an axis of stride 0): then errors repeat, too, and do not
/// average.
bool rows_repeat(const Instance& x) {
  for (const Buffer* buffer : {&x.q, &x.k, &x.v, &x.d_o}) {
    for (std::size_t a = 0; a < static_cast<std::size_t>(buffer->spec().rank); ++a) {
      if (buffer->spec().stride[a] == 0 && buffer->spec().shape[a] > 1) return true;
    }
  }
  return false;
}

/// Rows that differ. Where all weights of a softmax are equal, thousands of rows can be a few.
double distinct_rows(const std::vector<double>& values, const TensorSpec& spec) {
  const std::int64_t length = spec.shape[static_cast<std::size_t>(spec.rank) - 1];
  std::set<std::vector<double>> rows;
  for (auto row = values.begin(); row != values.end(); row += length) {
    rows.emplace(row, row + length);
  }
  return static_cast<double>(rows.size());
}

void check_tensor(const std::string& name, const Case& c, const Buffer& actual,
                  const Buffer& reference, const std::vector<double>& plain, const Sizes& sizes,
                  const std::string& who) {
  const std::vector<double> x = actual.values();
  const std::vector<double> ref = reference.values();
  const Errors plain_errors = errors_of(plain, ref);
  const double largest = largest_of(ref);
  const double u = unit_roundoff(c.dtype);
  const std::string label = std::string(to_string(c.dtype)) + " " + name;
  check_yardstick(label, c, ref, plain_errors.largest, sizes);
  const double growth =
      c.dtype == DType::f32 ? std::sqrt(static_cast<double>(sizes.terms)) + sizes.scores : 1.0;
  const double bound = 2.0 * plain_errors.largest +
                       2.0 * u * (growth * largest + sizes.before_cancelling) + 0x1p-126;
  check_within(label, actual.spec(), x, ref, bound, who + "\n  " + c.text());

  if (ref.empty() || sizes.rows_repeat) return;
  const auto unavoidable = [&](double rows) {
    return 6.0 * plain_errors.rms / std::sqrt(rows) +
           4.0 * kFloatRoundoff *
               ((1.0 + sizes.scores / std::sqrt(rows)) * largest + sizes.before_cancelling) +
           0x1p-126;
  };
  const Errors errors = errors_of(x, ref);
  const auto check_bias = [&](const char* kind, double bias, double plain_bias) {
    const double allowed = 2.0 * std::fabs(plain_bias);
    double bias_bound = allowed + unavoidable(product_of_all_but_last(actual.spec()));
    if (std::fabs(bias) > bias_bound) {  // counting takes its time
      bias_bound = allowed + unavoidable(distinct_rows(plain, actual.spec()));
    }
    RatioLog::instance().note(label + " " + kind, std::fabs(bias) / bias_bound);
    EXPECT_LE(std::fabs(bias), bias_bound)
        << who << ": " << kind << " error of " << label << " is " << bias << ", plain's "
        << plain_bias << "\n  " << c.text();
  };
  check_bias("mean", errors.mean, plain_errors.mean);
  check_bias("growth", errors.growth, plain_errors.growth);
}

/// Rows that see no key are exactly 0 (or what `expected_zero` selects).
void check_empty_rows(const Case& c, const Buffer& rows, const Buffer& lse, const char* name,
                      const std::string& who) {
  rows.for_each([&](const auto& i, std::int64_t) {
    const double row_lse = c.varlen() ? lse.at({i[1], i[0]}) : lse.at({i[0], i[2], i[1]});
    if (row_lse != -kInfinity) return;
    const double value = rows.at(i);
    if (value != 0.0) {
      ADD_FAILURE() << who << ": " << name << " of a row without visible keys is " << value
                    << "\n  " << c.text();
    }
  });
}

}  // namespace

Expected::Expected(const Instance& instance, bool with_gradients)
    : oracle(instance.reference_forward()),
      oracle_gradients(with_gradients ? instance.reference_backward(oracle) : Gradients{}),
      plain(compute_plain(instance, with_gradients)) {}

void check_within(const std::string& name, const TensorSpec& spec,
                  const std::vector<double>& actual, const std::vector<double>& reference,
                  const std::vector<double>& bound, const std::string& who) {
  ASSERT_EQ(actual.size(), reference.size()) << who << ": " << name;
  double worst = 0.0;
  std::size_t where = 0;
  std::size_t violations = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double ratio = error_ratio(actual[i], reference[i], bound[i]);
    if (ratio > 1.0) ++violations;
    if (ratio > worst) {
      worst = ratio;
      where = i;
    }
  }
  RatioLog::instance().note(name, worst);
  if (violations == 0) return;
  std::ostringstream text;
  text.precision(9);
  text << who << ": " << name << " is off at " << violations << " of " << actual.size()
       << " elements, worst at " << index_text(spec, where) << ": is " << actual[where]
       << ", must be " << reference[where] << ", bound " << bound[where] << ", ratio to bound "
       << worst;
  ADD_FAILURE() << text.str();
}

void check_within(const std::string& name, const TensorSpec& spec,
                  const std::vector<double>& actual, const std::vector<double>& reference,
                  double bound, const std::string& who) {
  check_within(name, spec, actual, reference, std::vector<double>(actual.size(), bound), who);
}

void check_forward(const Instance& instance, const Results& actual, const Expected& expected,
                   const std::string& who) {
  const Case& c = instance.c;
  const std::int64_t keys = c.varlen() ? c.options.max_lengths.s_k : c.s_k;
  const Sizes sizes{c.d_qk + keys, largest_of(expected.plain.score_size), 0.0, 0.0,
                    rows_repeat(instance)};
  check_tensor("o", c, actual.o, expected.oracle.o, expected.plain.o, sizes, who);
  check_empty_rows(c, actual.o, expected.oracle.lse, "o", who);
  const std::vector<double> ref = expected.oracle.lse.values();
  std::vector<double> bound(ref.size());
  const double factor = kFloatRoundoff * (4.0 + std::sqrt(static_cast<double>(c.d_qk)));
  for (std::size_t i = 0; i < ref.size(); ++i) {
    bound[i] = factor * expected.plain.score_size[i] + 0x1p-126;  // what underflows is no error
  }
  check_within(std::string(to_string(c.dtype)) + " lse", actual.lse.spec(), actual.lse.values(),
               ref, bound, who + "\n  " + c.text());
}

void check_backward(const Instance& instance, const Gradients& actual, const Expected& expected,
                    const std::string& who) {
  const Case& c = instance.c;
  const std::int64_t keys = c.varlen() ? c.options.max_lengths.s_k : c.s_k;
  const std::int64_t rows = (c.varlen() ? c.options.max_lengths.s_q : c.s_q) * c.group;
  const std::int64_t column_terms = c.d_qk + c.d_v + rows;
  const Plain& plain = expected.plain;
  const double scores = largest_of(plain.score_size);
  const auto gradient = [&](const char* name, const Buffer& x, const Buffer& reference,
                            const std::vector<double>& of_plain, std::int64_t terms,
                            double factor) {
    const Sizes sizes{terms, scores, plain.ds_size * factor, plain.ds_row_size * factor,
                      rows_repeat(instance)};
    check_tensor(name, c, x, reference, of_plain, sizes, who);
  };
  const Gradients& oracle = expected.oracle_gradients;
  gradient("dq", actual.dq, oracle.dq, plain.dq, c.d_qk + c.d_v + keys,
           largest_of(instance.k.values()));
  gradient("dk", actual.dk, oracle.dk, plain.dk, column_terms, largest_of(instance.q.values()));
  gradient("dv", actual.dv, oracle.dv, plain.dv, column_terms, 0.0);
  check_empty_rows(c, actual.dq, expected.oracle.lse, "dq", who);
  if (c.bias.present) {
    // Terms behind an element: one of each row, head and sequence that it stands for.
    const auto& shape = actual.d_bias.spec().shape;
    const std::int64_t terms =
        (shape[0] == 1 ? c.sequences() : 1) * (shape[1] == 1 ? c.h_q() : 1) *
        (shape[2] == 1 ? (c.varlen() ? c.options.max_lengths.s_q : c.s_q) : 1);
    const double growth = std::sqrt(static_cast<double>(terms));
    const double exact = c.dtype == DType::f32 ? 1.0 + scores : 1.0;
    const Sizes sizes{c.d_qk + c.d_v + terms, scores, plain.d_bias_size * exact * growth,
                      plain.d_bias_size * exact * static_cast<double>(terms), true};
    check_tensor("d_bias", c, actual.d_bias, oracle.d_bias, plain.d_bias, sizes, who);
  }
  if (!c.sinks) return;
  const auto all_rows = static_cast<double>(c.total_q());
  const double exact = c.dtype == DType::f32 ? 1.0 + scores : 1.0;
  const Sizes sizes{c.total_q(), scores, plain.d_sink_size * exact * std::sqrt(all_rows),
                    plain.d_sink_size * all_rows, true};
  check_tensor("d_sinks", c, actual.d_sinks, oracle.d_sinks, plain.d_sinks, sizes, who);
}

void check_on_every_target(const Instance& instance) {
  SCOPED_TRACE(instance.c.text());
  const bool paged = instance.c.page_size > 0;
  const Expected expected(instance, !paged);
  for_each_target([&](const std::string& target) {
    if (paged) {  // forward only
      Results results = instance.make_results(instance.c.o_dtype, DType::f32, instance.c.layout);
      instance.forward(results, {.backend = Backend::cpu});
      check_forward(instance, results, expected, target);
      return;
    }
    const Both both = instance.run_both();
    check_forward(instance, both.results, expected, target);
    check_backward(instance, both.gradients, expected, target);
  });
}

}  // namespace abacist::testing
