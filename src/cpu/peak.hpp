// The machine's FMA rate, for shares of peak in benchmarks.
#pragma once

#include "abacist/status.hpp"

namespace abacist::cpu {

/// Float FLOP/s (an FMA counts 2) of `threads` threads at once with the instruction set that plans
/// use: register-only FMA chains, the best of many bursts of a millisecond or two.
Result<double> measure_fma_peak(int threads);

}  // namespace abacist::cpu
