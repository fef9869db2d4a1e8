#include "io/array.hpp"

#include <algorithm>

namespace abacist::io {

std::optional<std::int64_t> element_count(const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(count, extent, &count)) return std::nullopt;
  }
  return count;
}

std::vector<std::int64_t> dense_strides(const std::vector<std::int64_t>& shape, bool column_major) {
  std::vector<std::int64_t> stride(shape.size());
  std::int64_t next = 1;
  for (std::size_t step = 0; step < shape.size(); ++step) {
    const std::size_t axis = column_major ? step : shape.size() - 1 - step;
    stride[axis] = next;
    // An empty array has no element to reach; 0 must not hide an overflow of the extents after it.
    next *= std::max<std::int64_t>(shape[axis], 0);
  }
  return stride;
}

std::string printable(const std::string& text) {
  constexpr std::size_t kLimit = 60;
  std::string out = text.substr(0, kLimit);
  for (char& c : out) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return text.size() > kLimit ? out + "..." : out;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    if (axis > 0) text += ", ";
    text += std::to_string(shape[axis]);
  }
  return text + "]";
}

}  // namespace abacist::io
