#include "support/plain.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/dropout.hpp"
#include "reference/visibility.hpp"

namespace abacist::testing {
namespace {

using Floats = std::vector<float>;

constexpr float kNoSink = -std::numeric_limits<float>::infinity();

/// To the nearest number with `digits` significant bits (ties to even) and exponents from `lowest`
/// on: not by the library's conversions, whose faults would hide in the bounds.
float round_to(float value, int digits, int lowest, double largest) {
  if (!std::isfinite(value) || value == 0.0f) return value;
  int exponent = 0;
  std::frexp(value, &exponent);
  const double step = std::ldexp(1.0, std::max(exponent, lowest) - digits);
  const double nearest = std::nearbyint(value / step) * step;
  return static_cast<float>(std::fabs(nearest) > largest
                                ? std::copysign(std::numeric_limits<double>::infinity(), nearest)
                                : nearest);
}

float rounded(float value, DType dtype) {
  if (dtype == DType::bf16) return round_to(value, 8, -125, std::numeric_limits<float>::max());
  if (dtype == DType::f16) return round_to(value, 11, -13, 65504.0);
  return value;
}

Floats floats(const Buffer& buffer) {
  Floats all;
  for (const double value : buffer.values()) all.push_back(static_cast<float>(value));
  return all;
}

std::vector<double> rounded(const Floats& values, DType dtype) {
  std::vector<double> all;
  all.reserve(values.size());
  for (const float value : values) all.push_back(rounded(value, dtype));
  return all;
}

constexpr std::int64_t kLanes = 8;

float dot(const float* a, const float* b, std::int64_t d) {
  float sums[kLanes] = {};
  std::int64_t e = 0;
  for (; e + kLanes <= d; e += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[e + lane] * b[e + lane];
  }
  for (; e < d; ++e) sums[0] += a[e] * b[e];
  float total = 0.0f;
  for (const float s : sums) total += s;
  return total;
}

float absolute_dot(const float* a, const float* b, std::int64_t d) {
  float sums[kLanes] = {};
  std::int64_t e = 0;
  for (; e + kLanes <= d; e += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      sums[lane] += std::fabs(a[e + lane] * b[e + lane]);
    }
  }
  for (; e < d; ++e) sums[0] += std::fabs(a[e] * b[e]);
  float total = 0.0f;
  for (const float s : sums) total += s;
  return total;
}

void add_scaled(float* to, float factor, const float* from, std::int64_t d) {
  for (std::int64_t e = 0; e < d; ++e) to[e] += factor * from[e];
}

/// Calls body(first, last) for runs of keys, each of which is summed before it is added: a chain of
/// a million float additions would be a poor yardstick (n u instead of sqrt(n) u).
template <class Body>
void by_runs(std::int64_t keys, const Body& body) {
  constexpr std::int64_t kRun = 128;
  for (std::int64_t first = 0; first < keys; first += kRun) {
    body(first, std::min(first + kRun, keys));
  }
}

/// Row-major arrays of one case and its loops.
class PlainRun {
 public:
  PlainRun(const Instance& instance, bool with_gradients)
      : x_(instance),
        c_(instance.c),
        backward_(with_gradients),
        scale_(static_cast<float>(
            c_.options.score.scale.value_or(1.0 / std::sqrt(static_cast<double>(c_.d_qk))))),
        cap_(static_cast<float>(c_.options.score.softcap)),
        q_(floats(x_.q)),
        k_(floats(x_.k)),
        v_(floats(x_.v)),
        slopes_(floats(x_.slopes)),
        sinks_(floats(x_.sinks)),
        bias_(floats(x_.bias)),
        visible_(floats(x_.visible)) {
    constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
    o_.assign(static_cast<std::size_t>(c_.total_q() * c_.h_q() * c_.d_v), kNan);
    lse_.assign(static_cast<std::size_t>(c_.total_q() * c_.h_q()), kNan);
    size_.assign(lse_.size(), 0.0);
    if (!backward_) return;
    d_o_ = floats(x_.d_o);
    d_lse_ = floats(x_.d_lse);
    dq_.assign(q_.size(), 0.0f);
    dk_.assign(k_.size(), 0.0f);
    dv_.assign(v_.size(), 0.0f);
    d_sinks_.assign(sinks_.size(), 0.0);
    d_bias_.assign(bias_.size(), 0.0f);
  }

