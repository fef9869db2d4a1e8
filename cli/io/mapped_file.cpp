#include "io/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "io/file_error.hpp"

namespace abacist::io {

MappedFile::MappedFile(const std::string& path) {
  // O_NONBLOCK: opening a named pipe must not wait for its writer.
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) throw FileError(path, std::strerror(errno));
  struct stat status {};
  const int failed = fstat(file, &status);
  const int reason = errno;
  if (failed != 0 || !S_ISREG(status.st_mode)) {
    close(file);
    throw FileError(path, failed != 0 ? std::strerror(reason) : "is not a regular file");
  }
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ > 0) {
    void* const memory = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
    const int problem = errno;
    if (memory == MAP_FAILED) {
      close(file);
      throw FileError(path, std::strerror(problem));
    }
    data_ = static_cast<const std::byte*>(memory);
  }
  close(file);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace abacist::io
