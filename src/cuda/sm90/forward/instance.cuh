// Included by the generated translation units: makes one instance.
#pragma once
#include "instance.hpp"
#include "kernel.cuh"

namespace abacist::cuda::sm90 {

template <int Shape, class Element, bool Modified>
ForwardInstance make_forward_instance() {
  constexpr ForwardTile Tile = kForwardTiles[Shape];
  return {std::is_same_v<Element, __half> ? ForwardType::f16 : ForwardType::bf16, Modified, Tile,
          sizeof(SharedStorage<Tile>),
          reinterpret_cast<const void*>(&forward_kernel<Shape, Element, Modified>)};
}

}  // namespace abacist::cuda::sm90