  Plain run() {
    std::int64_t first_q = 0;
    std::int64_t first_k = 0;
    for (std::int64_t n = 0; n < c_.sequences(); ++n) {
      const std::int64_t len_q = c_.len_q(n);
      const std::int64_t len_k = c_.len_k(n);
      for (std::int64_t head = 0; head < c_.h_q(); ++head) {
        sequence_head(n, head, first_q, first_k, len_q, len_k);
      }
      first_q += len_q;
      first_k += c_.varlen() ? len_k : c_.s_k;
    }
    Plain result;
    result.o = rounded(o_, c_.o_dtype);
    result.lse = rounded(lse_, DType::f32);
    result.score_size = size_;
    result.ds_size = ds_size_;
    result.ds_row_size = ds_row_size_;
    if (backward_) {
      result.dq = rounded(dq_, c_.grad_dtype);
      result.dk = rounded(dk_, c_.grad_dtype);
      result.dv = rounded(dv_, c_.grad_dtype);
      result.d_sinks = d_sinks_;
      result.d_bias = rounded(d_bias_, DType::f32);
      result.d_bias_size = d_bias_size_;
      result.d_sink_size = d_sink_size_;
    }
    return result;
  }

 private:
  struct Score {
    float value;
    float slope;
  };

  /// Who sees whom in one head of one sequence, and what is added to a score.
  struct Pairs {
    const PlainRun& run;
    reference::Visibility interval;
    std::int64_t sequence, head;
    core::DropoutRule dropout;

    float kept(std::int64_t i, std::int64_t j) const {
      if (!dropout.active()) return 1.0f;
      return dropout.keeps(i, j) ? static_cast<float>(dropout.scale) : 0.0f;
    }

    /// Position of (i, j) in a row-major bias or mask.
    std::size_t at(const Case::Pairs& x, const Buffer& of, std::int64_t i, std::int64_t j) const {
      const auto& shape = of.spec().shape;
      const std::int64_t row = ((x.b ? sequence : 0) * shape[1] + (x.h ? head : 0)) * shape[2];
      return static_cast<std::size_t>((row + (x.s ? i : 0)) * shape[3] + j);
    }
    float bias(std::int64_t i, std::int64_t j) const {
      return run.bias_.empty() ? 0.0f : run.bias_[at(run.c_.bias, run.x_.bias, i, j)];
    }
    bool sees(std::int64_t i, std::int64_t j) const {
      if (!interval.sees(i, j) || bias(i, j) == kNoSink) return false;
      return run.visible_.empty() || run.visible_[at(run.c_.visible, run.x_.visible, i, j)] != 0.0f;
    }
    std::int64_t distance(std::int64_t i, std::int64_t j) const { return interval.distance(i, j); }
  };

  Score score(const float* q, const float* k, float slope, std::int64_t distance) const {
    Score s{scale_ * dot(q, k, c_.d_qk), 1.0f};
    if (cap_ > 0.0f) {
      const float t = std::tanh(s.value / cap_);
      s = {cap_ * t, 1.0f - t * t};
    }
    s.value -= slope * std::fabs(static_cast<float>(distance));
    return s;
  }

