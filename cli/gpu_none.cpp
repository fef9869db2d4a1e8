// The tool of a build without CUDA.
#include "gpu.hpp"
#include "user_error.hpp"

namespace abacist::cli {
namespace {

[[noreturn]] void refuse() { throw UserError("this build has no CUDA backend (ABACIST_CUDA=OFF)"); }

}  // namespace

std::shared_ptr<void> allocate_on(Device, std::int64_t) { refuse(); }
void copy_to_device(Device, void*, const void*, std::int64_t) { refuse(); }
void copy_to_host(Device, void*, const void*, std::int64_t) { refuse(); }
double seconds_on(Device, const std::function<void()>&) { refuse(); }

std::vector<std::string> gpu_lines() { return {"not in this build (ABACIST_CUDA=OFF)"}; }

}  // namespace abacist::cli
