// A C entry for scripts that load the kernel as a shared library (bench/h200_forward.py).
#include "../../src/cuda/sm90/forward/arguments.hpp"

extern "C" int abacist_sm90_forward(const abacist::cuda::sm90::ForwardArguments* arguments,
                                    cudaStream_t stream, const char** reason) {
  const auto status = abacist::cuda::sm90::launch_forward(*arguments, stream);
  *reason = status.reason;
  return status.code;
}
extern "C" unsigned long abacist_sm90_arguments_bytes() {
  return sizeof(abacist::cuda::sm90::ForwardArguments);
}
extern "C" unsigned long abacist_sm90_workspace_bytes(
    const abacist::cuda::sm90::ForwardArguments* arguments) {
  return abacist::cuda::sm90::forward_workspace_bytes(*arguments);
}
