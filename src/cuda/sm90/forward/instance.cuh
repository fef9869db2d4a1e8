// Included by the generated translation units: makes one instance.
#pragma once
#include "instance.hpp"
#include "kernel.cuh"
#include "short.cuh"

namespace abacist::cuda::sm90 {

template <int Shape, class Element, bool Modified, bool Splits>
ForwardInstance make_forward_instance() {
  constexpr ForwardTile Tile = kForwardTiles[Shape].with(Modified, Splits);
  return {std::is_same_v<Element, __half> ? ForwardType::f16 : ForwardType::bf16, Modified, Tile,
          sizeof(SharedStorage<Tile>),
          reinterpret_cast<const void*>(&forward_kernel<Shape, Element, Modified, Splits>)};
}

template <int D, class Element>
ForwardInstance make_short_instance() {
  return {std::is_same_v<Element, __half> ? ForwardType::f16 : ForwardType::bf16,
          false,
          {D, D, 0, kShortRows, 0, 0, 0, short_longest(D), false},
          0,
          reinterpret_cast<const void*>(&short_forward_kernel<D, Element>),
          true};
}

}  // namespace abacist::cuda::sm90
