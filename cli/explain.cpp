// abacist explain: the plan of a problem as text or as a picture, without running it.
#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <optional>
#include <string>

#include "commands.hpp"
#include "core/mask.hpp"
#include "features.hpp"
#include "io/file_error.hpp"
#include "io/pending_file.hpp"
#include "operands.hpp"
#include "options.hpp"
#include "picture/picture.hpp"
#include "runner.hpp"
#include "text.hpp"
#include "user_error.hpp"

namespace abacist::cli {
namespace {

struct ExplainArguments {
  FileArguments files;
  SizeArguments sizes;
  ScoreArguments score;
  RunArguments run;
  std::string pass = "forward";
  std::string svg, html;  ///< files for the picture
  std::int64_t row = -1;  ///< of the walk; -1: the last

  bool picture() const { return !svg.empty() || !html.empty(); }
};

/// Files, or specs alone: a plan reads no data, so the sizes may be larger than the memory.
Inputs inputs_of(const ExplainArguments& a) {
  Inputs inputs;
  if (a.files.given()) {
    inputs = load_inputs(a.files);
  } else {
    const SizeArguments s = a.sizes.resolved();
    const DType dtype = parse_dtype(s.dtype);
    inputs.q.spec = contiguous(dtype, {s.b, s.s_q, s.h_q, s.d_qk});
    inputs.k.spec = contiguous(dtype, {s.b, s.s_k, s.h_k, s.d_qk});
    inputs.v.spec = contiguous(dtype, {s.b, s.s_k, s.h_k, s.d_v});
  }
  add_features(inputs, a.score, a.sizes.seed, false);
  return inputs;
}

Operand spec_alone(DType dtype, const Extents& shape, std::int64_t last) {
  Operand operand;
  operand.spec = contiguous(dtype, {shape[0], shape[1], shape[2], last});
  return operand;
}

Problem problem_of(const ExplainArguments& a, const Inputs& inputs) {
  const Options options = options_for(a.score, inputs);
  const TensorSpec& q = inputs.q.spec;
  const TensorSpec& k = inputs.k.spec;
  const Operand o = spec_alone(q.dtype, q.shape, inputs.v.spec.shape[3]);
  Operand lse;
  lse.spec = contiguous(DType::f32, {q.shape[0], q.shape[2], q.shape[1]});
  if (parse_pass(a.pass) == Pass::forward) {
    return make_problem(inputs.forward(o.out(), lse.out()), options);
  }
  if (inputs.block_table.spec.present()) throw UserError("a backward pass takes no pages");
  Gradients gradients;
  gradients.d_o = o;
  gradients.dq = spec_alone(q.dtype, q.shape, q.shape[3]);
  gradients.dk = spec_alone(k.dtype, k.shape, k.shape[3]);
  gradients.dv = spec_alone(k.dtype, k.shape, inputs.v.spec.shape[3]);
  if (inputs.sinks.spec.present()) gradients.d_sinks.spec = contiguous(DType::f32, {q.shape[2]});
  if (inputs.bias.spec.present()) {
    const Extents& bias = inputs.bias.spec.shape;
    gradients.d_bias = spec_alone(DType::f32, bias, bias[3]);
  }
  return make_problem(inputs.backward(o, lse, gradients), options);
}

/// Row `row` of an operand's first sequence and head, `count` rows from there.
Operand rows_of(const Operand& from, std::int64_t row, std::int64_t count) {
  Operand rows = from;
  rows.spec.shape = {1, count, 1, from.spec.shape[3]};
  rows.data =
      static_cast<std::byte*>(from.data) + row * from.spec.stride[1] * size_of(from.spec.dtype);
  return rows;
}

/// The online softmax of a row: of the files' data, or of random data. None where there is no row,
/// or more data than a picture is worth.
std::optional<Walk> walk_of(const ExplainArguments& a, const Inputs& inputs, const Plan& plan) {
  constexpr std::int64_t kMostElements = 1 << 24;
  const Operands& x = plan.problem().operands;
  const std::int64_t s_q = x.q.shape[1], d = x.q.shape[3];
  if (a.row >= s_q) throw UserError(fmt::format("--row is {}, must be below s_q = {}", a.row, s_q));
  if (s_q == 0 || x.q.shape[0] == 0 || x.q.shape[2] == 0) return std::nullopt;
  const std::int64_t row = a.row < 0 ? s_q - 1 : a.row;
  const core::Interval keys =
      core::mask_rule(plan.problem().options.mask, s_q, x.k.shape[1]).visible(row);
  if (keys.size() > kMostElements / d) return std::nullopt;
  double slope = 0.0;
  Inputs slopes;
  slopes.q.spec = x.q;
  add_features(slopes, {.alibi = a.score.alibi}, 0);
  if (slopes.slopes.data != nullptr) slope = *static_cast<const float*>(slopes.slopes.data);
  if (a.files.given()) {
    const std::int64_t first = keys.empty() ? 0 : keys.begin;
    return walk_row(rows_of(inputs.q, row, 1), rows_of(inputs.k, first, keys.size()),
                    plan.problem(), row, slope, plan.info().keys);
  }
  const std::uint64_t seed = a.sizes.seed;
  return walk_row(make_random(DType::f32, {1, 1, 1, d}, seed, 1),
                  make_random(DType::f32, {1, keys.size(), 1, d}, seed, 2), plan.problem(), row,
                  slope, plan.info().keys);
}

/// A file that is there once it is committed; null without a path.
std::unique_ptr<io::PendingFile> pending(const std::string& path, const std::string& text,
                                         const Inputs& inputs) {
  if (path.empty()) return nullptr;
  inputs.refuse_to_overwrite(path);
  auto file = std::make_unique<io::PendingFile>(path);
  file->write(text.data(), text.size());
  return file;
}

void explain_problem(const ExplainArguments& a) {
  const Inputs inputs = inputs_of(a);
  const Problem problem = problem_of(a, inputs);
  const ScoreArguments& score = a.score;
  if (a.picture() &&
      (score.paged() || score.dropout != 0.0 || !score.bias.empty() || !score.visible.empty() ||
       !score.sinks.empty() || !score.key_lengths.empty())) {
    throw UserError(
        "a picture draws --causal, --window, --softcap and --alibi; it cannot draw bias, boolean "
        "masks, sinks, dropout, key lengths, varlen or pages");
  }
  const Place place = a.run.place();
  const Plan plan = plan_or_throw(on_device(problem, place.device), place.plan);
  if (!a.picture()) {
    if (a.row >= 0) throw UserError("--row is of a picture: --svg or --html is missing");
    fmt::print("{}\n", explain(plan));
    return;
  }
  if (!a.svg.empty() && !a.html.empty() && io::same_file(a.svg, a.html)) {
    throw UserError(a.svg + " is given for two outputs");
  }
  const std::optional<Walk> walk = walk_of(a, inputs, plan);
  const auto svg = pending(a.svg, picture_svg(plan, walk), inputs);
  const auto html = pending(a.html, picture_html(plan, walk), inputs);
  for (const auto* file : {&svg, &html}) {
    if (*file == nullptr) continue;
    (*file)->commit();
    fmt::print("wrote {}\n", (*file)->path());
  }
}

}  // namespace

void add_explain(CLI::App& app) {
  const auto a = std::make_shared<ExplainArguments>();
  CLI::App* command =
      app.add_subcommand("explain", "The plan for a problem, as text or as a picture");
  a->files.add_to(*command);
  a->sizes.add_to(*command);
  a->score.add_to(*command);
  command->add_option("--pass", a->pass, "forward or backward")->capture_default_str();
  const std::string picture = "Picture";
  command->add_option("--svg", a->svg, "Write a picture of the plan to this file")->group(picture);
  command->add_option("--html", a->html, "The same as a page with the plan's text")->group(picture);
  command->add_option("--row", a->row, "Query whose online softmax is drawn (default: the last)")
      ->check(CLI::NonNegativeNumber)
      ->group(picture);
  a->run.add_to(*command);
  command->callback([a] { explain_problem(*a); });
}

}  // namespace abacist::cli
