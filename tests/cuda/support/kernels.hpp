// Kernels of the forward pass on a GPU (d 96 and 192/128 aside), and a problem that each serves.
#pragma once

#include <cstdint>

namespace abacist::testing {

/// Lengths, and heads of a group, for which the plan takes a certain kernel.
struct Kernel {
  const char* name;
  const char* ending;  ///< of the kernel's name in the plan
  std::int64_t group, s_q, s_k;
  std::int64_t d;
  int multiprocessors = 0;  ///< 0: all
};

inline constexpr Kernel kKernels[] = {{"tiled64", "", 1, 150, 300, 64},
                                      {"split64", ".split", 1, 150, 2100, 64},
                                      {"tiled64long", "", 1, 150, 2100, 64, 2},
                                      {"tiled256long", "", 1, 20, 4200, 256, 2},
                                      {"tiled128", "", 1, 150, 300, 128},
                                      {"tiled192", "", 1, 130, 250, 192},
                                      {"tiled256", "", 1, 130, 200, 256},
                                      {"split256", ".split", 1, 20, 4200, 256},
                                      {"split128", ".split", 1, 3, 3000, 128},
                                      {"packedsplit64", ".packed.split", 8, 3, 2500, 64},
                                      {"packedsplit128", ".packed.split", 7, 5, 2100, 128},
                                      {"packedsplit192", ".packed.split", 4, 8, 1800, 192},
                                      {"packed64", ".packed", 4, 6, 300, 64},
                                      {"packed128", ".packed", 7, 5, 400, 128},
                                      {"packed192", ".packed", 4, 8, 250, 192},
                                      {"packed256", ".packed", 12, 3, 200, 256},
                                      {"short64", ".short", 2, 40, 60, 64},
                                      {"short128", ".short", 3, 20, 45, 128}};

}  // namespace abacist::testing
