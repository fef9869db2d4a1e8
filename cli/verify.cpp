// abacist verify: a backend against the float64 oracle.
//
// u is the unit roundoff of the input type, u32 that of float32, ref the oracle's tensor, E the
// largest error of a plain computation of the same precision (plain.hpp) against the same oracle.
//
//   f16, bf16   |x - ref| <= 2 E + 2 u (max|ref| + G)
//   f32         |x - ref| <= 2 E + 2 u ((sqrt(n) + S) max|ref| + G)
//   LSE         |x - ref| <= u32 (4 + sqrt(d_qk)) (S + |ref|), row by row
//
// n terms stand behind an element. S is PlainResult::score_size (the largest, for LSE the row's
// own): a score carries an error of about u S, which the softmax passes on as a relative one. G is
// 0 for O and dV; for dQ and dK it is the largest PlainResult::ds_size times max|k| or max|q|: dP -
// D can cancel to nothing, the rounding errors of its parts do not. Gradients of sinks and bias are
// float32 sums of such differences: G is the largest size of a term times sqrt(n), and in f32 times
// 1 + S.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "abacist/attention.hpp"
#include "commands.hpp"
#include "core/numeric.hpp"
#include "features.hpp"
#include "operands.hpp"
#include "options.hpp"
#include "oracle.hpp"
#include "plain.hpp"
#include "random.hpp"
#include "runner.hpp"
#include "text.hpp"
#include "user_error.hpp"

namespace abacist::cli {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kFloatRoundoff = 0x1p-24;

struct VerifyArguments {
  FileArguments files;
  SizeArguments sizes;
  ScoreArguments score;
  RunArguments run;
  std::string pass = "both";
  std::int64_t rows = 0;  ///< 0: all
  bool progress = false;

  bool backward() const { return pass != "forward"; }
};

/// What the backend under test wrote, and what its backward pass was given.
struct Candidate {
  Operand o, lse;
  Gradients gradients;
  std::string kernels;
};

double unit_roundoff(DType dtype) {
  if (dtype == DType::bf16) return 0x1p-8;
  if (dtype == DType::f16) return 0x1p-11;
  return dtype == DType::f64 ? 0x1p-53 : kFloatRoundoff;
}

/// The element at a row-major position of the tensor, whatever its strides.
double element(const Operand& x, std::int64_t position) {
  std::int64_t offset = 0;
  for (int axis = x.spec.rank - 1; axis >= 0; --axis) {
    const auto a = static_cast<std::size_t>(axis);
    offset += position % x.spec.shape[a] * x.spec.stride[a];
    position /= x.spec.shape[a];
  }
  return core::load_element(x.data, x.spec.dtype, offset);
}

/// |x - ref| / bound; infinite where one is not finite and the other not the same.
double error_ratio(double x, double ref, double bound) {
  if (std::isnan(ref)) return std::isnan(x) ? 0.0 : kInfinity;
  if (std::isinf(ref)) return x == ref ? 0.0 : kInfinity;
  if (!std::isfinite(x)) return kInfinity;
  const double error = std::fabs(x - ref);
  return error == 0.0 ? 0.0 : error / bound;
}

/// One output's check: worst element first.
struct Check {
  std::string name;
  std::int64_t elements = 0;
  double ratio = -1.0;
  double value = 0.0, ref = 0.0, bound = 0.0;
  std::string where;

  void note(double x, double reference, double limit, const auto& index_text) {
    ++elements;
    const double r = error_ratio(x, reference, limit);
    if (r <= ratio) return;
    *this = {name, elements, r, x, reference, limit, index_text()};
  }
};

/// Walks the sampled rows of a candidate and the oracle side by side.
class Comparison {
 public:
  Comparison(const std::vector<std::int64_t>& rows, std::size_t row_axis, const Operand& candidate,
             const Operand& oracle)
      : rows_(rows), row_axis_(row_axis), candidate_(candidate), oracle_(oracle) {}

  /// visit(flat index in the oracle, candidate's value, oracle's value, index of the candidate)
  void for_each(const auto& visit) const {
    const TensorSpec& spec = oracle_.spec;
    const std::int64_t count = oracle_.count();
    Extents index{};
    for (std::int64_t flat = 0; flat < count; ++flat) {
      std::int64_t rest = flat;
      std::int64_t position = 0;
      for (int axis = spec.rank - 1; axis >= 0; --axis) {
        const auto a = static_cast<std::size_t>(axis);
        index[a] = rest % spec.shape[a];
        rest /= spec.shape[a];
        if (a == row_axis_) index[a] = rows_[static_cast<std::size_t>(index[a])];
      }
      for (std::size_t a = 0; a < static_cast<std::size_t>(spec.rank); ++a) {
        position = position * candidate_.spec.shape[a] + index[a];
      }
      visit(flat, element(candidate_, position), element(oracle_, flat), index);
    }
  }

