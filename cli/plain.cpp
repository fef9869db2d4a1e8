#include "plain.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "core/dropout.hpp"
#include "core/numeric.hpp"
#include "cpu/parallel.hpp"

namespace abacist::cli {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float rounded(float value, DType dtype) {
  if (dtype == DType::bf16) return core::bf16_to_float(core::float_to_bf16(value));
  if (dtype == DType::f16) return core::f16_to_float(core::float_to_f16(value));
  return value;
}

std::vector<double> rounded(const std::vector<float>& values, DType dtype) {
  std::vector<double> all(values.size());
  std::transform(values.begin(), values.end(), all.begin(),
                 [dtype](float value) { return rounded(value, dtype); });
  return all;
}

/// A tensor's elements as float, row-major.
std::vector<float> floats(const Operand& operand) {
  if (!operand.spec.present()) return {};
  const std::int64_t count = operand.count();
  std::vector<float> all(static_cast<std::size_t>(count));
  if (operand.spec.rank == kMaxRank) {
    const Operand copy = convert(operand.in(), DType::f32);
    std::copy_n(static_cast<const float*>(copy.data), count, all.begin());
    return all;
  }
  // Slopes and LSE: made by us, contiguous, or slopes of a file in either order.
  const TensorSpec& spec = operand.spec;
  const std::int64_t inner = spec.shape[static_cast<std::size_t>(spec.rank - 1)];
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t at = spec.rank == 2 ? i / inner * spec.stride[0] + i % inner * spec.stride[1]
                            : spec.rank == 1 ? i * spec.stride[0]
                                             : i;
    all[static_cast<std::size_t>(i)] =
        static_cast<float>(core::load_element(operand.data, spec.dtype, at));
  }
  return all;
}

/// Sum of a_e b_e, and of its absolute values, in eight lanes that the compiler can vectorise.
struct Dot {
  float sum = 0.0f;
  float size = 0.0f;
};

Dot dot(const float* a, const float* b, std::int64_t d) {
  constexpr std::int64_t kLanes = 8;
  float sums[kLanes] = {};
  float sizes[kLanes] = {};
  std::int64_t e = 0;
  for (; e + kLanes <= d; e += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const float product = a[e + lane] * b[e + lane];
      sums[lane] += product;
      sizes[lane] += std::fabs(product);
    }
  }
  Dot total;
  for (; e < d; ++e) {
    total.sum += a[e] * b[e];
    total.size += std::fabs(a[e] * b[e]);
  }
  for (std::int64_t lane = 0; lane < kLanes; ++lane) {
    total.sum += sums[lane];
    total.size += sizes[lane];
  }
  return total;
}

void add_scaled(float* to, float factor, const float* from, std::int64_t d) {
  for (std::int64_t e = 0; e < d; ++e) to[e] += factor * from[e];
}

/// Calls body(first, last) for runs of keys, each of which is summed before it is added: one chain
/// of a million float additions would be a poor yardstick.
void by_runs(const KeyRange& keys, const auto& body) {
  constexpr std::int64_t kRun = 128;
  for (std::int64_t first = keys.begin; first < keys.end; first += kRun) {
    body(first, std::min(first + kRun, keys.end));
  }
}

class PlainRun {
 public:
  explicit PlainRun(const PlainProblem& problem)
      : p_(problem),
        dtype_(p_.inputs.q.spec.dtype),
        b_(p_.inputs.q.spec.shape[0]),
        s_q_(p_.inputs.q.spec.shape[1]),
        h_q_(p_.inputs.q.spec.shape[2]),
        d_qk_(p_.inputs.q.spec.shape[3]),
        s_k_(p_.inputs.k.spec.shape[1]),
        h_k_(p_.inputs.k.spec.shape[2]),
        d_v_(p_.inputs.v.spec.shape[3]),
        rows_(static_cast<std::int64_t>(p_.rows.size())),
        scale_(static_cast<float>(
            p_.options.score.scale.value_or(1.0 / std::sqrt(static_cast<double>(d_qk_))))),
        cap_(static_cast<float>(p_.options.score.softcap)),
        q_(floats(p_.inputs.q)),
        k_(floats(p_.inputs.k)),
        v_(floats(p_.inputs.v)),
        slopes_(floats(p_.inputs.slopes)),
        sinks_(floats(p_.inputs.sinks)),
        bias_(floats(p_.inputs.bias)),
        visible_(floats(p_.inputs.visible)) {
    o_.resize(static_cast<std::size_t>(b_ * rows_ * h_q_ * d_v_));
    lse_.resize(static_cast<std::size_t>(b_ * h_q_ * rows_));
    size_.resize(lse_.size());
    ds_size_.resize(lse_.size());
    if (!backward()) return;
    d_o_ = floats(p_.given.d_o);
    d_lse_ = floats(p_.given.d_lse);
    dq_.resize(static_cast<std::size_t>(b_ * rows_ * h_q_ * d_qk_));
    dk_.resize(k_.size());
    dv_.resize(v_.size());
    d_bias_.resize(bias_.size());
    d_sinks_.resize(lse_.size());
    sink_size_.resize(lse_.size());
  }

