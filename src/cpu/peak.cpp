#include "cpu/peak.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <vector>

#include "cpu/parallel.hpp"
#include "cpu/simd/kernels.hpp"

namespace abacist::cpu {

Result<double> measure_fma_peak(int threads) {
  using Clock = std::chrono::steady_clock;
  constexpr int kBursts = 60;
  constexpr std::int64_t kSteps = 200'000;
  const auto target = choose_target();
  if (!target) return target.error();
  const Kernels& k = *kernels(target.value());
  double best = 0.0;
  for (int burst = 0; burst < kBursts; ++burst) {
    std::vector<double> rates(static_cast<std::size_t>(threads));
    std::atomic<int> running{0};
    parallel_for(threads, [&](int worker) {
      // All at once if they come within a millisecond: the all-core clock is wanted.
      running.fetch_add(1);
      const auto patience = Clock::now() + std::chrono::milliseconds(1);
      while (running.load() < threads && Clock::now() < patience) {
      }
      float sink = 0.0f;
      const auto start = Clock::now();
      const std::int64_t flops = k.fma_burst(kSteps, &sink);
      const std::chrono::duration<double> seconds = Clock::now() - start;
      rates[static_cast<std::size_t>(worker)] = static_cast<double>(flops) / seconds.count();
    });
    double sum = 0.0;
    for (const double rate : rates) sum += rate;
    best = std::max(best, sum);
  }
  return best;
}

}  // namespace abacist::cpu
