// The shared-memory plan of a block, and the barriers in it. kernel.cuh has the table.
#pragma once
#include <cstdint>

#include "../../tile/pipeline.cuh"
#include "config.hpp"
#include "params.cuh"

namespace abacist::cuda::sm90 {

inline constexpr int kWorkSlots = 8;  // a power of two above kRedoDelay

// When message i is chosen, Q of message i - 3 at the latest has been released, message i - 4 may
// be pending, and message i - 5 is finished and its verdict final.
inline constexpr int kRedoDelay = 5;

template <ForwardTile Tile>
struct SharedStorage {
  alignas(1024) char q[Tile.q_stages][Tile.q_bytes()];
  alignas(1024) char k[Tile.stages][Tile.k_bytes()];
  alignas(1024) char v[Tile.stages][Tile.v_bytes()];
  alignas(1024) char o[Tile.o_bytes() ? Tile.o_bytes() : 1];  // a part for each warp
  tile::Ring<Tile.q_stages> q_ring;
  tile::Ring<Tile.stages> k_ring, v_ring;
  Work works[kWorkSlots];
  int redo[kWorkSlots];
};

}  // namespace abacist::cuda::sm90