  PlainResult run(Progress* progress) {
    // One item is all of a key/value head: nobody else adds to its dK and dV. Elements of a bias
    // may stand for several of them.
    const std::int64_t items = p_.inputs.sequences() * h_k_;
    const int most = d_bias_.empty() ? cpu::default_threads() : 1;
    std::atomic<std::int64_t> next = 0;
    std::atomic<std::int64_t> rows_done = 0;
    const double all_rows = static_cast<double>(b_ * h_q_ * rows_);
    const int workers = static_cast<int>(std::clamp<std::int64_t>(items, 1, most));
    cpu::parallel_for(workers, [&](int) {
      std::vector<Score> scores(static_cast<std::size_t>(s_k_));
      for (std::int64_t item = next++; item < items; item = next++) {
        const std::int64_t group = h_q_ / h_k_;
        const Sequence sequence = sequence_of(item / h_k_);
        const std::int64_t count = p_.inputs.varlen() ? sequence.len_q : rows_;
        for (std::int64_t head = item % h_k_ * group; head < (item % h_k_ + 1) * group; ++head) {
          for (std::int64_t r = 0; r < count; ++r) {
            row(sequence, head, r, scores);
            if (progress != nullptr) progress->update(static_cast<double>(++rows_done) / all_rows);
          }
        }
      }
    });
    return {rounded(o_, p_.o_dtype),
            rounded(lse_, DType::f32),
            rounded(dq_, dtype_),
            rounded(dk_, dtype_),
            rounded(dv_, dtype_),
            sink_sums(),
            rounded(d_bias_, DType::f32),
            size_,
            ds_size_,
            d_bias_size_,
            sink_size_.empty() ? 0.0 : *std::max_element(sink_size_.begin(), sink_size_.end())};
  }

 private:
  struct Score {
    float value;
    float slope;  ///< its derivative by the scaled product
    bool hidden;  ///< by the boolean mask or a bias of -inf
  };

  /// Sequence n, and where its rows begin among those of Q and of K.
  struct Sequence {
    std::int64_t n, first_q, len_q, first_k, len_k;
  };

  Sequence sequence_of(std::int64_t n) const {
    const Inputs& x = p_.inputs;
    const auto at = [](const Operand& integers, std::int64_t i) -> std::int64_t {
      return static_cast<const std::int32_t*>(integers.data)[i];
    };
    if (x.varlen()) {
      const std::int64_t q = at(x.cu_seqlens_q, n);
      const std::int64_t k = at(x.cu_seqlens_k, n);
      return {n, q, at(x.cu_seqlens_q, n + 1) - q, k, at(x.cu_seqlens_k, n + 1) - k};
    }
    const std::int64_t len_k = x.key_lengths.spec.present() ? at(x.key_lengths, n) : s_k_;
    return {n, n * s_q_, s_q_, n * s_k_, len_k};
  }

  struct Place {
    Sequence sequence;
    std::int64_t head, head_k, row, position;
    KeyRange keys;
    core::DropoutRule dropout;
    float sink;
    std::size_t o_at;  ///< the row of o and dq
    std::size_t lse_at;

    /// What a probability is multiplied with.
    float kept(std::int64_t j) const {
      if (!dropout.active()) return 1.0f;
      return dropout.keeps(row, j) ? static_cast<float>(dropout.scale) : 0.0f;
    }
  };

  bool backward() const { return p_.given.d_o.spec.present(); }

  /// Where a pair lies in a row-major `[b|1, h_q|1, s_q|1, s_k]`.
  static std::size_t pair_at(const Operand& operand, const Place& at, std::int64_t j) {
    const Extents& n = operand.spec.shape;
    const std::int64_t batch = n[0] == 1 ? 0 : at.sequence.n;
    const std::int64_t head = n[1] == 1 ? 0 : at.head;
    const std::int64_t row = n[2] == 1 ? 0 : at.row;
    return static_cast<std::size_t>(((batch * n[1] + head) * n[2] + row) * n[3] + j);
  }

  float bias(const Place& at, std::int64_t j) const {
    return bias_.empty() ? 0.0f : bias_[pair_at(p_.inputs.bias, at, j)];
  }
  bool hidden(const Place& at, std::int64_t j) const {
    return bias(at, j) == -kInfinity ||
           (!visible_.empty() && visible_[pair_at(p_.inputs.visible, at, j)] == 0.0f);
  }