  int rank() const { return oracle_.spec.rank; }

 private:
  const std::vector<std::int64_t>& rows_;
  std::size_t row_axis_;
  const Operand& candidate_;
  const Operand& oracle_;
};

std::string index_text(const Extents& index, int rank) {
  return fmt::format("[{}]", fmt::join(index.begin(), index.begin() + rank, ", "));
}

constexpr std::size_t kNoRowAxis = 99;

double largest_of(const std::vector<double>& values) {
  double largest = 0.0;
  for (const double value : values) {
    if (std::isfinite(value)) largest = std::max(largest, std::fabs(value));
  }
  return largest;
}

double largest_of(const Operand& operand) {
  double largest = 0.0;
  for (std::int64_t i = 0; i < operand.count(); ++i) {
    const double value = std::fabs(element(operand, i));
    if (std::isfinite(value)) largest = std::max(largest, value);
  }
  return largest;
}

/// What rounding errors grow with; see the head of this file.
struct Sizes {
  std::int64_t terms = 0;          ///< n
  double scores = 0.0;             ///< S
  double before_cancelling = 0.0;  ///< G
};

/// O or a gradient.
Check check_tensor(const char* name, const Comparison& pair, const std::vector<double>& plain,
                   DType dtype, const Sizes& sizes) {
  double largest = 0.0;
  double plain_error = 0.0;
  pair.for_each([&](std::int64_t flat, double, double ref, const Extents&) {
    if (!std::isfinite(ref)) return;
    largest = std::max(largest, std::fabs(ref));
    const double error = std::fabs(plain[static_cast<std::size_t>(flat)] - ref);
    if (!(error <= plain_error))
      plain_error = error;  // NaN stays: nothing is then within the bound
  });
  const double growth =
      dtype == DType::f32 ? std::sqrt(static_cast<double>(sizes.terms)) + sizes.scores : 1.0;
  // The smallest float: what underflows is no error.
  const double bound = 2.0 * plain_error +
                       2.0 * unit_roundoff(dtype) * (growth * largest + sizes.before_cancelling) +
                       0x1p-126;
  Check check;
  check.name = name;
  pair.for_each([&](std::int64_t, double x, double ref, const Extents& index) {
    check.note(x, ref, bound, [&] { return index_text(index, pair.rank()); });
  });
  return check;
}

Check check_lse(const Comparison& pair, const std::vector<double>& score_size, std::int64_t d_qk) {
  const double factor = kFloatRoundoff * (4.0 + std::sqrt(static_cast<double>(d_qk)));
  Check check;
  check.name = "LSE";
  pair.for_each([&](std::int64_t flat, double x, double ref, const Extents& index) {
    const double size = score_size[static_cast<std::size_t>(flat)] + std::fabs(ref);
    check.note(x, ref, factor * size + 0x1p-126, [&] { return index_text(index, pair.rank()); });
  });
  return check;
}

std::string value_text(double value) {
  return value == 0.0 || std::fabs(value) >= 1e-3 ? fmt::format("{:.9f}", value)
                                                  : fmt::format("{:.6e}", value);
}

constexpr const char* kRow = "{:<6} {:>11}  {:<18} {:>15} {:>15} {:>9} {:>9}  {}\n";

void print_header() {
  fmt::print(kRow, "", "values", "worst at", "is", "oracle", "error", "of bound", "");
}

/// True if within the bound.
bool report(const Check& check) {
  if (check.elements == 0) {
    fmt::print(kRow, check.name, "0", "", "", "", "", "", "ok");
    return true;
  }
  const bool good = check.ratio <= 1.0;
  fmt::print(kRow, check.name, count_text(check.elements), check.where, value_text(check.value),
             value_text(check.ref), fmt::format("{:.2e}", std::fabs(check.value - check.ref)),
             fmt::format("{:.3f}", check.ratio), good ? "ok" : "BAD");
  return good;
}

/// All rows, or a random sample with the first and the last; ascending.
std::vector<std::int64_t> sampled_rows(std::int64_t s_q, std::int64_t wanted, std::uint64_t seed) {
  std::vector<std::int64_t> rows;
  if (wanted == 0 || wanted >= s_q) {
    rows.resize(static_cast<std::size_t>(s_q));
    std::iota(rows.begin(), rows.end(), std::int64_t{0});
    return rows;
  }
  RandomBits bits(seed, 77);
  std::set<std::int64_t> chosen{s_q - 1};
  if (wanted > 1) chosen.insert(0);
  while (static_cast<std::int64_t>(chosen.size()) < wanted) {
    chosen.insert(static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(s_q)));
  }
  return {chosen.begin(), chosen.end()};
}

