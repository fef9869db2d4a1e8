// The safetensors format: 8 bytes of header length, a JSON header, the tensors' bytes.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "io/array.hpp"

namespace abacist::io {

/// The tensors of a whole file in the order of their bytes; `path` is for messages. Throws
/// FileError if the file breaks any rule of the format: among them, the tensors must cover the data
/// exactly, without holes or overlaps, and no name may come twice.
std::vector<Array> parse_safetensors(std::span<const std::byte> file, const std::string& path);

/// The bytes before the data of these arrays (name, dtype, shape), which follow one another
/// row-major.
std::string safetensors_header(const std::vector<Array>& arrays);

}  // namespace abacist::io
