// What goes wrong with files.
#pragma once

#include <stdexcept>
#include <string>

namespace abacist::io {

/// A file that cannot be read or written; what() is one line that names it.
class FileError : public std::runtime_error {
 public:
  FileError(const std::string& path, const std::string& problem)
      : std::runtime_error(path + ": " + problem) {}
};

}  // namespace abacist::io
