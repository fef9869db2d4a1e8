#include "bench_case.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>

#include "abacist/attention.hpp"
#include "cpu/parallel.hpp"
#include "cpu/peak.hpp"
#include "features.hpp"
#include "user_error.hpp"

namespace abacist::cli {

bool BenchProblem::operator==(const BenchProblem& other) const {
  const auto key = [](const BenchProblem& x) {
    return std::tie(x.pass, x.dtype, x.b, x.s_q, x.s_k, x.h_q, x.h_k, x.d_qk, x.d_v, x.causal,
                    x.feature, x.place.plan.backend, x.place.plan.threads, x.place.device.type,
                    x.place.device.index);
  };
  return key(*this) == key(other);
}

ScoreArguments parse_feature(const std::string& text) {
  ScoreArguments score;
  if (text == "plain") return score;
  const std::pair<const char*, std::string ScoreArguments::*> words[] = {
      {"bias", &ScoreArguments::bias},
      {"mask", &ScoreArguments::visible},
      {"sinks", &ScoreArguments::sinks},
      {"alibi", &ScoreArguments::alibi},
      {"lengths", &ScoreArguments::key_lengths}};
  for (const auto& [name, member] : words) {
    if (text != name) continue;
    score.*member = text == "alibi" ? "auto" : "random";
    return score;
  }
  const std::size_t equals = text.find('=');
  const std::string name = text.substr(0, equals);
  const std::string value = equals == text.npos ? "" : text.substr(equals + 1);
  const auto number = [&](auto& to) {
    const char* const end = value.data() + value.size();
    const auto [stop, error] = std::from_chars(value.data(), end, to);
    return error == std::errc{} && stop == end;
  };
  std::int64_t left = 0;
  bool good = false;
  if (name == "softcap") good = number(score.softcap);
  if (name == "dropout") good = number(score.dropout);
  if (name == "paged") {
    good = number(score.page_size) && score.page_size > 0 &&
           score.page_size <= ScoreArguments::kMaxPageSize;
  }
  if (name == "window") {
    good = number(left) && left >= 0;
    score.window = std::to_string(left) + ",0";
  }
  if (good) return score;
  throw UserError(
      fmt::format("feature is \"{}\", must be plain, bias, mask, sinks, alibi, lengths, "
                  "softcap=CAP, dropout=P, "
                  "window=L or paged=ROWS",
                  text));
}

BenchCase::BenchCase(const BenchProblem& p, std::uint64_t seed) : problem_(p) {
  inputs_.q = make_random(p.dtype, {p.b, p.s_q, p.h_q, p.d_qk}, seed, 1);
  inputs_.k = make_random(p.dtype, {p.b, p.s_k, p.h_k, p.d_qk}, seed, 2);
  inputs_.v = make_random(p.dtype, {p.b, p.s_k, p.h_k, p.d_v}, seed, 3);
  const ScoreArguments score = parse_feature(p.feature);
  add_features(inputs_, score, seed);
  o_ = make_o(inputs_, p.dtype);
  lse_ = make_lse(inputs_);
  forward_ = inputs_.forward(o_.out(), lse_.out());
  Options options = score.options();
  options.mask.causal = p.causal;
  runner_ = std::make_unique<Runner>(make_problem(forward_, options), p.place);
  if (p.place.on_gpu() && p.pass == Pass::forward) {
    twins_ = std::make_unique<Twins>(forward_, p.place.device);
    runner_->run_on_gpu(twins_->tensors(), 1);
    return;
  }
  runner_->run(forward_);
  if (p.pass == Pass::backward) plan_backward(seed, options);
}

void BenchCase::plan_backward(std::uint64_t seed, const Options& options) {
  const BenchProblem& p = problem_;
  if (inputs_.block_table.spec.present()) throw UserError("a backward pass takes no pages");
  gradients_.d_o = make_random(p.dtype, {p.b, p.s_q, p.h_q, p.d_v}, seed, 4);
  gradients_.make(inputs_, p.dtype, DType::f32);
  backward_ = inputs_.backward(o_, lse_, gradients_);
  runner_ = std::make_unique<Runner>(make_problem(backward_, options), p.place);
  runner_->run(backward_);
}

void BenchCase::run() const {
  if (problem_.pass == Pass::backward) {
    runner_->run(backward_);
  } else {
    runner_->run(forward_);
  }
}

Burst BenchCase::burst_on_gpu(double min_seconds) const {
  // As many runs as a first look says are needed; all between two events.
  constexpr std::int64_t kLook = 3;
  runner_->run_on_gpu(twins_->tensors(), 1);
  const double one = runner_->run_on_gpu(twins_->tensors(), kLook) / kLook;
  const auto runs = static_cast<std::int64_t>(std::ceil(min_seconds / std::max(one, 1e-7)));
  Burst burst{.runs = std::max<std::int64_t>(runs, 1)};
  burst.seconds_per_run =
      runner_->run_on_gpu(twins_->tensors(), burst.runs) / static_cast<double>(burst.runs);
  return burst;
}

Burst BenchCase::burst(double min_seconds) const {
  if (twins_ != nullptr) return burst_on_gpu(min_seconds);
  using Clock = std::chrono::steady_clock;
  run();
  Burst burst;
  double seconds = 0.0;
  const auto start = Clock::now();
  do {
    run();
    ++burst.runs;
    seconds = std::chrono::duration<double>(Clock::now() - start).count();
  } while (seconds < min_seconds);
  burst.seconds_per_run = seconds / static_cast<double>(burst.runs);
  return burst;
}

double fma_peak(int threads) {
  const auto peak = cpu::measure_fma_peak(threads > 0 ? threads : cpu::default_threads());
  if (!peak) throw UserError(peak.error());
  return peak.value();
}

}  // namespace abacist::cli
