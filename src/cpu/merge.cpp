// Merging of partial results: with m = max lse_p, w_p = exp(lse_p - m),
//   o = sum w_p o_p / sum w_p,  lse = m + log(sum w_p)   (FlashAttention's merge of key blocks).
// A sink is one more part, with o_p = 0 and lse_p = sink.
#include "cpu/merge.hpp"

#include <cmath>
#include <limits>
#include <vector>

#include "core/numeric.hpp"
#include "cpu/driver.hpp"

namespace abacist::cpu {
namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();

/// One part of the row at hand.
struct PartOfRow {
  const void* o;
  DType dtype;
  std::int64_t offset, dim;
  double weight;
};

/// A parts' view with its strides looked up once.
struct PartStrides {
  const Partial* part;
  core::RowStrides o;
  core::LseStrides lse;
};

struct Row {
  std::int64_t sequence, i, head;
};

/// The non-empty parts of a row with normalised weights; returns the merged LSE. An empty part is
/// neutral, whatever its O holds.
double weigh(std::span<const PartStrides> all, const Row& row, double sink,
             std::vector<PartOfRow>& parts) {
  parts.clear();
  double most = sink;
  for (const PartStrides& p : all) {
    const double lse =
        static_cast<const float*>(p.part->lse.data)[p.lse.at(row.sequence, row.head, row.i)];
    if (lse == kNone) continue;
    parts.push_back(
        {p.part->o.data, p.part->o.dtype, p.o.at(row.sequence, row.i, row.head), p.o.dim, lse});
    if (!(lse <= most)) most = lse;  // not std::max: a NaN must stay
  }
  if (parts.empty()) return sink;
  if (parts.size() == 1 && sink == kNone) {
    parts[0].weight = 1.0;
    return most;
  }
  double total = std::exp(sink - most);
  for (PartOfRow& part : parts) {
    part.weight = std::exp(part.weight - most);
    total += part.weight;
  }
  for (PartOfRow& part : parts) part.weight /= total;
  return most + std::log(total);
}

}  // namespace

void merge_rows(std::span<const Partial> parts, const Tensor& o, const Tensor& lse,
                const ConstTensor& sinks, std::int64_t rows, int threads) {
  const bool varlen = o.rank == 3;
  const std::int64_t heads = o.shape[varlen ? 1 : 2];
  const std::int64_t d_v = o.shape[varlen ? 2 : 3];
  const std::int64_t s_q = varlen ? std::max<std::int64_t>(o.shape[0], 1) : o.shape[1];
  const core::RowStrides out(o);
  std::vector<PartStrides> strides;
  for (const Partial& part : parts) {
    strides.push_back({&part, core::RowStrides(part.o), core::LseStrides(part.lse)});
  }
  constexpr std::int64_t kRowsOfItem = 64;
  for_each_ticket(ceil_div(rows, kRowsOfItem), threads, [&](std::int64_t item, int) {
    std::vector<PartOfRow> present;
    const std::int64_t last = std::min((item + 1) * kRowsOfItem, rows);
    for (std::int64_t r = item * kRowsOfItem; r < last; ++r) {
      for (std::int64_t head = 0; head < heads; ++head) {
        const Row row{varlen ? 0 : r / s_q, varlen ? r : r % s_q, head};
        const double sink =
            sinks.present() ? static_cast<const float*>(sinks.data)[head * sinks.stride[0]] : kNone;
        const double merged = weigh(strides, row, sink, present);
        const std::int64_t base = out.at(row.sequence, row.i, row.head);
        for (std::int64_t c = 0; c < d_v; ++c) {
          // Starts with -0, not 0: x + -0 is x for every x, so that one part keeps its bits.
          double sum = present.empty() ? 0.0 : -0.0;
          for (const PartOfRow& part : present) {
            sum += part.weight * core::load_element(part.o, part.dtype, part.offset + c * part.dim);
          }
          core::store_element(o.data, o.dtype, base + c * out.dim, sum);
        }
        if (!lse.present()) continue;
        static_cast<float*>(lse.data)[core::LseStrides(lse).at(row.sequence, row.head, row.i)] =
            static_cast<float>(merged);
      }
    }
  });
}

}  // namespace abacist::cpu
