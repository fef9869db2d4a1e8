// The one place where threads are made. oneTBB, or std::thread with ABACIST_STD_THREADS (for TSan:
// an uninstrumented TBB gives false alarms).
#pragma once

#include <atomic>
#include <functional>
#include <thread>

namespace abacist::cpu {

/// Threads that a run would use by default: the concurrency of the calling thread's arena (the
/// default arena honours the affinity mask), or the number of allowed processors.
int default_threads();

/// Calls body(worker) for every worker in [0, workers), each exactly once, on up to `workers`
/// threads at the same time, and returns when all are done. Fewer threads may serve, one after
/// another; a worker may therefore wait only for work that another worker has already started.
void parallel_for(int workers, const std::function<void(int)>& body);

/// Blocks until another worker has brought `counter` (written through atomic_ref, released) to
/// `value`.
template <class Int>
void wait_until(Int& counter, Int value) {
  const std::atomic_ref<Int> done(counter);
  for (int spins = 0; done.load(std::memory_order_acquire) != value; ++spins) {
    if (spins > 64) std::this_thread::yield();
  }
}

}  // namespace abacist::cpu
