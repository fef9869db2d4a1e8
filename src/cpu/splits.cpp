#include "cpu/splits.hpp"

#include "core/numeric.hpp"
#include "cpu/driver.hpp"

namespace abacist::cpu {
namespace {

/// The row over all splits, and sum of w_s O_s [d_v].
WholeRow join(const SplitResults& x, std::int64_t row, std::int64_t d_v, double* total) {
  WholeRow whole;
  for (std::int64_t s = 0; s < x.splits; ++s) {
    const RowState& part = x.states[s * x.rows + row];
    if (!part.seen) continue;
    whole.seen = true;
    whole.top = std::max(whole.top, part.top);
    whole.maximum = std::max(whole.maximum, double{part.maximum});
  }
  std::fill_n(total, d_v, 0.0);
  for (std::int64_t s = 0; s < x.splits; ++s) {
    const RowState& part = x.states[s * x.rows + row];
    if (!part.seen) continue;
    const double weight = whole.weight_of(double{part.maximum});
    whole.sum += weight * double{part.sum};
    const float* o = x.o + (s * x.rows + row) * d_v;
    for (std::int64_t c = 0; c < d_v; ++c) total[c] += weight * double{o[c]};
  }
  return whole;
}

}  // namespace

void merge_splits(const core::ForwardCall& call, const SplitResults& results, std::int64_t tokens,
                  int threads) {
  const core::Geometry& g = call.resolved.geometry;
  const ForwardTensors& t = call.tensors;
  const core::RowStrides out(t.o);
  const double kept = core::dropout_rule(call.resolved.problem.options.dropout, g.h_q, 0, 0).scale;
  constexpr std::int64_t kRowsOfItem = 16;
  const std::int64_t rows = tokens * g.h_q;
  for_each_ticket(ceil_div(rows, kRowsOfItem), threads, [&](std::int64_t item, int) {
    double total[kMaxHeadDim];
    for (std::int64_t r = item * kRowsOfItem; r < std::min((item + 1) * kRowsOfItem, rows); ++r) {
      const std::int64_t token = r / g.h_q;
      const std::int64_t head = r % g.h_q;
      const std::int64_t sequence = g.varlen ? 0 : token / g.s_q;
      const std::int64_t i = g.varlen ? token : token % g.s_q;
      const float sink = t.sinks.present() ? head_view(t.sinks, head).at(0) : kNoSink;
      WholeRow whole = join(results, r, g.d_v, total);
      const double factor = kept * whole.add_sink(sink) / whole.sum;
      const std::int64_t base = out.at(sequence, i, head);
      for (std::int64_t c = 0; c < g.d_v; ++c) {
        core::store_element(t.o.data, t.o.dtype, base + c * out.dim,
                            whole.seen ? total[c] * factor : 0.0);
      }
      if (!t.lse.present()) continue;
      row_view<float>(t.lse, sequence, i, head).at(0, 0) =
          whole.seen ? whole.lse(t.bias.present()) : sink;
    }
  });
}

}  // namespace abacist::cpu
