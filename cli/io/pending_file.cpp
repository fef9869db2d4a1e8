#include "io/pending_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "io/file_error.hpp"

namespace abacist::io {
namespace {

// What a signal handler may touch: names in fixed memory, each published by one atomic pointer.
constexpr int kSlots = 8;
std::array<std::atomic<const char*>, kSlots> pending;

int publish(const char* name) {
  for (int slot = 0; slot < kSlots; ++slot) {
    const char* none = nullptr;
    if (pending[static_cast<std::size_t>(slot)].compare_exchange_strong(none, name)) return slot;
  }
  return -1;  // more files at a time than this program opens: that one is not cleaned up
}

void retract(int slot) {
  if (slot >= 0) pending[static_cast<std::size_t>(slot)] = nullptr;
}

extern "C" void unlink_and_end(int signal) {
  for (auto& name : pending) {
    if (const char* path = name.load()) unlink(path);
  }
  if (signal == SIGBUS) {
    constexpr std::string_view kMessage =
        "abacist: error: an input file was cut short while it was being read\n";
    // Nothing can be done about a message that cannot be written.
    [[maybe_unused]] const ssize_t ignored =
        ::write(STDERR_FILENO, kMessage.data(), kMessage.size());
    _exit(2);
  }
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

/// The file that `path` leads to through symbolic links; `path` itself if there is none yet.
std::string resolve(const std::string& path) {
  char* const resolved = realpath(path.c_str(), nullptr);
  if (resolved == nullptr) return path;
  std::string text(resolved);
  std::free(resolved);  // NOLINT(cppcoreguidelines-no-malloc): realpath's
  return text;
}

}  // namespace

void unlink_pending_on_signals() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGBUS}) std::signal(signal, &unlink_and_end);
}

PendingFile::PendingFile(const std::string& path) : path_(path), target_(resolve(path)) {
  struct stat existing {};
  const bool exists = stat(target_.c_str(), &existing) == 0;
  if (exists && !S_ISREG(existing.st_mode)) throw FileError(path, "exists and is no regular file");
  // The umask can only be read by setting it; nothing else runs yet.
  const mode_t mask = umask(0);
  umask(mask);
  const mode_t mode = exists ? existing.st_mode & 07777 : 0666 & ~mask;

  temporary_ = target_ + ".XXXXXX";
  file_ = mkostemp(temporary_.data(), O_CLOEXEC);
  if (file_ < 0) throw FileError(path, std::string("cannot be written: ") + std::strerror(errno));
  slot_ = publish(temporary_.c_str());
  fchmod(file_, mode);  // best effort
}

PendingFile::~PendingFile() {
  if (file_ < 0) return;
  close(file_);
  unlink(temporary_.c_str());
  retract(slot_);
}

void PendingFile::reserve(std::int64_t bytes) {
  if (bytes > 0 && fallocate(file_, 0, 0, bytes) != 0 && (errno == ENOSPC || errno == EFBIG)) {
    fail("cannot be written");
  }
}

void PendingFile::write(const void* data, std::size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(file_, next, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail("cannot be written");
    next += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void PendingFile::commit() {
  if (fsync(file_) != 0) fail("cannot be written");
  if (rename(temporary_.c_str(), target_.c_str()) != 0) fail("cannot be renamed into place");
  retract(slot_);
  close(file_);
  file_ = -1;
}

void PendingFile::fail(const char* what) const {
  throw FileError(path_, std::string(what) + ": " + std::strerror(errno));
}

}  // namespace abacist::io
