// abacist explain: the plan of a problem as text, without running it.
#include <fmt/format.h>

#include <memory>

#include "commands.hpp"
#include "operands.hpp"
#include "options.hpp"
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
};

/// Specs alone: a plan reads no data, so the sizes may be larger than the memory.
Operands operands_of(const ExplainArguments& a) {
  Operands x;
  if (a.files.given()) {
    Inputs inputs = load_inputs(a.files);
    add_slopes(inputs, a.score.alibi);
    x.q = inputs.q.spec;
    x.k = inputs.k.spec;
    x.v = inputs.v.spec;
    x.alibi_slopes = inputs.slopes.spec;
  } else {
    const SizeArguments s = a.sizes.resolved();
    const DType dtype = parse_dtype(s.dtype);
    x.q = contiguous(dtype, {s.b, s.s_q, s.h_q, s.d_qk});
    x.k = contiguous(dtype, {s.b, s.s_k, s.h_k, s.d_qk});
    x.v = contiguous(dtype, {s.b, s.s_k, s.h_k, s.d_v});
    if (!a.score.alibi.empty()) x.alibi_slopes = contiguous(DType::f32, {s.h_q});
  }
  const Extents& q = x.q.shape;
  x.o = contiguous(x.q.dtype, {q[0], q[1], q[2], x.v.shape[3]});
  x.lse = contiguous(DType::f32, {q[0], q[2], q[1]});
  if (parse_pass(a.pass) == Pass::backward) {
    x.d_o = x.o;
    x.dq = contiguous(x.q.dtype, {q[0], q[1], q[2], q[3]});
    const Extents& k = x.k.shape;
    x.dk = contiguous(x.k.dtype, {k[0], k[1], k[2], k[3]});
    x.dv = contiguous(x.v.dtype, {k[0], k[1], k[2], x.v.shape[3]});
  }
  return x;
}

void explain_problem(const ExplainArguments& a) {
  const Problem problem{parse_pass(a.pass), operands_of(a), a.score.options()};
  const std::string text = explain(plan_or_throw(problem, a.run.plan_options()));
  fmt::print("{}{}", text, text.ends_with('\n') ? "" : "\n");
}

}  // namespace

void add_explain(CLI::App& app) {
  const auto a = std::make_shared<ExplainArguments>();
  CLI::App* command = app.add_subcommand("explain", "The plan for a problem, as text");
  a->files.add_to(*command);
  a->sizes.add_to(*command);
  a->score.add_to(*command);
  command->add_option("--pass", a->pass, "forward or backward")->capture_default_str();
  a->run.add_to(*command);
  command->callback([a] { explain_problem(*a); });
}

}  // namespace abacist::cli
