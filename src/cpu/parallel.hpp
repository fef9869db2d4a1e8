// The one place where threads are made. oneTBB, or std::thread with ABACIST_STD_THREADS (for TSan:
// an uninstrumented TBB gives false alarms).
#pragma once

#include <functional>

namespace abacist::cpu {

/// Threads that a run would use by default: the concurrency of the calling thread's arena (the
/// default arena honours the affinity mask), or the number of allowed processors.
int default_threads();

/// Calls body(worker) for every worker in [0, workers), each exactly once, on up to `workers`
/// threads at the same time, and returns when all are done. Fewer threads may serve, one after
/// another; a worker may therefore wait only for work that another worker has already started.
void parallel_for(int workers, const std::function<void(int)>& body);

}  // namespace abacist::cpu