  /// Gradients of the sinks: sums over the rows of every sequence.
  std::vector<double> sink_sums() const {
    std::vector<double> sums(backward() ? sinks_.size() : 0);
    if (sums.empty()) return sums;
    for (std::size_t i = 0; i < d_sinks_.size(); ++i) {
      sums[i / static_cast<std::size_t>(rows_) % sums.size()] += d_sinks_[i];
    }
    return sums;
  }

  void row(const Sequence& sequence, std::int64_t head, std::int64_t r,
           std::vector<Score>& scores) {
    const bool varlen = p_.inputs.varlen();
    const std::int64_t i = varlen ? r : p_.rows[static_cast<std::size_t>(r)];
    const Mask& mask = p_.options.mask;
    const bool bottom = mask.align == Align::bottom_right;
    // Outputs are [b, rows, ...]; varlen ones [1, total, ...].
    const std::int64_t outer = varlen ? 0 : sequence.n;
    const std::int64_t line = varlen ? sequence.first_q + r : r;
    const Place at{sequence,
                   head,
                   head / (h_q_ / h_k_),
                   i,
                   i + (bottom ? sequence.len_k - sequence.len_q : 0),
                   visible_keys(mask, sequence.len_q, sequence.len_k, i),
                   core::dropout_rule(p_.options.dropout, h_q_, sequence.n, head),
                   sinks_.empty() ? -kInfinity : sinks_[static_cast<std::size_t>(head)],
                   static_cast<std::size_t>((outer * rows_ + line) * h_q_ + head),
                   static_cast<std::size_t>((outer * h_q_ + head) * rows_ + line)};
    if (score_row(at, scores)) {
      softmax_row(at, scores);
    } else {
      lse_[at.lse_at] = at.sink;
    }
    if (backward()) backward_row(at, scores);
  }

  /// Whether the row sees any key.
  bool score_row(const Place& at, std::vector<Score>& scores) {
    const float* const q = q_.data() + q_row(at) * d_qk_;
    const float slope =
        slopes_.empty()
            ? 0.0f
            : slopes_[static_cast<std::size_t>(
                  (p_.inputs.slopes.spec.rank == 2 ? at.sequence.n * h_q_ : 0) + at.head)];
    float size = at.sink == -kInfinity ? 0.0f : std::fabs(at.sink);
    bool any = false;
    for (std::int64_t j = at.keys.begin; j < at.keys.end; ++j) {
      if (hidden(at, j)) {
        scores[static_cast<std::size_t>(j)] = {-kInfinity, 0.0f, true};
        continue;
      }
      any = true;
      const Dot product = dot(q, key(at, j), d_qk_);
      Score s{scale_ * product.sum, 1.0f, false};
      if (cap_ > 0.0f) {
        const float t = std::tanh(s.value / cap_);
        s = {cap_ * t, 1.0f - t * t, false};
      }
      const float alibi = slope * std::fabs(static_cast<float>(at.position - j));
      s.value = s.value - alibi + bias(at, j);
      scores[static_cast<std::size_t>(j)] = s;
      size = std::max(size,
                      std::fabs(scale_) * product.size + std::fabs(alibi) + std::fabs(bias(at, j)));
    }
    size_[at.lse_at] = size;
    return any;
  }

  void softmax_row(const Place& at, const std::vector<Score>& scores) {
    float maximum = at.sink;
    for (std::int64_t j = at.keys.begin; j < at.keys.end; ++j) {
      maximum = std::max(maximum, scores[static_cast<std::size_t>(j)].value);
    }
    float sum = at.sink == -kInfinity ? 0.0f : std::exp(at.sink - maximum);
    by_runs(at.keys, [&](std::int64_t first, std::int64_t last) {
      float part = 0.0f;
      for (std::int64_t j = first; j < last; ++j) {
        const Score& s = scores[static_cast<std::size_t>(j)];
        if (!s.hidden) part += std::exp(s.value - maximum);
      }
      sum += part;
    });
    lse_[at.lse_at] = maximum + std::log(sum);
    std::vector<float> part(static_cast<std::size_t>(d_v_));
    by_runs(at.keys, [&](std::int64_t first, std::int64_t last) {
      std::fill(part.begin(), part.end(), 0.0f);
      for (std::int64_t j = first; j < last; ++j) {
        const Score& s = scores[static_cast<std::size_t>(j)];
        if (s.hidden) continue;
        const float p = std::exp(s.value - maximum) / sum * at.kept(j);
        add_scaled(part.data(), rounded(p, dtype_), value(at, j), d_v_);
      }
      add_scaled(o_row(at), 1.0f, part.data(), d_v_);
    });
  }

