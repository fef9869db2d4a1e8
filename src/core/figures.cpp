#include "core/figures.hpp"

#include <algorithm>

#include "core/operands.hpp"
#include "core/saturate.hpp"

namespace abacist::core {

Figure visible_pairs(const Resolved& resolved) {
  const Geometry& g = resolved.geometry;
  const Mask& mask = resolved.problem.options.mask;
  const MaskRule rule = mask_rule(mask, g.s_q, g.s_k);
  if (!g.varlen) {
    // With key_lengths at most: a shorter sequence never has more pairs.
    return {(Count{rule.pairs(g.s_q)} * g.b * g.h_q).value,
            !g.key_lengths && !resolved.hides_by_data()};
  }
  // Each query row sees at most min(max s_k, window) keys.
  const std::int64_t most = std::min({g.s_k, rule.left + rule.right + 1, g.total_k});
  return {(Count{g.total_q} * most * g.h_q).value, false};
}

Count elements(const TensorSpec& spec) {
  Count count = spec.present() ? 1 : 0;
  for (int axis = 0; axis < spec.rank; ++axis) {
    count = count * spec.shape[static_cast<std::size_t>(axis)];
  }
  return count;
}

Figure operand_bytes(const Resolved& resolved) {
  Count bytes = 0;
  for (const OperandRule& rule : kOperands) {
    const TensorSpec& spec = resolved.problem.operands.*rule.spec;
    bytes = bytes + elements(spec) * size_of(spec.dtype);
  }
  return {bytes.value, !resolved.geometry.ragged()};
}

Figure standard_forward_bytes(const Resolved& resolved) {
  const Geometry& g = resolved.geometry;
  const Count scores =
      g.ragged() ? Count{visible_pairs(resolved).value} : Count{g.total_q} * g.h_q * g.s_k;
  return {(Count{operand_bytes(resolved).value} + scores * 4 * 4).value, !g.ragged()};
}

}  // namespace abacist::core
