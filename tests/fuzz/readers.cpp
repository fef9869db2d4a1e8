// Any bytes as a .npy or .safetensors file: they are read, or refused with one printable line, and
// what is read lies inside the file.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "io/file_error.hpp"
#include "io/npy.hpp"
#include "io/safetensors.hpp"

namespace {

using abacist::io::Array;

bool inside(const Array& array, std::span<const std::byte> file) {
  if (!array.dtype) return true;
  if (array.shape.size() != array.stride.size()) return false;
  std::int64_t last = 0;
  for (std::size_t axis = 0; axis < array.shape.size(); ++axis) {
    if (array.shape[axis] < 0) return false;
    if (array.shape[axis] == 0) return true;
    last += (array.shape[axis] - 1) * array.stride[axis];
  }
  const std::int64_t end = array.data - file.data() + (last + 1) * abacist::size_of(*array.dtype);
  return array.data >= file.data() && last >= 0 && end <= static_cast<std::int64_t>(file.size());
}

bool printable(const std::string& text) {
  return text.size() < 2000 &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= 0x20 && c <= 0x7e; });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> file(reinterpret_cast<const std::byte*>(data), size);
  const bool npy = size >= 6 && std::memcmp(data, "\x93NUMPY", 6) == 0;
  try {
    const auto arrays = npy ? std::vector<Array>{abacist::io::parse_npy(file, "file")}
                            : abacist::io::parse_safetensors(file, "file");
    for (const Array& array : arrays) {
      if (!inside(array, file)) std::abort();
    }
  } catch (const abacist::io::FileError& error) {
    if (!printable(error.what())) std::abort();
  }
  return 0;
}
