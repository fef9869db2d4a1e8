// One attention problem with its data, run on any backend, with everything around it poisoned.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "abacist/abacist.hpp"
#include "support/buffer.hpp"

namespace abacist::testing {

/// What the numbers look like.
struct Data {
  double query_key_std = 1.0;  ///< standard deviation of Q and K
  double v_mean = 0.0;
  double v_std = 1.0;
  double bias_std = 1.0;
  double hidden = 0.3;  ///< share of the pairs that a boolean mask hides; a bias half of that
};

/// A problem in plain numbers. Dense unless lens_q is given.
struct Case {
  std::int64_t b = 1, h_k = 1, group = 1;
  std::int64_t s_q = 16, s_k = 16, d_qk = 16, d_v = 16;
  std::vector<std::int64_t> lens_q{}, lens_k{};  ///< varlen: lengths of the sequences
  std::int64_t slack_q = 0, slack_k = 0;         ///< varlen: rows past cu[b]
  DType dtype = DType::f32;
  DType o_dtype = DType::f32;
  DType grad_dtype = DType::f32;
  Options options{};
  int alibi_rank = 0;  ///< 0: no slopes, 1: [h_q], 2: [b, h_q]
  bool d_lse = false;
  /// A bias or boolean mask [b|1, h_q|1, s_q|1, s_k]: which of the first three axes are whole.
  struct Pairs {
    bool present = false, b = true, h = true, s = true;
  };
  Pairs bias{}, visible{};
  bool sinks = false;                       ///< a logit per head, and its gradient
  std::vector<std::int64_t> key_lengths{};  ///< dense: keys of each sequence, at most s_k
  std::int64_t page_size = 0;  ///< with key_lengths, forward only: K and V in pages; 0: not
  Layout layout{};
  Data data{};
  std::uint64_t stream = 0;  ///< of the random data

  bool varlen() const { return !lens_q.empty(); }
  std::int64_t h_q() const { return h_k * group; }
  std::int64_t total_q() const;  ///< rows of the q tensor over the batch, slack included
  std::int64_t total_k() const;
  std::int64_t sequences() const;
  std::int64_t len_q(std::int64_t sequence) const;
  std::int64_t len_k(std::int64_t sequence) const;
  std::string text() const;
};

/// The case with inputs, outputs and gradients of one type.
inline Case typed(Case c, DType dtype) {
  c.dtype = c.o_dtype = c.grad_dtype = dtype;
  return c;
}

struct Results {
  Buffer o, lse;
};
struct Gradients {
  Buffer dq, dk, dv, d_sinks, d_bias;
};

struct Both {
  Results results;
  Gradients gradients;
};

/// The inputs of a case. Buffers may be replaced or changed before running.
struct Instance {
  explicit Instance(const Case& c);

  Case c;
  Buffer q, k, v, slopes, bias, visible, sinks, d_o, d_lse, cu_q, cu_k, key_lengths;
  Buffer k_pages, v_pages, block_table;  ///< of a paged case; k and v hold the same keys

  /// Spreads k and v over pages in random order. What no sequence needs is poisoned: rows past the
  /// lengths, pages without an owner, table entries past the last page.
  void make_pages();

  /// NaN-filled buffers to write to; `dtype` f64 for the oracle.
  Results make_results(DType o_dtype, DType lse_dtype = DType::f32, Layout layout = {}) const;
  Gradients make_gradients(DType dtype, Layout layout = {}) const;

  ForwardTensors tensors(Results& results) const;
  BackwardTensors tensors(const Results& results, Gradients& gradients) const;

  /// Runs, with a poisoned workspace of exactly the planned size, and checks that nothing but the
  /// outputs' elements has changed. Errors are test failures.
  void forward(Results& results, const PlanOptions& plan_options = {}) const;
  void backward(const Results& results, Gradients& gradients,
                const PlanOptions& plan_options = {}) const;

  /// Forward, then backward from its results, into fresh buffers of the case's types.
  Both run_both(const PlanOptions& plan_options = {.backend = Backend::cpu}) const;

  /// The oracle: float64 results and gradients, of the same inputs.
  Results reference_forward() const;
  Gradients reference_backward(const Results& float64_results) const;
};

/// Plans and runs with a poisoned workspace that is exactly as large as planned; fails the test if
/// the run writes around it.
template <class Tensors>
Status run_poisoned(const Tensors& tensors, const Options& options,
                    const PlanOptions& plan_options);

extern template Status run_poisoned(const ForwardTensors&, const Options&, const PlanOptions&);
extern template Status run_poisoned(const BackwardTensors&, const Options&, const PlanOptions&);

}  // namespace abacist::testing
