// Figures of a plan that no backend changes.
#pragma once

#include "abacist/plan.hpp"
#include "core/geometry.hpp"

namespace abacist::core {

/// (query row, key) pairs that see each other, over all heads: exact, or at most, where the lengths
/// are data.
Figure visible_pairs(const Resolved& resolved);

/// Elements of a tensor; 0 if absent; saturates.
Count elements(const TensorSpec& spec);

inline bool has_elements(const TensorSpec& spec) { return elements(spec).value > 0; }

/// Bytes of the elements of all operands, each once.
Figure operand_bytes(const Resolved& resolved);

/// Bytes that attention with scores in memory moves forward: scores and probabilities in float,
/// each written and read once, and its operands.
Figure standard_forward_bytes(const Resolved& resolved);

}  // namespace abacist::core
