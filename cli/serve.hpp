#pragma once

#include <cstdint>

namespace abacist::cli {

/// `abacist bench --serve`: answers one JSON request per line of stdin until it ends.
void serve_bench(std::uint64_t seed);

}  // namespace abacist::cli
