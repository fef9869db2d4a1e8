// A compiled kernel and what it is for. One translation unit per instance defines one of these.
#pragma once
#include "arguments.hpp"
#include "config.hpp"

namespace abacist::cuda::sm90 {

struct ForwardInstance {
  ForwardType type;
  bool modified;  // softcap and ALiBi can be applied
  ForwardTile tile;
  size_t shared_bytes;
  const void* kernel;
  bool is_short =
      false;  // short.cuh, for plain and modified scores; of `tile` only d and keys hold
};

// In the order of kForwardTiles; the first that fits serves. Defined by the generated list.
extern const ForwardInstance* const kForwardInstances[];
extern const int kForwardInstanceCount;

}  // namespace abacist::cuda::sm90
