// The problem in plain numbers, and where each sequence's rows lie. Shared by all backends.
#pragma once

#include <cstdint>

#include "abacist/problem.hpp"
#include "core/mask.hpp"
#include "core/saturate.hpp"

namespace abacist::core {

struct Geometry {
  bool varlen = false;
  bool key_lengths = false;  ///< dense or paged, each sequence with its own number of keys
  bool paged = false;        ///< K and V are pools of pages
  std::int64_t page_size = 0, pages = 0, max_pages = 0;
  std::int64_t b = 0;
  std::int64_t h_q = 0, h_k = 0;
  std::int64_t group = 1;         ///< h_q / h_k
  std::int64_t s_q = 0, s_k = 0;  ///< lengths; varlen: their stated maxima
  std::int64_t d_qk = 0, d_v = 0;
  std::int64_t total_q = 0, total_k = 0;  ///< rows of one head over the batch

  /// Key/value heads of the whole batch.
  std::int64_t kv_heads() const { return (Count{b} * h_k).value; }
  /// Query rows of the longest sequence, all heads of a group packed.
  std::int64_t packed_rows() const { return (Count{s_q} * group).value; }
  /// Whether lengths are data, which a plan does not read: its figures are then upper bounds.
  bool ragged() const { return varlen || key_lengths; }
};

/// A validated problem.
struct Resolved {
  Problem problem{};
  Geometry geometry{};
  double scale = 1.0;  ///< default applied

  /// Whether the data decide which keys a row sees, not indices alone.
  bool hides_by_data() const {
    return problem.operands.bias.present() || problem.operands.visible.present();
  }
  bool has_alibi() const { return problem.operands.alibi_slopes.present(); }
};

/// Strides of one operand as (sequence, row, head, dim), dense or varlen.
struct RowStrides {
  std::int64_t batch = 0, row = 0, head = 0, dim = 0;

  explicit RowStrides(const TensorSpec& spec)
      : batch(spec.rank == 4 ? spec.stride[0] : 0),
        row(spec.stride[spec.rank == 4 ? 1 : 0]),
        head(spec.stride[spec.rank == 4 ? 2 : 1]),
        dim(spec.stride[spec.rank == 4 ? 3 : 2]) {}

  std::int64_t at(std::int64_t sequence, std::int64_t r, std::int64_t h) const {
    return sequence * batch + r * row + h * head;
  }
};

/// Strides of LSE-shaped operands, `[b, h_q, s_q]` or `[h_q, total_q]`.
struct LseStrides {
  std::int64_t batch = 0, head = 0, row = 0;

  explicit LseStrides(const TensorSpec& spec)
      : batch(spec.rank == 3 ? spec.stride[0] : 0),
        head(spec.stride[spec.rank == 3 ? 1 : 0]),
        row(spec.stride[spec.rank == 3 ? 2 : 1]) {}

  std::int64_t at(std::int64_t sequence, std::int64_t h, std::int64_t r) const {
    return sequence * batch + h * head + r * row;
  }
};

/// Strides of a `[b|1, h_q|1, s_q|1, s_k]` operand: 0 along an axis of 1, which stands for all.
struct PairStrides {
  std::int64_t batch = 0, head = 0, row = 0, key = 0;

  explicit PairStrides(const TensorSpec& spec)
      : batch(spec.shape[0] == 1 ? 0 : spec.stride[0]),
        head(spec.shape[1] == 1 ? 0 : spec.stride[1]),
        row(spec.shape[2] == 1 ? 0 : spec.stride[2]),
        key(spec.stride[3]) {}

  std::int64_t at(std::int64_t sequence, std::int64_t h, std::int64_t i, std::int64_t j) const {
    return sequence * batch + h * head + i * row + j * key;
  }
};

/// One sequence pair: its rows in the tensors. Dense: rows [0, s) of batch entry `index`; varlen:
/// rows [first, first + len) of the packed tensor (whose batch stride is 0). With key_lengths,
/// len_k is the sequence's own.
struct Sequence {
  std::int64_t index = 0;
  std::int64_t first_q = 0, first_k = 0;
  std::int64_t len_q = 0, len_k = 0;
};

/// The arrays that say how long each sequence is, null where absent.
struct Lengths {
  const std::int32_t* cu_q = nullptr;
  const std::int32_t* cu_k = nullptr;
  const std::int32_t* keys = nullptr;

  /// Of ForwardTensors or BackwardTensors in host memory.
  template <class Tensors>
  static Lengths of(const Tensors& t) {
    const auto ints = [](const ConstTensor& x) { return static_cast<const std::int32_t*>(x.data); };
    return {ints(t.cu_seqlens_q), ints(t.cu_seqlens_k), ints(t.key_lengths)};
  }
};

inline Sequence sequence_at(const Geometry& g, const Lengths& lengths, std::int64_t index) {
  const auto& [cu_q, cu_k, keys] = lengths;
  Sequence s{index, 0, 0, g.s_q, g.s_k};
  if (g.varlen) {
    s.first_q = cu_q[index];
    s.len_q = cu_q[index + 1] - s.first_q;
  }
  if (g.key_lengths) {
    s.len_k = keys[index];
  } else if (g.varlen) {
    s.first_k = cu_k[index];
    s.len_k = cu_k[index + 1] - s.first_k;
  }
  return s;
}

}  // namespace abacist::core