Candidate run_candidate(const VerifyArguments& a, const Inputs& inputs) {
  const Extents& q = inputs.q.spec.shape;
  const std::int64_t d_v = inputs.v.spec.shape[3];
  const DType dtype = inputs.q.spec.dtype;
  Candidate c;
  c.o = make_operand(dtype, {q[0], q[1], q[2], d_v});
  c.lse = make_operand(DType::f32, {q[0], q[2], q[1]});
  for (const Operand* rows : {&c.o, &c.lse}) inputs.clear_gaps(*rows);
  const ForwardTensors forward = inputs.forward(c.o.out(), c.lse.out());
  const Runner runner(make_problem(forward, options_for(a.score, inputs)), a.run.place());
  c.kernels = runner.info().kernel;
  if (!a.backward()) {
    runner.run(forward);
    return c;
  }
  c.gradients.d_o = make_random(dtype, {q[0], q[1], q[2], d_v}, a.sizes.seed, 4);
  c.gradients.d_lse = make_random(DType::f32, {q[0], q[2], q[1]}, a.sizes.seed, 5);
  c.gradients.make(inputs, dtype, dtype == DType::f64 ? DType::f64 : DType::f32);
  const BackwardTensors backward = inputs.backward(c.o, c.lse, c.gradients);
  // Planned before the forward runs, so that a refusal comes at once.
  const Runner backward_runner(make_problem(backward, options_for(a.score, inputs)), a.run.place());
  c.kernels += " and " + backward_runner.info().kernel;
  runner.run(forward);
  backward_runner.run(backward);
  return c;
}

/// Gradients of sinks and bias, of which every element is a sum of `terms` differences.
Check check_sum(const char* name, const Comparison& pair, const std::vector<double>& plain,
                DType dtype, std::int64_t terms, double scores, double term_size) {
  const double exact = dtype == DType::f32 ? 1.0 + scores : 1.0;
  const double size = term_size * exact * std::sqrt(static_cast<double>(terms));
  return check_tensor(name, pair, plain, dtype, {terms, scores, size});
}

/// `inputs` without pages.
std::vector<Check> compare(const Inputs& inputs, const Candidate& c, const OracleResult& oracle,
                           const PlainResult& plain, const std::vector<std::int64_t>& rows) {
  const Extents& q = inputs.q.spec.shape;
  const Extents& k = inputs.k.spec.shape;
  const std::int64_t d_v = inputs.v.spec.shape[3];
  const DType dtype = inputs.q.spec.dtype;
  const double scores = largest_of(plain.score_size);
  const double ds = largest_of(plain.ds_size);
  const Gradients& is = c.gradients;
  const Gradients& ref = oracle.gradients;
  std::vector<Check> checks;
  checks.push_back(
      check_tensor("O", {rows, 1, c.o, oracle.o}, plain.o, dtype, {q[3] + k[1], scores}));
  checks.push_back(check_lse({rows, 2, c.lse, oracle.lse}, plain.score_size, q[3]));
  if (!ref.dq.spec.present()) return checks;
  const Sizes dq_sizes{q[3] + d_v + k[1], scores, ds * largest_of(inputs.k)};
  checks.push_back(check_tensor("dQ", {rows, 1, is.dq, ref.dq}, plain.dq, dtype, dq_sizes));
  if (!ref.dk.spec.present()) return checks;
  const std::int64_t terms = q[3] + d_v + q[1] * (k[2] > 0 ? q[2] / k[2] : 1);
  const Sizes dk_sizes{terms, scores, ds * largest_of(inputs.q)};
  const auto whole = [&](const Operand& actual, const Operand& reference) {
    return Comparison{rows, kNoRowAxis, actual, reference};
  };
  checks.push_back(check_tensor("dK", whole(is.dk, ref.dk), plain.dk, dtype, dk_sizes));
  checks.push_back(check_tensor("dV", whole(is.dv, ref.dv), plain.dv, dtype, {terms, scores}));
  if (ref.d_sinks.spec.present()) {
    checks.push_back(check_sum("dSinks", whole(is.d_sinks, ref.d_sinks), plain.d_sinks, dtype,
                               q[0] * q[1], scores, plain.d_sink_size));
  }
  if (ref.d_bias.spec.present()) {
    const std::int64_t all = q[0] * q[1] * q[2] * k[1];
    const std::int64_t elements = std::max<std::int64_t>(ref.d_bias.count(), 1);
    const std::int64_t sums = std::max<std::int64_t>(all / elements, 1);
    checks.push_back(check_sum("dBias", whole(is.d_bias, ref.d_bias), plain.d_bias, dtype, sums,
                               scores, plain.d_bias_size));
  }
  return checks;
}

