// What the rows of a query tile are, and how many parts its keys are cut into.
#pragma once
#include "arguments.hpp"
#include "config.hpp"

namespace abacist::cuda::sm90 {

// The 64 rows of each warpgroup for a problem that `tile` serves with one head a tile and
// `packed_tile` with the heads of a group packed.
ForwardRows choose_rows(const ForwardArguments& arguments, const ForwardTile& tile,
                        const ForwardTile& packed_tile, int multiprocessors);

// How the keys are split, where that pays, and the rows for it. `tile` serves, with `rows`, where
// they are not, and `split_tile` where they are, whether heads are packed or not.
struct ForwardSplit {
  int splits = 1;
  ForwardRows rows;
};
ForwardSplit choose_split(const ForwardArguments& arguments, const ForwardTile& tile,
                          const ForwardTile& split_tile, const ForwardRows& rows,
                          int multiprocessors);

// Rows of O, and of LSE: [b, h_q, s_q], or [h_q, total_q].
int64_t result_rows(const ForwardGeometry& g);

// Rows of partial results (partial.cuh) of a split, and the bytes of all splits.
int64_t partial_rows(const ForwardGeometry& g);
size_t partial_bytes(const ForwardGeometry& g, int splits);

}  // namespace abacist::cuda::sm90