  void sequence_head(std::int64_t n, std::int64_t head, std::int64_t first_q, std::int64_t first_k,
                     std::int64_t len_q, std::int64_t len_k) {
    const Pairs visible{*this,
                        {c_.options.mask, len_q, len_k},
                        n,
                        head,
                        core::dropout_rule(c_.options.dropout, c_.h_q(), n, head)};
    float slope = 0.0f;
    if (c_.alibi_rank > 0) {
      slope = slopes_[static_cast<std::size_t>((c_.alibi_rank == 2 ? n * c_.h_q() : 0) + head)];
    }
    const std::int64_t head_k = head / c_.group;
    std::vector<Score> scores(static_cast<std::size_t>(len_k));
    for (std::int64_t i = 0; i < len_q; ++i) {
      const float* const q = q_.data() + ((first_q + i) * c_.h_q() + head) * c_.d_qk;
      const auto lse_at = static_cast<std::size_t>(c_.varlen() ? head * c_.total_q() + first_q + i
                                                               : (n * c_.h_q() + head) * len_q + i);
      const float sink = sinks_.empty() ? kNoSink : sinks_[static_cast<std::size_t>(head)];
      float maximum = sink;
      double size = sink == kNoSink ? 0.0 : std::fabs(sink);
      for (std::int64_t j = 0; j < len_k; ++j) {
        if (!visible.sees(i, j)) continue;
        const float* const k = key(first_k + j, head_k);
        const std::int64_t distance = visible.distance(i, j);
        Score& s = scores[static_cast<std::size_t>(j)];
        s = score(q, k, slope, distance);
        s.value += visible.bias(i, j);
        maximum = std::max(maximum, s.value);
        const float bias =
            slope * std::fabs(static_cast<float>(distance)) + std::fabs(visible.bias(i, j));
        size = std::max(
            size, static_cast<double>(std::fabs(scale_) * absolute_dot(q, k, c_.d_qk) + bias));
      }
      softmax_row(visible, i, len_k, scores, maximum, sink, first_q + i, first_k, head, lse_at);
      size_[lse_at] = size + (std::isinf(lse_[lse_at]) ? 0.0 : std::fabs(lse_[lse_at]));
      if (backward_ && !std::isinf(maximum)) {
        backward_row(visible, i, len_k, scores, first_q + i, first_k, head, lse_at);
      }
    }
  }

  void softmax_row(const Pairs& visible, std::int64_t i, std::int64_t len_k,
                   const std::vector<Score>& scores, float maximum, float sink, std::int64_t row,
                   std::int64_t first_k, std::int64_t head, std::size_t lse_at) {
    float* const o = o_.data() + (row * c_.h_q() + head) * c_.d_v;
    std::fill_n(o, c_.d_v, 0.0f);
    float sum = sink == kNoSink ? 0.0f : std::exp(sink - maximum);
    by_runs(len_k, [&](std::int64_t first, std::int64_t last) {
      float part = 0.0f;
      for (std::int64_t j = first; j < last; ++j) {
        if (!visible.sees(i, j)) continue;
        part += std::exp(scores[static_cast<std::size_t>(j)].value - maximum);
      }
      sum += part;
    });
    lse_[lse_at] = sum > 0.0f ? maximum + std::log(sum) : maximum;
    Floats part(static_cast<std::size_t>(c_.d_v));
    by_runs(len_k, [&](std::int64_t first, std::int64_t last) {
      std::fill(part.begin(), part.end(), 0.0f);
      for (std::int64_t j = first; j < last; ++j) {
        if (!visible.sees(i, j)) continue;
        const float p = std::exp(scores[static_cast<std::size_t>(j)].value - maximum) / sum;
        const float weight = rounded(p, c_.dtype) * visible.kept(i, j);
        add_scaled(part.data(), weight, value(first_k + j, head / c_.group), c_.d_v);
      }
      add_scaled(o, 1.0f, part.data(), c_.d_v);
    });
  }

