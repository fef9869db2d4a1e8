// What is to be computed: operands, geometry, mask and score, each part optional but the operands.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include "abacist/status.hpp"
#include "abacist/tensor.hpp"

namespace abacist {

enum class Pass : std::uint8_t { forward, backward };

/// A window side without a bound.
inline constexpr std::int64_t kUnbounded = std::numeric_limits<std::int64_t>::max();

/// Where query 0 stands among the keys: `shift = len_k - len_q` (bottom_right: the last query sees
/// the last key) or 0 (top_left: query 0 stands at key 0).
enum class Align : std::uint8_t { bottom_right, top_left };

/// Query i sees key j only if `i + shift - left <= j <= i + shift + right`; both inclusive, >= 0 or
/// kUnbounded. Both bounds always apply.
struct Window {
  std::int64_t left = kUnbounded;
  std::int64_t right = kUnbounded;
  bool operator==(const Window&) const = default;
};

/// Which keys a query sees. `causal` caps `window.right` at 0.
struct Mask {
  bool causal = false;
  Window window{};
  Align align = Align::bottom_right;
  bool operator==(const Mask&) const = default;
};

/// How a score is made of q·k: `scale`, then softcap, then ALiBi and the additive bias (if they are
/// operands; neither is scaled).
struct Score {
  /// Any number finite in float, zero and negative included; default 1/sqrt(d_qk). Backends want 0
  /// or at least 2^-126 in size, the CUDA backend also at most 2^127, here and below, and its scale
  /// / softcap 0 or from 2^-127 to 2^126 in size.
  std::optional<double> scale{};
  /// `cap * tanh(s / cap)`; 0 means none, else finite and > 0.
  double softcap = 0.0;
  bool operator==(const Score&) const = default;
};

/// Dropout of probabilities: O = (M o P / (1 - p)) V, LSE stays that without. M is a pure function
/// of (seed, sequence, query head, query, key), the same on every backend and in both passes
/// (docs/contract.md has the bits). The sink is never dropped.
struct Dropout {
  double p = 0.0;  ///< in [0, 1]; 1 gives O = 0
  std::uint64_t seed = 0;
  bool operator==(const Dropout&) const = default;
};

/// Bounds of the lengths in a varlen problem, required there (the default 0 admits only empty
/// sequences); ignored otherwise.
struct MaxLengths {
  std::int64_t s_q = 0;
  std::int64_t s_k = 0;
  bool operator==(const MaxLengths&) const = default;
};

/// Everything but the data and the shapes.
struct Options {
  Mask mask{};
  Score score{};
  MaxLengths max_lengths{};
  Dropout dropout{};
  bool operator==(const Options&) const = default;
};

/// Specs of the operands. Dense `[b, s, h, d]`; varlen `[total, h, d]` with cu_seqlens present.
/// Which ones a pass needs, and their shapes: see ForwardTensors and BackwardTensors.
struct Operands {
  TensorSpec q, k, v, o, lse;
  TensorSpec d_o, d_lse, dq, dk, dv;
  TensorSpec alibi_slopes;
  TensorSpec bias, d_bias, visible;
  TensorSpec sinks, d_sinks;
  TensorSpec cu_seqlens_q, cu_seqlens_k;
  TensorSpec key_lengths;
  TensorSpec block_table;
  bool operator==(const Operands&) const = default;
};

struct Problem {
  Pass pass = Pass::forward;
  Operands operands{};
  Options options{};
  bool operator==(const Problem&) const = default;
};

/// Operands of the forward pass. q, k and v share one dtype (f32, bf16 or f16; the reference
/// backend takes f64 and mixtures, too). h_q % h_k == 0; query head h uses key/value head
/// h / (h_q / h_k).
struct ForwardTensors {
  ConstTensor q;  ///< [b, s_q, h_q, d_qk], varlen [total_q, h_q, d_qk]
  ConstTensor k;  ///< [b, s_k, h_k, d_qk], varlen [total_k, h_k, d_qk]
  ConstTensor v;  ///< [b, s_k, h_k, d_v],  varlen [total_k, h_k, d_v]
  Tensor o;       ///< [b, s_q, h_q, d_v],  varlen [total_q, h_q, d_v]; dtype of q, or f32
  Tensor lse{};   ///< optional; f32 [b, h_q, s_q], varlen [h_q, total_q]; natural logarithm
  ConstTensor alibi_slopes{};  ///< optional; f32 [h_q] or [b, h_q]; adds -slope * |i + shift - j|
  ConstTensor cu_seqlens_q{};  ///< varlen only: i32 [b + 1], contiguous; starts with 0, ascending;
                               ///< Options::max_lengths must bound the lengths
  ConstTensor cu_seqlens_k{};  ///< varlen only: i32 [b + 1], contiguous
  /// optional; f32 [h_q]: a raw logit per head (not scaled, capped or biased; -inf: none) whose exp
  /// joins the denominator once. LSE includes it; a row that sees no key has LSE = sink. Partial
  /// results for `merge` carry no sink: give it to `merge`.
  ConstTensor sinks{};
  /// dense or paged K and V, optional; i32 [b], contiguous: sequence n has keys [0, key_lengths[n])
  /// of its s_k; what lies beyond is never read. The bottom-right alignment uses these lengths.
  ConstTensor key_lengths{};
  /// optional; [b|1, h_q|1, s_q|1, s_k], f32 or the dtype of q: added to the score. An axis of 1
  /// stands for all. -inf hides the key exactly as a false in `visible` does; NaN and +inf make the
  /// row NaN; a finite number, however negative, hides nothing. In a varlen problem s_q and s_k are
  /// Options::max_lengths, and rows and keys count from their sequence's first.
  ConstTensor bias{};
  /// optional; u8, shaped as bias: the query sees the key only where this is not 0 (on top of
  /// Options::mask).
  ConstTensor visible{};
  /// optional: K and V are pools of pages, k [pages, page_size, h_k, d_qk] and v [pages, page_size,
  /// h_k, d_v], and key j of sequence n is row j % page_size of page block_table[n, j / page_size].
  /// i32 [b, max_pages], contiguous rows; key_lengths is required, s_k = max_pages * page_size
  /// bounds it. q is dense, or varlen with cu_seqlens_q alone. Entries of pages that no query of
  /// the sequence sees a key of are never read. Keys of a page whose id is outside [0, pages) are
  /// skipped, as if hidden, and Plan::device_status tells, for tensors on the host, too; on the
  /// host the one-line forward() returns what it tells.
  ConstTensor block_table{};
};

/// Operands of the backward pass: the forward's inputs and results, the gradient of the loss by O
/// (and by LSE), and the gradients to write. dq, dk and dv have the shapes of q, k and v, and their
/// dtype or f32.
struct BackwardTensors {
  ConstTensor q, k, v;
  ConstTensor o;    ///< as written by the forward pass
  ConstTensor lse;  ///< as written by the forward pass; required
  ConstTensor d_o;  ///< shape of o, dtype of q or f32
  Tensor dq, dk, dv;
  ConstTensor d_lse{};  ///< optional; shape of lse, f32
  ConstTensor alibi_slopes{};
  ConstTensor cu_seqlens_q{}, cu_seqlens_k{};
  ConstTensor sinks{};        ///< as in the forward pass
  ConstTensor key_lengths{};  ///< as in the forward pass; dk and dv beyond a length are set to 0
  Tensor d_sinks{};           ///< optional, with sinks; f32 [h_q]: -sum of exp(sink - LSE) D over
                              ///< all rows, D = rowsum(dO o O) - dLSE
  ConstTensor bias{};         ///< as in the forward pass
  ConstTensor visible{};      ///< as in the forward pass
  Tensor d_bias{};  ///< optional, with bias; shape of bias, f32: the gradient of the scores
                    ///< after softcap, summed over the axes of 1
};

/// The problem that a set of tensors poses.
ABACIST_API Problem make_problem(const ForwardTensors& tensors, const Options& options = {});
ABACIST_API Problem make_problem(const BackwardTensors& tensors, const Options& options = {});

/// Checks every rule that does not need the data; the error names the argument, what it was and
/// what it must be. `plan` calls it first.
ABACIST_API Status validate(const Problem& problem);

}  // namespace abacist
