// Included by the generated translation units: makes one instance.
#pragma once
#include "instance.hpp"
#include "kernel.cuh"

namespace abacist::cuda::sm90 {

template <int DQk, int DV, class Element>
ForwardInstance make_forward_instance() {
  constexpr ForwardTile Tile = forward_tile(DQk, DV);
  return {std::is_same_v<Element, __half> ? ForwardType::f16 : ForwardType::bf16, Tile, sizeof(SharedStorage<Tile>),
          reinterpret_cast<const void*>(&forward_kernel<DQk, DV, Element>)};
}

}  // namespace abacist::cuda::sm90
