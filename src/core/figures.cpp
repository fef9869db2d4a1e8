#include "core/figures.hpp"

#include <algorithm>

#include "core/saturate.hpp"

namespace abacist::core {

Figure visible_pairs(const Resolved& resolved) {
  const Geometry& g = resolved.geometry;
  const Mask& mask = resolved.problem.options.mask;
  const MaskRule rule = mask_rule(mask, g.s_q, g.s_k);
  if (!g.varlen) return {(Count{rule.pairs(g.s_q)} * g.b * g.h_q).value, true};
  // Each query row sees at most min(max s_k, window) keys.
  const std::int64_t most = std::min({g.s_k, rule.left + rule.right + 1, g.total_k});
  return {(Count{g.total_q} * most * g.h_q).value, false};
}

Figure operand_bytes(const Resolved& resolved) {
  const Operands& x = resolved.problem.operands;
  Count bytes = 0;
  for (const TensorSpec* spec : {&x.q, &x.k, &x.v, &x.o, &x.lse, &x.d_o, &x.d_lse, &x.dq, &x.dk,
                                 &x.dv, &x.alibi_slopes, &x.cu_seqlens_q, &x.cu_seqlens_k}) {
    Count of_one = spec->present() ? size_of(spec->dtype) : 0;
    for (std::size_t axis = 0; axis < static_cast<std::size_t>(spec->rank); ++axis) {
      of_one = of_one * spec->shape[axis];
    }
    bytes = bytes + of_one;
  }
  return {bytes.value, !resolved.geometry.varlen};
}

Figure standard_forward_bytes(const Resolved& resolved) {
  const Geometry& g = resolved.geometry;
  const Count scores =
      g.varlen ? Count{visible_pairs(resolved).value} : Count{g.total_q} * g.h_q * g.s_k;
  return {(Count{operand_bytes(resolved).value} + scores * 4 * 4).value, !g.varlen};
}

}  // namespace abacist::core