  void backward_row(const Pairs& visible, std::int64_t i, std::int64_t len_k,
                    const std::vector<Score>& scores, std::int64_t row, std::int64_t first_k,
                    std::int64_t head, std::size_t lse_at) {
    const float* const q = q_.data() + (row * c_.h_q() + head) * c_.d_qk;
    const float* const d_o = d_o_.data() + (row * c_.h_q() + head) * c_.d_v;
    const float* const o = o_.data() + (row * c_.h_q() + head) * c_.d_v;
    float* const dq = dq_.data() + (row * c_.h_q() + head) * c_.d_qk;
    const float d_size = absolute_dot(d_o, o, c_.d_v);
    float d_row = 0.0f;
    for (std::int64_t e = 0; e < c_.d_v; ++e) d_row += d_o[e] * rounded(o[e], c_.o_dtype);
    const float d_lse = d_lse_.empty() ? 0.0f : d_lse_[lse_at];
    d_row -= d_lse;
    if (!sinks_.empty()) {
      const float p = std::exp(sinks_[static_cast<std::size_t>(head)] - lse_[lse_at]);
      d_sinks_[static_cast<std::size_t>(head)] -= p * d_row;
      d_sink_size_ = std::max(d_sink_size_, p * (d_size + std::fabs(d_lse)));
    }
    Floats part(static_cast<std::size_t>(c_.d_qk));
    by_runs(len_k, [&](std::int64_t first, std::int64_t last) {
      std::fill(part.begin(), part.end(), 0.0f);
      for (std::int64_t j = first; j < last; ++j) {
        if (!visible.sees(i, j)) continue;
        const Score& s = scores[static_cast<std::size_t>(j)];
        const float p = std::exp(s.value - lse_[lse_at]);
        const std::int64_t at = (first_k + j) * c_.h_k + head / c_.group;
        const float* const v = value(first_k + j, head / c_.group);
        const float kept = visible.kept(i, j);
        const float dp = kept * dot(d_o, v, c_.d_v);
        const float dp_size = kept * absolute_dot(d_o, v, c_.d_v);
        const float size = std::fabs(scale_) * (dp_size + d_size);
        ds_size_ = std::max(ds_size_, p * size);
        ds_row_size_ = std::max(ds_row_size_, size);
        const float d_score = p * (dp - d_row);
        if (!d_bias_.empty()) {
          d_bias_[visible.at(c_.bias, x_.bias, i, j)] += d_score;
          const float size_of_pair = p * (dp_size + d_size);
          d_bias_size_ = std::max(d_bias_size_, size_of_pair);
        }
        const float ds = rounded(d_score * s.slope, c_.dtype);
        add_scaled(part.data(), ds * scale_, key(first_k + j, head / c_.group), c_.d_qk);
        add_scaled(dk_.data() + at * c_.d_qk, ds * scale_, q, c_.d_qk);
        add_scaled(dv_.data() + at * c_.d_v, rounded(p, c_.dtype) * kept, d_o, c_.d_v);
      }
      add_scaled(dq, 1.0f, part.data(), c_.d_qk);
    });
  }

  const float* key(std::int64_t row, std::int64_t head_k) const {
    return k_.data() + (row * c_.h_k + head_k) * c_.d_qk;
  }
  const float* value(std::int64_t row, std::int64_t head_k) const {
    return v_.data() + (row * c_.h_k + head_k) * c_.d_v;
  }

  const Instance& x_;
  const Case& c_;
  bool backward_;
  float scale_, cap_;
  Floats q_, k_, v_, slopes_, sinks_, bias_, visible_, d_o_, d_lse_;
  Floats o_, lse_, dq_, dk_, dv_;
  std::vector<double> size_;
  std::vector<double> d_sinks_;
  Floats d_bias_;
  float d_bias_size_ = 0.0f;
  float d_sink_size_ = 0.0f;
  float ds_size_ = 0.0f;
  float ds_row_size_ = 0.0f;
};

}  // namespace

Plain compute_plain(const Instance& instance, bool with_gradients) {
  return PlainRun(instance, with_gradients).run();
}

}  // namespace abacist::testing
