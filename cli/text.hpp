// Numbers as people read them.
#pragma once

#include <cstdint>
#include <string>

#include "abacist/tensor.hpp"

namespace abacist::cli {

std::string bytes_text(double bytes);            ///< "40.0 GB" (powers of 1,000)
std::string count_text(std::int64_t count);      ///< "10,000,000,000"
std::string duration_text(double seconds);       ///< "12.3 ms", "20.1 s", "3 min 20 s"
std::string flops_text(double flops);            ///< "4.3 GFLOP"
std::string rate_text(double flops_per_second);  ///< "152.3 GFLOP/s"
std::string shape_text(const TensorSpec& spec);  ///< "[1, 2048, 9, 64]"

}  // namespace abacist::cli
