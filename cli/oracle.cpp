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

/// The part of a `[b|1, h_q|1, s_q|1, s_k]` that rows and keys meet.
ConstTensor slice_pairs(ConstTensor tensor, std::int64_t row, std::int64_t rows, KeyRange keys) {
  if (!tensor.present()) return tensor;
  if (tensor.shape[2] > 1) tensor = slice(tensor, 2, row, rows);
  return slice(tensor, 3, keys.begin, keys.end - keys.begin);
}

class Oracle {
 public:
  Oracle(const Inputs& inputs, const Options& options, const Gradients& given, std::int64_t rows,
         bool all)
      : options_(options), x_(inputs), all_(all) {
    for (const auto& [to, from] :
         {std::pair{&x_.q, &inputs.q}, {&x_.k, &inputs.k}, {&x_.v, &inputs.v}}) {
      *to = convert(from->in(), DType::f64);
    }
    const Extents& q = x_.q.spec.shape;
    r_.o = make_operand(DType::f64, {q[0], rows, q[2], x_.v.spec.shape[3]});
    r_.lse = make_operand(DType::f64, {q[0], q[2], rows});
    for (const Operand* output : {&r_.o, &r_.lse}) inputs.clear_gaps(*output);
    if (!given.d_o.spec.present()) return;
    made_.make(x_, DType::f64, DType::f64);
    made_.dq = make_operand(DType::f64, {q[0], rows, q[2], q[3]});
    inputs.clear_gaps(made_.dq);
    made_.d_o = convert(given.d_o.in(), DType::f64);
    made_.d_lse = given.d_lse;
    r_.gradients.dq = made_.dq;
    if (all) r_.gradients = made_;
  }

  void all(Progress* progress) {
    const std::int64_t s_q = x_.q.spec.shape[1];
    part(0, s_q, 0, {0, x_.k.spec.shape[1]}, options_, progress);
  }

  void row(std::int64_t row, std::int64_t at) {
    KeyRange keys = visible_keys(options_.mask, x_.q.spec.shape[1], x_.k.spec.shape[1], row);
    if (keys.begin >= keys.end) keys = {0, 0};
    // The slice holds what the row sees and nothing else.
    part(row, 1, at, keys, {.mask = {}, .score = options_.score}, nullptr);
  }

  OracleResult result() const { return r_; }

 private:
  void part(std::int64_t row, std::int64_t count, std::int64_t at, KeyRange keys,
            const Options& options, Progress* progress) {
    const std::int64_t key_count = keys.end - keys.begin;
    ForwardTensors forward =
        x_.forward(slice(r_.o.out(), 1, at, count), slice(r_.lse.out(), 2, at, count));
    BackwardTensors backward = x_.backward(r_.o, r_.lse, made_);
    const auto cut_inputs = [&](auto& t) {
      t.q = slice(t.q, 1, row, count);
      t.k = slice(t.k, 1, keys.begin, key_count);
      t.v = slice(t.v, 1, keys.begin, key_count);
      t.bias = slice_pairs(t.bias, row, count, keys);
      t.visible = slice_pairs(t.visible, row, count, keys);
    };
    if (!all_) cut_inputs(forward);
    if (progress != nullptr) progress->restart("oracle, forward");
    Runner(make_problem(forward, options), kReference).run(forward, progress);
    if (!made_.d_o.spec.present()) return;
    if (!all_) {
      cut_inputs(backward);
      backward.o = forward.o;
      backward.lse = forward.lse;
      backward.d_o = slice(backward.d_o, 1, row, count);
      backward.d_lse = slice(backward.d_lse, 2, row, count);
      backward.dq = slice(backward.dq, 1, at, count);
      backward.dk = slice(backward.dk, 1, keys.begin, key_count);
      backward.dv = slice(backward.dv, 1, keys.begin, key_count);
      backward.d_sinks = backward.d_bias = {};
    }
    if (progress != nullptr) progress->restart("oracle, backward");
    Runner(make_problem(backward, options), kReference).run(backward, progress);
  }

  Options options_;
  Inputs x_;
  bool all_;
  Gradients made_;  ///< dq over the sampled rows
  OracleResult r_;
};

}  // namespace

OracleResult run_oracle(const Inputs& inputs, const Options& options,
                        const std::vector<std::int64_t>& rows, const Gradients& given,
                        Progress* progress) {
  const auto count = static_cast<std::int64_t>(rows.size());
  const bool all = count == inputs.q.spec.shape[1];
  Oracle oracle(inputs, options, given, count, all);
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