/// What a sample of rows, or a pass, cannot be had with.
void check_choices(const VerifyArguments& a, bool all_rows) {
  const ScoreArguments& score = a.score;
  if (a.backward() && score.paged()) {
    throw UserError("a backward pass takes no pages: give --pass forward");
  }
  const bool positions = !score.alibi.empty() || score.dropout != 0.0;
  const bool ragged = score.paged() || score.varlen() || !score.key_lengths.empty();
  if (!all_rows && (positions || ragged)) {
    throw UserError(
        "--rows cannot sample a problem with --alibi, --dropout, key lengths, varlen or pages");
  }
  if (score.paged() && score.varlen()) {
    throw UserError("pages and --cu-seqlens-q together are for attend");
  }
}

bool verify(const VerifyArguments& a) {
  Inputs inputs = a.files.given() ? load_inputs(a.files) : random_inputs(a.sizes);
  const std::int64_t s_q = inputs.q.spec.shape[1];
  const std::vector<std::int64_t> rows = sampled_rows(s_q, a.rows, a.sizes.seed);
  const bool all = static_cast<std::int64_t>(rows.size()) == s_q;
  check_choices(a, all);
  add_features(inputs, a.score, a.sizes.seed);
  const Candidate c = run_candidate(a, inputs);

  fmt::print("{} against the float64 oracle\nq {}, k {}, v {}; {}{}\n", c.kernels,
             operand_text(inputs.q.spec), operand_text(inputs.k.spec), operand_text(inputs.v.spec),
             a.score.text(),
             all ? "" : fmt::format("; {} of {} rows", rows.size(), count_text(s_q)));
  std::fflush(stdout);
  inputs = without_pages(inputs);
  const Options options = options_for(a.score, inputs);
  Progress oracle_progress(Progress::mode(a.progress), "oracle");
  const OracleResult oracle = run_oracle(inputs, options, rows, c.gradients, &oracle_progress);
  oracle_progress.finish();
  Progress plain_progress(Progress::mode(a.progress), "float32");
  const PlainProblem plain_problem{inputs, options, c.o.spec.dtype, rows, c.gradients};
  const PlainResult plain = compute_plain(plain_problem, &plain_progress);
  plain_progress.finish();

  print_header();
  bool good = true;
  for (const Check& check : compare(inputs, c, oracle, plain, rows)) good = report(check) && good;
  if (!all && a.backward()) {
    fmt::print("dK, dV and gradients of sinks and bias need all rows, so they were not checked\n");
  }
  fmt::print("{}\n", good ? "All within their bounds." : "OVER ITS BOUND: see BAD above.");
  return good;
}

}  // namespace

void add_verify(CLI::App& app, int& exit_code) {
  const auto a = std::make_shared<VerifyArguments>();
  CLI::App* command = app.add_subcommand(
      "verify", "A backend against the float64 oracle; exit code 1 if it is over its bound");
  a->files.add_to(*command);
  a->sizes.add_to(*command);
  a->score.add_to(*command);
  command->add_option("--pass", a->pass, "forward, or both passes")
      ->check(CLI::IsMember({"forward", "both"}))
      ->capture_default_str();
  command
      ->add_option("--rows", a->rows,
                   "Check so many random query rows only (0: all); the oracle takes O(s_q s_k)")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40))
      ->capture_default_str();
  command->add_flag("--progress", a->progress, "Progress also when stderr is no terminal");
  a->run.add_to(*command);
  command->callback([a, &exit_code] {
    if (!verify(*a)) exit_code = kOverBound;
  });
}

}  // namespace abacist::cli
