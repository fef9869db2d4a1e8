// A regular file mapped into memory, read-only.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace abacist::io {

/// Mapped rather than copied: a tensor of many gigabytes costs address space only until it is read.
/// A file that another process cuts short while it is mapped ends the program (SIGBUS), as with
/// every mapped file.
class MappedFile {
 public:
  /// Throws FileError if the file is missing, unreadable or not a regular file.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace abacist::io
