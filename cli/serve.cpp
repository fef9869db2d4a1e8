// Times problems for another program, which interleaves them with its own contenders.
//
//   {"pass": "fwd", "dtype": "f32", "b": 1, "s_q": 1024, "s_k": 1024, "h_q": 16, "h_k": 16,
//    "d_qk": 64, "d_v": 64, "causal": true, "threads": 2, "min_seconds": 0.3}
//     -> {"runs": 31, "seconds_per_run": 0.00985, "flops": ..., "kernel": "..."}
//   "device": "cuda" times on a GPU.
//   "feature": "bias" (or another of parse_feature()) adds something to the problem.
//   {"copy": true, "threads": 2, "min_seconds": 0.3}  -> {"bytes_per_second": ...} read and written
//   {"peak": true, "threads": 2}  -> {"flops_per_second": ...}
//   {"drop": true}                -> {"dropped": n}: frees the data of all problems so far
//
// A bad request gets {"error": "..."} and the next one is read. The data of a problem is made once;
// its making and first run are not part of any burst.
#include "serve.hpp"

#include <fmt/format.h>

#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench_case.hpp"
#include "copy_rate.hpp"
#include "options.hpp"
#include "user_error.hpp"

namespace abacist::cli {
namespace {

using Json = nlohmann::json;

std::int64_t size_in(const Json& request, const char* name) {
  const auto value = request.value<std::int64_t>(name, -1);
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  if (value < 0 || value > kMost) {
    throw UserError(fmt::format("{} is {}, must be from 0 to 2^40", name, value));
  }
  return value;
}

int threads_in(const Json& request) {
  const auto threads = request.value<std::int64_t>("threads", 0);
  if (threads < 0 || threads > kMaxThreads) {
    throw UserError(fmt::format("threads is {}, must be from 0 to {}", threads, kMaxThreads));
  }
  return static_cast<int>(threads);
}

BenchProblem problem_in(const Json& request) {
  BenchProblem p;
  p.pass = parse_pass(request.value("pass", "forward"));
  p.dtype = parse_dtype(request.value("dtype", "f32"));
  p.b = size_in(request, "b");
  p.s_q = size_in(request, "s_q");
  p.s_k = size_in(request, "s_k");
  p.h_q = size_in(request, "h_q");
  p.h_k = size_in(request, "h_k");
  p.d_qk = size_in(request, "d_qk");
  p.d_v = size_in(request, "d_v");
  p.causal = request.value("causal", false);
  p.feature = request.value("feature", "plain");
  p.place.plan.threads = threads_in(request);
  p.place.device = parse_device(request.value("device", "cpu"));
  return p;
}

class BenchServer {
 public:
  explicit BenchServer(std::uint64_t seed) : seed_(seed) {}

  Json answer(const std::string& line) {
    const Json request = Json::parse(line);
    if (request.value("peak", false)) {
      return {{"flops_per_second", fma_peak(threads_in(request))}};
    }
    if (request.value("copy", false)) {
      const int threads = threads_in(request);
      if (copy_ == nullptr || copy_->threads() != threads) {
        copy_ = std::make_unique<CopyRate>(threads);
      }
      return {{"bytes_per_second", copy_->burst(request.value("min_seconds", 0.3))}};
    }
    if (request.value("drop", false)) {
      const std::size_t count = cases_.size();
      cases_.clear();
      return {{"dropped", count}};
    }
    const BenchCase& bench = case_for(problem_in(request));
    const Burst burst = bench.burst(request.value("min_seconds", 0.3));
    return {{"seconds_per_run", burst.seconds_per_run},
            {"runs", burst.runs},
            {"flops", bench.info().flops.value},
            {"operand_bytes", bench.info().operand_bytes.value},
            {"kernel", bench.info().kernel}};
  }

 private:
  const BenchCase& case_for(const BenchProblem& problem) {
    for (const auto& known : cases_) {
      if (known->problem() == problem) return *known;
    }
    cases_.push_back(std::make_unique<BenchCase>(problem, seed_));
    return *cases_.back();
  }

  std::uint64_t seed_;
  std::unique_ptr<CopyRate> copy_;
  std::vector<std::unique_ptr<BenchCase>> cases_;
};

}  // namespace

void serve_bench(std::uint64_t seed) {
  BenchServer server(seed);
  std::string line;
  while (std::getline(std::cin, line)) {
    if (line.find_first_not_of(" \t\r") == line.npos) continue;
    Json reply;
    try {
      reply = server.answer(line);
    } catch (const std::exception& error) {
      reply = {{"error", error.what()}};
    }
    // Invalid UTF-8 in an echoed request must not end the service.
    std::cout << reply.dump(-1, ' ', false, Json::error_handler_t::replace) << std::endl;
  }
}

}  // namespace abacist::cli
