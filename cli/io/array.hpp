// An array as a file describes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "abacist/tensor.hpp"

namespace abacist::io {

/// A view into the bytes of a file; `data` may be unaligned (safetensors promises nothing).
struct Array {
  std::string name;       ///< "" in npy, which holds one array
  std::string type_name;  ///< as the file spells it: "<f4", "BF16"
  /// Booleans are u8; absent: 64-bit integers, and what attention has no use for.
  std::optional<DType> dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> stride;  ///< in elements; row-major, or column-major in npy
  const std::byte* data = nullptr;
};

/// Number of elements, or nothing if an extent is negative or the product overflows.
std::optional<std::int64_t> element_count(const std::vector<std::int64_t>& shape);

/// Strides of a dense array whose element_count() exists.
std::vector<std::int64_t> dense_strides(const std::vector<std::int64_t>& shape, bool column_major);

/// Text from a file, safe to print: at most 60 characters, anything unprintable as '?'.
std::string printable(const std::string& text);

/// "[2, 3]"
std::string shape_text(const std::vector<std::int64_t>& shape);

}  // namespace abacist::io
