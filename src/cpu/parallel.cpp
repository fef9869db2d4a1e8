#include "cpu/parallel.hpp"

#if defined(ABACIST_STD_THREADS)
#include <sched.h>

#include <thread>
#include <vector>
#else
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>
#include <tbb/task_arena.h>

#include <algorithm>
#endif

namespace abacist::cpu {

#if defined(ABACIST_STD_THREADS)

int default_threads() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return 1;
  return CPU_COUNT(&allowed);
}

void parallel_for(int workers, const std::function<void(int)>& body) {
  std::vector<std::jthread> threads;
  threads.reserve(static_cast<std::size_t>(workers));
  for (int worker = 1; worker < workers; ++worker) {
    threads.emplace_back([&body, worker] { body(worker); });
  }
  if (workers > 0) body(0);
}

#else

int default_threads() { return tbb::this_task_arena::max_concurrency(); }

void parallel_for(int workers, const std::function<void(int)>& body) {
  if (workers <= 1) {
    if (workers == 1) body(0);
    return;
  }
  const auto run = [&] {
    tbb::parallel_for(
        0, workers, 1, [&body](int worker) { body(worker); }, tbb::simple_partitioner());
  };
  // More threads than the caller's arena holds were asked for explicitly: they get their own arena,
  // as far as the processors go (beyond, oneTBB would print a warning and run no faster).
  const int most = std::min(workers, tbb::info::default_concurrency());
  if (most > tbb::this_task_arena::max_concurrency()) {
    tbb::task_arena(most).execute(run);
  } else {
    tbb::this_task_arena::isolate(run);  // a waiting caller must not pick up unrelated tasks
  }
}

#endif

}  // namespace abacist::cpu
