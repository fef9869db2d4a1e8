// The boundary between the drivers (compiled once) and the kernels (compiled per instruction set).
#pragma once

#include <cstddef>
#include <cstdint>

#include "abacist/tensor.hpp"
#include "core/mask.hpp"
#include "cpu/simd/target.hpp"

namespace abacist::cpu {

/// One head group of one sequence of an operand: element (row i, head g of the group, dim c) lies at
/// data[i * row + g * head + c * dim].
template <class Void>
struct BasicOperand {
  Void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t row = 0, head = 0, dim = 0;
};
using Operand = BasicOperand<const void>;
using Output = BasicOperand<void>;

/// A float per (row i, head g): LSE and its like.
template <class Float>
struct BasicRowValues {
  Float* data = nullptr;
  std::int64_t row = 0, head = 0;

  Float& at(std::int64_t i, std::int64_t g) const { return data[i * row + g * head]; }
};
using RowValues = BasicRowValues<const float>;
using RowOutput = BasicRowValues<float>;

/// How scores are made from q.k, in base-2 units (times log2 e) so that exp2 serves.
struct ScoreRule {
  /// Q is multiplied by this when it is packed; |prescale| <= 1, so it cannot overflow.
  float prescale = 1.0f;
  /// No step between q.k and exp2: prescale holds scale * log2 e. Otherwise the steps below follow.
  bool plain = true;
  float postscale = 1.0f;  ///< scale / prescale
  float softcap = 0.0f;    ///< natural units; 0: none
  /// ALiBi slopes of the group's heads, or null; -slope * |i + shift - j|.
  const float* slopes = nullptr;
  std::int64_t slopes_stride = 0;

  /// Precondition: scale finite in float.
  static ScoreRule make(double scale, double softcap, bool alibi);
};

/// Tile sizes of a run; a function of the problem and the instruction set alone.
struct Tiles {
  int rows = 0;  ///< query rows (packed: i * group + g), a multiple of panel_rows
  int keys = 0;  ///< keys of a block, a multiple of key_step
};

/// One work item of the forward pass: query rows [first_row, last_row) of one key/value head against
/// keys [first_key, last_key).
struct ForwardTask {
  Operand q, k, v;  ///< k and v: head 0 of the operand is the group's key/value head
  Output o;
  RowOutput lse;    ///< data null: not wanted
  core::MaskRule rule;
  ScoreRule score;
  std::int64_t group = 1;
  std::int64_t d_qk = 0, d_v = 0;
  std::int64_t first_row = 0, last_row = 0;
  std::int64_t first_key = 0, last_key = 0;
  Tiles tiles;
};

/// One work item of the backward pass: all query rows of one key/value head against keys
/// [first_key, last_key).
struct BackwardTask;

struct Kernels {
  Target target;
  int panel_rows;  ///< query rows that a register tile spans
  int key_step;    ///< keys (or head dims) that a register tile spans
  std::size_t (*forward_scratch_bytes)(const Tiles&, std::int64_t d_qk, std::int64_t d_v);
  void (*forward)(const ForwardTask&, std::byte* scratch);
};

/// Null if not built for this processor family.
const Kernels* kernels(Target target);

}  // namespace abacist::cpu
