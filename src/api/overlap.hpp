// Do strided views share bytes?
#pragma once

#include "abacist/tensor.hpp"

namespace abacist::api {

/// Whether two elements of one view may lie at the same address. Exact for layouts in which every
/// stride is at least the reach of the smaller ones (all permutations and paddings of dense
/// arrays); other layouts count as overlapping.
bool may_overlap_itself(const TensorSpec& spec);

/// Whether two views share a byte. Exact for views of common arrays (packed q/k/v, slices,
/// padding); where the search would take too long the answer is yes.
bool may_overlap(const ConstTensor& a, const ConstTensor& b);

}  // namespace abacist::api
