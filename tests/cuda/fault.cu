#include "cuda/fault.hpp"

namespace abacist::testing {
namespace {

__global__ void write_to(int* address) { *address = 1; }

}  // namespace

void enqueue_fault(cudaStream_t stream) {
  write_to<<<1, 1, 0, stream>>>(reinterpret_cast<int*>(16));
}

}  // namespace abacist::testing
