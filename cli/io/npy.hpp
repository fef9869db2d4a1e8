// NumPy's .npy format, versions 1 to 3.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "io/array.hpp"

namespace abacist::io {

/// The array in a whole .npy file; `path` is for messages. Little-endian f16, f32, f64 and i32,
/// row- or column-major. Throws FileError on anything else, and on a file that is cut short or too
/// long.
Array parse_npy(std::span<const std::byte> file, const std::string& path);

/// Whether .npy has a type for it; bf16 it has not.
bool npy_can_hold(DType dtype);

/// The bytes before the data of a row-major array.
std::string npy_header(DType dtype, const std::vector<std::int64_t>& shape);

}  // namespace abacist::io
