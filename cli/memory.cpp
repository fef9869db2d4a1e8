#include "memory.hpp"

#include <cstdlib>
#include <fstream>
#include <limits>
#include <string>

#include "abacist/plan.hpp"
#include "text.hpp"
#include "user_error.hpp"

namespace abacist::cli {
namespace {

/// "VmHWM:     1234 kB" in one of the kernel's tables, in bytes; -1 if there is no such line.
std::int64_t kernel_figure(const char* table, const std::string& key) {
  std::ifstream file(table);
  std::string word;
  while (file >> word) {
    std::int64_t kilobytes = 0;
    if (word == key && file >> kilobytes) return kilobytes * 1024;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return -1;
}

}  // namespace

std::shared_ptr<void> allocate(std::int64_t bytes) {
  constexpr auto kAlignment = static_cast<std::int64_t>(kWorkspaceAlignment);
  constexpr std::int64_t kAlwaysFine = 64 << 20;  // not worth asking
  if (bytes > kAlwaysFine) {
    const std::int64_t available = kernel_figure("/proc/meminfo", "MemAvailable:");
    if (available >= 0 && bytes > available) {
      throw UserError("out of memory: " + bytes_text(static_cast<double>(bytes)) + " are needed, " +
                      bytes_text(static_cast<double>(available)) + " are available");
    }
  }
  const std::int64_t rounded = (bytes / kAlignment + 1) * kAlignment;
  void* const memory = std::aligned_alloc(kWorkspaceAlignment, static_cast<std::size_t>(rounded));
  if (memory == nullptr) {
    throw UserError("out of memory: " + bytes_text(static_cast<double>(bytes)) + " are needed");
  }
  return {memory, std::free};
}

std::int64_t peak_memory_bytes() {
  // Not getrusage: its figure survives exec, so a large parent process would be counted.
  return kernel_figure("/proc/self/status", "VmHWM:");
}

}  // namespace abacist::cli