  void backward_row(const Place& at, const std::vector<Score>& scores) {
    const float* const q = q_.data() + q_row(at) * d_qk_;
    const float* const d_o = d_o_.data() + q_row(at) * d_v_;
    float* const dq = dq_.data() + at.o_at * static_cast<std::size_t>(d_qk_);
    const bool varlen = p_.inputs.varlen();
    const std::int64_t lse_line = varlen ? at.sequence.first_q + at.row : at.row;
    const std::int64_t outer = varlen ? 0 : at.sequence.n;
    float d_row = -d_lse_[static_cast<std::size_t>((outer * h_q_ + at.head) * s_q_ + lse_line)];
    float d_size = 0.0f;
    for (std::int64_t e = 0; e < d_v_; ++e) {
      const float product = d_o[e] * rounded(o_row(at)[e], p_.o_dtype);
      d_row += product;
      d_size += std::fabs(product);
    }
    if (at.sink != -kInfinity) {
      const float p = std::exp(at.sink - lse_[at.lse_at]);
      d_sinks_[at.lse_at] = -double{p} * double{d_row};
      sink_size_[at.lse_at] = p * d_size;
    }
    float ds_size = 0.0f;
    std::vector<float> part(static_cast<std::size_t>(d_qk_));
    by_runs(at.keys, [&](std::int64_t first, std::int64_t last) {
      std::fill(part.begin(), part.end(), 0.0f);
      for (std::int64_t j = first; j < last; ++j) {
        const Score& s = scores[static_cast<std::size_t>(j)];
        if (s.hidden) continue;
        const float p = std::exp(s.value - lse_[at.lse_at]);
        const float kept = at.kept(j);
        const Dot dp = dot(d_o, value(at, j), d_v_);
        const float size = p * (kept * dp.size + d_size);
        ds_size = std::max(ds_size, std::fabs(scale_) * size);
        const float d_score = p * (kept * dp.sum - d_row);
        if (!d_bias_.empty()) {
          d_bias_[pair_at(p_.inputs.bias, at, j)] += d_score;
          d_bias_size_ = std::max(d_bias_size_, double{size});
        }
        const float ds = rounded(d_score * s.slope, dtype_);
        const std::int64_t k_at = k_row(at, j);
        add_scaled(part.data(), ds * scale_, key(at, j), d_qk_);
        add_scaled(dk_.data() + k_at * d_qk_, ds * scale_, q, d_qk_);
        add_scaled(dv_.data() + k_at * d_v_, rounded(p * kept, dtype_), d_o, d_v_);
      }
      add_scaled(dq, 1.0f, part.data(), d_qk_);
    });
    ds_size_[at.lse_at] = ds_size;
  }

  std::int64_t q_row(const Place& at) const {
    return (at.sequence.first_q + at.row) * h_q_ + at.head;
  }
  std::int64_t k_row(const Place& at, std::int64_t j) const {
    return (at.sequence.first_k + j) * h_k_ + at.head_k;
  }
  float* o_row(const Place& at) { return o_.data() + at.o_at * static_cast<std::size_t>(d_v_); }
  const float* key(const Place& at, std::int64_t j) const {
    return k_.data() + k_row(at, j) * d_qk_;
  }
  const float* value(const Place& at, std::int64_t j) const {
    return v_.data() + k_row(at, j) * d_v_;
  }

  const PlainProblem& p_;
  DType dtype_;
  std::int64_t b_, s_q_, h_q_, d_qk_, s_k_, h_k_, d_v_, rows_;
  float scale_, cap_;
  std::vector<float> q_, k_, v_, slopes_, sinks_, bias_, visible_, d_o_, d_lse_;
  std::vector<float> o_, lse_, dq_, dk_, dv_, d_bias_;
  std::vector<double> size_, ds_size_, d_sinks_, sink_size_;  ///< of each row
  double d_bias_size_ = 0.0;
};

}  // namespace

KeyRange visible_keys(const Mask& mask, std::int64_t s_q, std::int64_t len_k, std::int64_t row) {
  const std::int64_t position = row + (mask.align == Align::bottom_right ? len_k - s_q : 0);
  // Bounds wider than everything there is are the same as none, and do not overflow.
  const std::int64_t far = s_q + len_k;
  const std::int64_t left = std::min(mask.window.left, far);
  const std::int64_t right = mask.causal ? 0 : std::min(mask.window.right, far);
  return {std::max<std::int64_t>(position - left, 0), std::min(position + right + 1, len_k)};
}

PlainResult compute_plain(const PlainProblem& problem, Progress* progress) {
  return PlainRun(problem).run(progress);
}

}  // namespace abacist::cli
