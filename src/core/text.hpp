// Text for messages.
#pragma once

#include <string>

#include "abacist/tensor.hpp"

namespace abacist::core {

std::string to_text(const Extents& extents, int rank);  ///< "[2, 3]"
std::string to_text(const TensorSpec& spec);            ///< "f32[2, 3]"
std::string to_text(Device device);                     ///< "cuda:1"
std::string to_text(double value);                      ///< shortest text that reads back

}  // namespace abacist::core
