// abacist bench: the speed of problems, measured in randomly interleaved bursts.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "bench_case.hpp"
#include "commands.hpp"
#include "options.hpp"
#include "progress.hpp"
#include "random.hpp"
#include "serve.hpp"
#include "text.hpp"
#include "user_error.hpp"

namespace abacist::cli {
namespace {

struct BenchArguments {
  std::vector<std::string> passes{"forward"}, dtypes{"f32"}, masks{"full", "causal"},
      features{"plain"};
  std::vector<std::int64_t> lengths{1024, 4096}, dims{64, 128};
  std::int64_t b = 1, h_q = 8, h_k = -1, s_k = -1, d_v = -1;
  std::uint64_t seed = 0;
  int bursts = 9;
  double seconds = 0.3;
  bool json = false, serve = false, progress = false;
  RunArguments run;
};

struct Cell {
  std::unique_ptr<BenchCase> bench;
  std::vector<double> seconds;  ///< per run, one for each burst

  double best() const { return *std::min_element(seconds.begin(), seconds.end()); }
  double median() const {
    std::vector<double> sorted = seconds;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }
};

bool parse_mask(const std::string& text) {
  if (text != "causal" && text != "full") {
    throw UserError(fmt::format("mask is \"{}\", must be full or causal", text));
  }
  return text == "causal";
}

std::vector<BenchProblem> all_problems(const BenchArguments& a) {
  std::vector<BenchProblem> problems;
  for (const std::string& pass : a.passes) {
    for (const std::string& dtype : a.dtypes) {
      for (const std::int64_t d : a.dims) {
        for (const std::string& mask : a.masks) {
          for (const std::int64_t s : a.lengths) {
            SizeArguments sizes{.b = a.b,
                                .s_q = s,
                                .s_k = a.s_k,
                                .h_q = a.h_q,
                                .h_k = a.h_k,
                                .d_qk = d,
                                .d_v = a.d_v};
            sizes = sizes.resolved();
            for (const std::string& feature : a.features) {
              problems.push_back({parse_pass(pass), parse_dtype(dtype), sizes.b, sizes.s_q,
                                  sizes.s_k, sizes.h_q, sizes.h_k, sizes.d_qk, sizes.d_v,
                                  parse_mask(mask), feature, a.run.place()});
            }
          }
        }
      }
    }
  }
  return problems;
}

/// Each round visits every cell once in a new random order, so that a change of the clock or of the
/// load meets all of them alike.
void measure(std::vector<Cell>& cells, const BenchArguments& a) {
  std::vector<std::size_t> order(cells.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  RandomBits bits(a.seed, 99);
  Progress progress(Progress::mode(a.progress), "bench");
  const double all = static_cast<double>(cells.size()) * a.bursts;
  double done = 0.0;
  for (int round = 0; round < a.bursts; ++round) {
    std::shuffle(order.begin(), order.end(), bits);
    for (const std::size_t at : order) {
      cells[at].seconds.push_back(cells[at].bench->burst(a.seconds).seconds_per_run);
      progress.update((done += 1.0) / all);
    }
  }
}

void print_json(const Cell& cell, double peak) {
  const BenchProblem& p = cell.bench->problem();
  const PlanInfo& info = cell.bench->info();
  const double flops = static_cast<double>(info.flops.value);
  nlohmann::ordered_json line = {{"pass", p.pass == Pass::forward ? "fwd" : "bwd"},
                                 {"dtype", to_string(p.dtype)},
                                 {"b", p.b},
                                 {"s_q", p.s_q},
                                 {"s_k", p.s_k},
                                 {"h_q", p.h_q},
                                 {"h_k", p.h_k},
                                 {"d_qk", p.d_qk},
                                 {"d_v", p.d_v},
                                 {"causal", p.causal},
                                 {"feature", p.feature},
                                 {"kernel", info.kernel},
                                 {"threads", info.threads},
                                 {"median_seconds", cell.median()},
                                 {"best_seconds", cell.best()},
                                 {"median_gflops", flops / cell.median() * 1e-9},
                                 {"best_gflops", flops / cell.best() * 1e-9}};
  if (peak > 0.0) line["share_of_fma_peak"] = flops / cell.median() / peak;
  fmt::print("{}\n", line.dump());
}

void print_row(const Cell& cell, double peak) {
  const BenchProblem& p = cell.bench->problem();
  const double flops = static_cast<double>(cell.bench->info().flops.value);
  const auto gflops = [flops](double seconds) { return flops / seconds * 1e-9; };
  fmt::print(
      "{:<9}{:<5}{:<7}{:<12}{:>3} {:>7} {:>7}  {:>7} {:>9}  {:>10} {:>9.1f} {:>9.1f} {:>9}\n",
      p.pass == Pass::forward ? "forward" : "backward", to_string(p.dtype),
      p.causal ? "causal" : "full", p.feature, p.b, p.s_q, p.s_k,
      fmt::format("{}/{}", p.h_q, p.h_k), fmt::format("{}/{}", p.d_qk, p.d_v),
      duration_text(cell.median()), gflops(cell.median()), gflops(cell.best()),
      peak > 0.0 ? fmt::format("{:.1f}%", 100.0 * flops / cell.median() / peak) : "");
}

void bench(const BenchArguments& a) {
  if (a.serve) return serve_bench(a.seed);
  std::vector<Cell> cells;
  for (const BenchProblem& problem : all_problems(a)) {
    cells.emplace_back().bench = std::make_unique<BenchCase>(problem, a.seed);
  }
  if (cells.empty()) return;
  const bool on_gpu = a.run.place().on_gpu();
  const double peak = on_gpu ? 0.0 : fma_peak(a.run.threads);
  measure(cells, a);
  if (!a.json) {
    fmt::print("{}; {} interleaved burst{} of {} s; GFLOP/s count visible pairs only\n",
               kernel_text(cells.front().bench->info()), a.bursts, a.bursts == 1 ? "" : "s",
               a.seconds);
    if (!on_gpu) fmt::print("FMA peak, measured in this run: {}\n", rate_text(peak));
    fmt::print("{:<9}{:<5}{:<7}{:<12}{:>3} {:>7} {:>7}  {:>7} {:>9}  {:>10} {:>9} {:>9} {:>9}\n",
               "pass", "type", "mask", "feature", "b", "s_q", "s_k", "h_q/h_k", "d_qk/d_v",
               "median", "GFLOP/s", "best", on_gpu ? "" : "of peak");
  }
  for (const Cell& cell : cells) a.json ? print_json(cell, peak) : print_row(cell, peak);
}

}  // namespace

void add_bench(CLI::App& app) {
  const auto a = std::make_shared<BenchArguments>();
  CLI::App* command = app.add_subcommand(
      "bench", "Speed on random data; every combination of the lists is a cell of the table");
  const auto list = [command](const char* names, auto& values, const char* text) {
    command->add_option(names, values, text)->delimiter(',')->capture_default_str()->group("Cells");
  };
  list("--pass", a->passes, "forward, backward");
  list("--type", a->dtypes, "f32, bf16, f16; f64 (for --backend reference)");
  list("--mask", a->masks, "full, causal");
  list("--feature", a->features,
       "plain, bias, mask (boolean), sinks, alibi, lengths, softcap=CAP, dropout=P, window=L, "
       "paged=ROWS; what it adds is random");
  list("--s-q,-s", a->lengths, "Numbers of queries");
  list("--d-qk,-d", a->dims, "Head dimensions");
  const auto add = [command](const char* names, auto& value, const char* text) {
    command->add_option(names, value, text)->group("Cells");
  };
  add("--b", a->b, "Batch (default 1)");
  add("--s-k", a->s_k, "Number of keys (default: as queries)");
  add("--h-q,--heads", a->h_q, "Query heads (default 8)");
  add("--h-k", a->h_k, "Key/value heads (default: as query heads)");
  add("--d-v", a->d_v, "Head dimension of V (default: as Q)");
  add("--seed", a->seed, "Seed of the data and of the order (default 0)");
  command->add_option("--bursts", a->bursts, "Bursts for each cell")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command->add_option("--seconds", a->seconds, "Length of a burst")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  command->add_flag("--json", a->json, "One JSON object per cell");
  command->add_flag("--serve", a->serve, "Read JSON problems from stdin (see docs/cli.md)");
  command->add_flag("--progress", a->progress, "Progress also when stderr is no terminal");
  a->run.add_to(*command);
  command->callback([a] { bench(*a); });
}

}  // namespace abacist::cli
