#include "oracle.hpp"

#include "abacist/attention.hpp"
#include "plain.hpp"
#include "runner.hpp"

namespace abacist::cli {
namespace {

/// `count` entries of an axis from `begin`.
template <class Any>
Any slice(Any tensor, std::size_t axis, std::int64_t begin, std::int64_t count) {
  using Byte = std::conditional_t<std::is_same_v<Any, Tensor>, std::byte, const std::byte>;
  const std::int64_t bytes = begin * tensor.stride[axis] * size_of(tensor.dtype);
  tensor.data = static_cast<Byte*>(tensor.data) + bytes;
  tensor.shape[axis] = count;
  return tensor;
}

constexpr PlanOptions kReference{.backend = Backend::reference};

class Oracle {
 public:
  Oracle(const Inputs& inputs, const Options& options, const Operand* d_o, const Operand* d_lse,
         std::int64_t rows, bool with_dk_dv)
      : options_(options),
        q_(convert(inputs.q.in(), DType::f64)),
        k_(convert(inputs.k.in(), DType::f64)),
        v_(convert(inputs.v.in(), DType::f64)),
        slopes_(inputs.slopes.in()) {
    const Extents& q = q_.spec.shape;
    r_.o = make_operand(DType::f64, {q[0], rows, q[2], v_.spec.shape[3]});
    r_.lse = make_operand(DType::f64, {q[0], q[2], rows});
    if (d_o == nullptr) return;
    d_o_ = convert(d_o->in(), DType::f64);
    d_lse_ = d_lse->in();
    r_.dq = make_operand(DType::f64, {q[0], rows, q[2], q[3]});
    const Extents& k = k_.spec.shape;
    dk_ = make_operand(DType::f64, {k[0], k[1], k[2], k[3]});
    dv_ = make_operand(DType::f64, {k[0], k[1], k[2], v_.spec.shape[3]});
    if (with_dk_dv) {
      r_.dk = dk_;
      r_.dv = dv_;
    }
  }

  void all(Progress* progress) {
    const std::int64_t s_q = q_.spec.shape[1];
    part(0, s_q, 0, {0, k_.spec.shape[1]}, options_, progress);
  }

  void row(std::int64_t row, std::int64_t at) {
    KeyRange keys = visible_keys(options_.mask, q_.spec.shape[1], k_.spec.shape[1], row);
    if (keys.begin >= keys.end) keys = {0, 0};
    // The slice holds what the row sees and nothing else.
    part(row, 1, at, keys, {.mask = {}, .score = options_.score}, nullptr);
  }

  OracleResult result() const { return r_; }

 private:
  void part(std::int64_t row, std::int64_t count, std::int64_t at, KeyRange keys,
            const Options& options, Progress* progress) {
    const std::int64_t key_count = keys.end - keys.begin;
    const ConstTensor q = slice(q_.in(), 1, row, count);
    const ConstTensor k = slice(k_.in(), 1, keys.begin, key_count);
    const ConstTensor v = slice(v_.in(), 1, keys.begin, key_count);
    const Tensor o = slice(r_.o.out(), 1, at, count);
    const Tensor lse = slice(r_.lse.out(), 2, at, count);
    const ForwardTensors forward{
        .q = q, .k = k, .v = v, .o = o, .lse = lse, .alibi_slopes = slopes_};
    if (progress != nullptr) progress->restart("oracle, forward");
    Runner(make_problem(forward, options), kReference).run(forward, progress);
    if (!d_o_.spec.present()) return;
    const BackwardTensors backward{.q = q,
                                   .k = k,
                                   .v = v,
                                   .o = o,
                                   .lse = lse,
                                   .d_o = slice(d_o_.in(), 1, row, count),
                                   .dq = slice(r_.dq.out(), 1, at, count),
                                   .dk = slice(dk_.out(), 1, keys.begin, key_count),
                                   .dv = slice(dv_.out(), 1, keys.begin, key_count),
                                   .d_lse = slice(d_lse_, 2, row, count),
                                   .alibi_slopes = slopes_};
    if (progress != nullptr) progress->restart("oracle, backward");
    Runner(make_problem(backward, options), kReference).run(backward, progress);
  }

  Options options_;
  Operand q_, k_, v_, d_o_, dk_, dv_;
  ConstTensor slopes_, d_lse_;
  OracleResult r_;
};

}  // namespace

OracleResult run_oracle(const Inputs& inputs, const Options& options,
                        const std::vector<std::int64_t>& rows, const Operand* d_o,
                        const Operand* d_lse, Progress* progress) {
  const auto count = static_cast<std::int64_t>(rows.size());
  const bool all = count == inputs.q.spec.shape[1];
  Oracle oracle(inputs, options, d_o, d_lse, count, all);
  if (all) {
    oracle.all(progress);
    return oracle.result();
  }
  for (std::int64_t at = 0; at < count; ++at) {
    oracle.row(rows[static_cast<std::size_t>(at)], at);
    if (progress != nullptr) {
      progress->update(static_cast<double>(at + 1) / static_cast<double>(count));
    }
  }
  return oracle.result();
}

}  // namespace abacist::cli
