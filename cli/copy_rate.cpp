#include "copy_rate.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>

#include "cpu/parallel.hpp"

namespace abacist::cli {
namespace {

constexpr std::int64_t kBytes = std::int64_t{256} << 20;

}  // namespace

CopyRate::CopyRate(int threads)
    : threads_(threads > 0 ? threads : cpu::default_threads()),
      from_(allocate(kBytes)),
      to_(allocate(kBytes)) {
  std::memset(from_.get(), 1, static_cast<std::size_t>(kBytes));
}

void CopyRate::copy() const {
  const std::int64_t part = (kBytes / threads_ + 63) / 64 * 64;
  cpu::parallel_for(threads_, [&](int worker) {
    const std::int64_t begin = worker * part;
    const std::int64_t end = std::min(begin + part, kBytes);
    if (begin >= end) return;
    // Streams past the caches: the parts are larger than what the C library takes for their size.
    std::memcpy(static_cast<std::byte*>(to_.get()) + begin,
                static_cast<const std::byte*>(from_.get()) + begin,
                static_cast<std::size_t>(end - begin));
  });
}

double CopyRate::burst(double min_seconds) const {
  using Clock = std::chrono::steady_clock;
  copy();
  double seconds = 0.0;
  double copies = 0.0;
  const auto start = Clock::now();
  do {
    copy();
    copies += 1.0;
    seconds = std::chrono::duration<double>(Clock::now() - start).count();
  } while (seconds < min_seconds);
  return copies * 2.0 * static_cast<double>(kBytes) / seconds;
}

}  // namespace abacist::cli
