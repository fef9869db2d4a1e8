// A file that appears under its name only when it is complete.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace abacist::io {

/// Writes to a temporary name beside the target, which commit() replaces in one step: a reader sees
/// the old file or the whole new one, and a failure leaves the old one alone. Destroyed without
/// commit(), or ended by a signal once unlink_pending_on_signals() was called, it leaves
/// nothing behind.
class PendingFile {
 public:
  /// Creates the temporary file. Throws FileError, also if the target exists and is not a regular
  /// file.
  explicit PendingFile(const std::string& path);
  ~PendingFile();
  PendingFile(const PendingFile&) = delete;
  PendingFile& operator=(const PendingFile&) = delete;

  /// Takes disk space for so many bytes now (where the file system can), so that a long computation
  /// does not end at a full disk.
  void reserve(std::int64_t bytes);
  void write(const void* data, std::size_t bytes);
  /// Flushes to the disk and renames.
  void commit();

  const std::string& path() const { return path_; }

 private:
  [[noreturn]] void fail(const char* what) const;

  std::string path_;    // as the caller said it
  std::string target_;  // behind symbolic links
  std::string temporary_;
  int file_ = -1;
  int slot_ = -1;
};

/// Installs handlers that remove unfinished files, then end the process as the signal would have.
/// SIGBUS, which is what a mapped input gives that another process cuts short, ends it with an
/// error on stderr and exit code 2.
void unlink_pending_on_signals();

}  // namespace abacist::io
