// Tensors by "file.npy" or "file.safetensors:name".
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "io/array.hpp"
#include "io/mapped_file.hpp"

namespace abacist::io {

enum class Format : std::uint8_t { npy, safetensors };

/// Where a tensor is: a file, its format by the ending of its name, and the tensor's name in it.
struct Location {
  std::string path;
  Format format = Format::npy;
  std::string name;  ///< "" if none was given

  /// Throws FileError if the text ends in neither .npy nor .safetensors[:name].
  static Location parse(const std::string& text);
};

/// An array and the mapping that holds its bytes.
struct LoadedArray {
  Array array;
  std::shared_ptr<const MappedFile> file;
};

/// All arrays of a file (one in .npy).
std::vector<LoadedArray> load_all(const Location& location);

/// The array at a location. A .safetensors file without a name must hold `default_name`, or just
/// one tensor.
LoadedArray load(const Location& location, const std::string& default_name);

/// Whether two paths lead to the same file, be it there already or not.
bool same_file(const std::string& a, const std::string& b);

}  // namespace abacist::io
