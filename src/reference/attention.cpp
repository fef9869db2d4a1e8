#include "reference/attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/numeric.hpp"
#include "core/saturate.hpp"
#include "reference/score.hpp"

namespace abacist::reference {
namespace {

// O is summed over runs of this many keys first: rounding grows with the run and the number of
// runs, not with the length, so that a million keys still leave 13 digits.
constexpr std::int64_t kRun = 512;

/// Reads or writes one row of an operand, dense or varlen.
class Rows {
 public:
  Rows(const TensorSpec& spec, const core::Sequence& sequence, std::int64_t first,
       std::int64_t head)
      : strides_(spec), dtype_(spec.dtype), base_(strides_.at(sequence.index, first, head)) {}

  void load(const void* data, std::int64_t row, std::int64_t d, double* to) const {
    for (std::int64_t e = 0; e < d; ++e) to[e] = core::load_element(data, dtype_, at(row, e));
  }
  void store(void* data, std::int64_t row, std::int64_t d, const double* from) const {
    for (std::int64_t e = 0; e < d; ++e) core::store_element(data, dtype_, at(row, e), from[e]);
  }

 private:
  std::int64_t at(std::int64_t row, std::int64_t e) const {
    return base_ + row * strides_.row + e * strides_.dim;
  }

  core::RowStrides strides_;
  DType dtype_;
  std::int64_t base_;
};

double dot(const double* a, const double* b, std::int64_t d) {
  double sums[4] = {};
  std::int64_t e = 0;
  for (; e + 4 <= d; e += 4) {
    for (std::int64_t lane = 0; lane < 4; ++lane) sums[lane] += a[e + lane] * b[e + lane];
  }
  for (; e < d; ++e) sums[0] += a[e] * b[e];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

void add_scaled(double* to, double factor, const double* from, std::int64_t d) {
  for (std::int64_t e = 0; e < d; ++e) to[e] += factor * from[e];
}

void load_keys_and_values(const core::Geometry& g, const ConstTensor& k, const ConstTensor& v,
                          const core::Sequence& sequence, std::int64_t head_k, const Scratch& x) {
  const Rows k_rows(k, sequence, sequence.first_k, head_k);
  const Rows v_rows(v, sequence, sequence.first_k, head_k);
  for (std::int64_t j = 0; j < sequence.len_k; ++j) {
    k_rows.load(k.data, j, g.d_qk, x.keys + j * g.d_qk);
    v_rows.load(v.data, j, g.d_v, x.values + j * g.d_v);
  }
}

/// Keys and values out of pages. Those of an invalid page stay unread; whether a query would have
/// seen one is noted.
void load_pages(const core::Resolved& resolved, const ForwardTensors& t,
                const core::Sequence& sequence, std::int64_t head_k, const Scratch& x) {
  const core::Geometry& g = resolved.geometry;
  const PageReader pages(g, t.block_table, sequence.index);
  const Visibility visible(resolved.problem.options.mask, sequence.len_q, sequence.len_k);
  for (std::int64_t j = 0; j < sequence.len_k; ++j) {
    if (pages.valid(j)) {
      const core::Sequence page{pages.page(j)};
      Rows(t.k, page, 0, head_k).load(t.k.data, j % g.page_size, g.d_qk, x.keys + j * g.d_qk);
      Rows(t.v, page, 0, head_k).load(t.v.data, j % g.page_size, g.d_v, x.values + j * g.d_v);
      continue;
    }
    for (std::int64_t i = 0; i < sequence.len_q; ++i) {
      if (visible.sees(i, j)) x.faults->fetch_or(DeviceFault::block_table);
    }
  }
}

/// The sink of a head; -inf if there is none.
double sink_of(const ConstTensor& sinks, std::int64_t head) {
  if (!sinks.present()) return -std::numeric_limits<double>::infinity();
  return core::load_element(sinks.data, sinks.dtype, head * sinks.stride[0]);
}

/// The softmax of a row whose scores are in x.scores: O to x.v_sum, the LSE returned. Two passes
/// over the visible keys, the second with the true maximum.
double attend_row(const core::Geometry& g, const ScoreRule& rule, std::int64_t i,
                  std::int64_t len_k, double sink, const Scratch& x) {
  std::fill_n(x.v_sum, g.d_v, 0.0);
  double maximum = sink;
  bool any = false;
  for (std::int64_t j = 0; j < len_k; ++j) {
    if (!rule.sees(i, j)) continue;
    any = true;
    // A NaN score stays the maximum: comparisons with it are false.
    if (!(x.scores[j] <= maximum) && !std::isnan(maximum)) maximum = x.scores[j];
  }
  if (!any) return sink;
  double sum = sink == -std::numeric_limits<double>::infinity() ? 0.0 : std::exp(sink - maximum);
  for (std::int64_t first = 0; first < len_k; first += kRun) {
    double part = 0.0;
    std::fill_n(x.v_part, g.d_v, 0.0);
    for (std::int64_t j = first; j < std::min(first + kRun, len_k); ++j) {
      if (!rule.sees(i, j)) continue;
      const double weight = std::exp(x.scores[j] - maximum);
      part += weight;
      add_scaled(x.v_part, weight * rule.kept(i, j), x.values + j * g.d_v, g.d_v);
    }
    sum += part;
    add_scaled(x.v_sum, 1.0, x.v_part, g.d_v);
  }
  for (std::int64_t e = 0; e < g.d_v; ++e) x.v_sum[e] /= sum;
  return maximum + std::log(sum);
}

std::int64_t lse_at(const TensorSpec& spec, const core::Sequence& sequence, std::int64_t head,
                    std::int64_t i) {
  return core::LseStrides(spec).at(sequence.index, head, sequence.first_q + i);
}

}  // namespace

std::size_t scratch_doubles(const core::Geometry& g, Pass pass, std::int64_t max_len_k) {
  const std::int64_t copies = pass == Pass::backward ? 2 : 1;
  const core::Count per_key = copies * (g.d_qk + g.d_v) + 1;
  return static_cast<std::size_t>((per_key * max_len_k + 2 * g.d_qk + 3 * g.d_v).value);
}

Scratch carve(double* memory, const core::Geometry& g, Pass pass, std::int64_t max_len_k) {
  const auto take = [&memory](std::int64_t count) {
    double* const from = memory;
    memory += count;
    return from;
  };
  Scratch x{};
  x.keys = take(max_len_k * g.d_qk);
  x.values = take(max_len_k * g.d_v);
  if (pass == Pass::backward) {
    x.dk = take(max_len_k * g.d_qk);
    x.dv = take(max_len_k * g.d_v);
  }
  x.scores = take(max_len_k);
  x.qk_row = take(g.d_qk);
  x.qk_sum = take(g.d_qk);
  x.v_row = take(g.d_v);
  x.v_sum = take(g.d_v);
  x.v_part = take(g.d_v);
  return x;
}

void forward(const core::Resolved& resolved, const ForwardTensors& t,
             const core::Sequence& sequence, std::int64_t head_k, const Scratch& x,
             const RowsDone& done) {
  const core::Geometry& g = resolved.geometry;
  if (g.paged) {
    load_pages(resolved, t, sequence, head_k, x);
  } else {
    load_keys_and_values(g, t.k, t.v, sequence, head_k, x);
  }
  for (std::int64_t head = head_k * g.group; head < (head_k + 1) * g.group; ++head) {
    const ScoreRule rule(resolved, t, sequence, head);
    const double sink = sink_of(t.sinks, head);
    const Rows q_rows(t.q, sequence, sequence.first_q, head);
    const Rows o_rows(t.o, sequence, sequence.first_q, head);
    for (std::int64_t i = 0; i < sequence.len_q; ++i) {
      q_rows.load(t.q.data, i, g.d_qk, x.qk_row);
      for (std::int64_t j = 0; j < sequence.len_k; ++j) {
        if (!rule.sees(i, j)) continue;
        const double product = dot(x.qk_row, x.keys + j * g.d_qk, g.d_qk);
        x.scores[j] = rule(product, i, j).score;
      }
      const double lse = attend_row(g, rule, i, sequence.len_k, sink, x);
      o_rows.store(t.o.data, i, g.d_v, x.v_sum);
      if (t.lse.present()) {
        core::store_element(t.lse.data, t.lse.dtype, lse_at(t.lse, sequence, head, i), lse);
      }
      done();
    }
  }
}

void backward(const core::Resolved& resolved, const BackwardTensors& t,
              const core::Sequence& sequence, std::int64_t head_k, const Scratch& x,
              const RowsDone& done) {
  const core::Geometry& g = resolved.geometry;
  load_keys_and_values(g, t.k, t.v, sequence, head_k, x);
  std::fill_n(x.dk, sequence.len_k * g.d_qk, 0.0);
  std::fill_n(x.dv, sequence.len_k * g.d_v, 0.0);
  for (std::int64_t head = head_k * g.group; head < (head_k + 1) * g.group; ++head) {
    const ScoreRule rule(resolved, t, sequence, head);
    const Rows q_rows(t.q, sequence, sequence.first_q, head);
    const Rows o_rows(t.o, sequence, sequence.first_q, head);
    const Rows d_o_rows(t.d_o, sequence, sequence.first_q, head);
    const Rows dq_rows(t.dq, sequence, sequence.first_q, head);
    const ConstTensor sums(x.d_bias, x.d_bias_spec);
    const PairReader d_bias(sums, sequence.index, head);
    for (std::int64_t i = 0; i < sequence.len_q; ++i) {
      q_rows.load(t.q.data, i, g.d_qk, x.qk_row);
      o_rows.load(t.o.data, i, g.d_v, x.v_sum);
      d_o_rows.load(t.d_o.data, i, g.d_v, x.v_row);
      const double lse =
          core::load_element(t.lse.data, t.lse.dtype, lse_at(t.lse, sequence, head, i));
      double d_row = dot(x.v_row, x.v_sum, g.d_v);  // D = rowsum(dO * O) - dLSE
      if (t.d_lse.present()) {
        d_row -=
            core::load_element(t.d_lse.data, t.d_lse.dtype, lse_at(t.d_lse, sequence, head, i));
      }
      std::fill_n(x.qk_sum, g.d_qk, 0.0);
      for (std::int64_t j = 0; j < sequence.len_k; ++j) {
        if (!rule.sees(i, j)) continue;
        const double* const key = x.keys + j * g.d_qk;
        const auto [score, slope] = rule(dot(x.qk_row, key, g.d_qk), i, j);
        // At most 1: a float LSE of a huge score may be far below it.
        const double p = std::exp(std::min(score - lse, 0.0));
        const double kept = rule.kept(i, j);
        const double dp = kept * dot(x.v_row, x.values + j * g.d_v, g.d_v);
        const double d_score = p * (dp - d_row);
        if (t.d_bias.present()) x.d_bias[d_bias.at(i, j)] += d_score;
        const double ds = d_score * slope * rule.scale();
        add_scaled(x.qk_sum, ds, key, g.d_qk);
        add_scaled(x.dk + j * g.d_qk, ds, x.qk_row, g.d_qk);
        add_scaled(x.dv + j * g.d_v, p * kept, x.v_row, g.d_v);
      }
      dq_rows.store(t.dq.data, i, g.d_qk, x.qk_sum);
      done();
    }
  }
  const Rows dk_rows(t.dk, sequence, sequence.first_k, head_k);
  const Rows dv_rows(t.dv, sequence, sequence.first_k, head_k);
  for (std::int64_t j = 0; j < sequence.len_k; ++j) {
    dk_rows.store(t.dk.data, j, g.d_qk, x.dk + j * g.d_qk);
    dv_rows.store(t.dv.data, j, g.d_v, x.dv + j * g.d_v);
  }
  if (!g.key_lengths) return;
  std::fill_n(x.qk_row, g.d_qk, 0.0);
  std::fill_n(x.v_row, g.d_v, 0.0);
  for (std::int64_t j = sequence.len_k; j < g.s_k; ++j) {
    dk_rows.store(t.dk.data, j, g.d_qk, x.qk_row);
    dv_rows.store(t.dv.data, j, g.d_v, x.v_row);
  }
}

void sink_gradients(const core::Resolved& resolved, const BackwardTensors& t) {
  const core::Geometry& g = resolved.geometry;
  std::vector<double> o(static_cast<std::size_t>(g.d_v));
  std::vector<double> d_o(o.size());
  for (std::int64_t head = 0; head < g.h_q; ++head) {
    const double sink = sink_of(t.sinks, head);
    double gradient = 0.0;
    for (std::int64_t n = 0; n < g.b; ++n) {
      const core::Sequence sequence = core::sequence_at(g, core::Lengths::of(t), n);
      const Rows o_rows(t.o, sequence, sequence.first_q, head);
      const Rows d_o_rows(t.d_o, sequence, sequence.first_q, head);
      for (std::int64_t i = 0; i < sequence.len_q; ++i) {
        o_rows.load(t.o.data, i, g.d_v, o.data());
        d_o_rows.load(t.d_o.data, i, g.d_v, d_o.data());
        double d_row = dot(d_o.data(), o.data(), g.d_v);
        if (t.d_lse.present()) {
          d_row -=
              core::load_element(t.d_lse.data, t.d_lse.dtype, lse_at(t.d_lse, sequence, head, i));
        }
        const double lse =
            core::load_element(t.lse.data, t.lse.dtype, lse_at(t.lse, sequence, head, i));
        if (!std::isinf(sink) || sink > 0.0) {
          gradient -= std::exp(std::min(sink - lse, 0.0)) * d_row;
        }
      }
    }
    core::store_element(t.d_sinks.data, t.d_sinks.dtype, head * t.d_sinks.stride[0], gradient);
  }
}

}  // namespace abacist::reference
