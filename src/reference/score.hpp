// From q.k to the score, pair by pair, and who sees whom: the parts of a problem that data decide.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/dropout.hpp"
#include "core/geometry.hpp"
#include "core/numeric.hpp"
#include "reference/visibility.hpp"

namespace abacist::reference {

/// Element (i, j) of one head of one sequence of a `[b|1, h_q|1, s_q|1, s_k]` operand.
class PairReader {
 public:
  PairReader(const ConstTensor& tensor, std::int64_t sequence, std::int64_t head)
      : tensor_(tensor) {
    if (!tensor.present()) return;
    const auto stride = [&](std::size_t axis) {
      return tensor.shape[axis] > 1 ? tensor.stride[axis] : 0;
    };
    base_ = sequence * stride(0) + head * stride(1);
    row_ = stride(2);
  }

  bool present() const { return tensor_.present(); }
  std::int64_t at(std::int64_t i, std::int64_t j) const {
    return base_ + i * row_ + j * tensor_.stride[3];
  }
  double operator()(std::int64_t i, std::int64_t j) const {
    return core::load_element(tensor_.data, tensor_.dtype, at(i, j));
  }

 private:
  const ConstTensor& tensor_;
  std::int64_t base_ = 0, row_ = 0;
};

/// Where the keys of one sequence lie in a pool of pages.
class PageReader {
 public:
  PageReader(const core::Geometry& g, const ConstTensor& table, std::int64_t sequence)
      : geometry_(g), table_(table), sequence_(sequence) {}

  std::int64_t page(std::int64_t j) const {
    return static_cast<const std::int32_t*>(
        table_.data)[sequence_ * table_.stride[0] + j / geometry_.page_size];
  }
  bool valid(std::int64_t j) const {
    return !geometry_.paged || (page(j) >= 0 && page(j) < geometry_.pages);
  }

 private:
  const core::Geometry& geometry_;
  const ConstTensor& table_;
  std::int64_t sequence_;
};

/// The block table of either pass; the backward pass has none.
inline const ConstTensor& table_of(const ForwardTensors& t) { return t.block_table; }
inline const ConstTensor& table_of(const BackwardTensors&) {
  static const ConstTensor kNone;
  return kNone;
}

/// The score of each pair of one head of one sequence, and whether the pair sees each other.
class ScoreRule {
 public:
  template <class Tensors>
  ScoreRule(const core::Resolved& resolved, const Tensors& t, const core::Sequence& sequence,
            std::int64_t head)
      : visible_(resolved.problem.options.mask, sequence.len_q, sequence.len_k),
        scale_(resolved.scale),
        cap_(resolved.problem.options.score.softcap),
        bias_(t.bias, sequence.index, head),
        mask_(t.visible, sequence.index, head),
        pages_(resolved.geometry, table_of(t), sequence.index),
        dropout_(core::dropout_rule(resolved.problem.options.dropout, resolved.geometry.h_q,
                                    sequence.index, head)) {
    const ConstTensor& slopes = t.alibi_slopes;
    if (!slopes.present()) return;
    const std::int64_t at = slopes.rank == 1
                                ? head * slopes.stride[0]
                                : sequence.index * slopes.stride[0] + head * slopes.stride[1];
    slope_ = core::load_element(slopes.data, slopes.dtype, at);
    has_slope_ = true;
  }

  struct Value {
    double score;
    double slope;  ///< of the score by the scaled product
  };

  Value operator()(double product, std::int64_t i, std::int64_t j) const {
    Value value{scale_ * product, 1.0};
    if (cap_ > 0.0) {
      const double t = std::tanh(value.score / cap_);
      value = {cap_ * t, 1.0 - t * t};
    }
    if (has_slope_) value.score -= slope_ * std::abs(static_cast<double>(visible_.distance(i, j)));
    if (bias_.present()) value.score += bias_(i, j);
    return value;
  }

  bool sees(std::int64_t i, std::int64_t j) const {
    if (!visible_.sees(i, j) || !pages_.valid(j)) return false;
    if (mask_.present() && mask_(i, j) == 0.0) return false;
    return !bias_.present() || bias_(i, j) != -std::numeric_limits<double>::infinity();
  }

  /// What dropout multiplies the probability with: 0 or 1 / (1 - p).
  double kept(std::int64_t i, std::int64_t j) const {
    if (!dropout_.active()) return 1.0;
    return dropout_.keeps(i, j) ? dropout_.scale : 0.0;
  }

  double scale() const { return scale_; }

 private:
  Visibility visible_;
  double scale_;
  double cap_;
  PairReader bias_, mask_;
  PageReader pages_;
  core::DropoutRule dropout_;
  double slope_ = 0.0;
  bool has_slope_ = false;
};

}  // namespace abacist::reference
