// The boundary between the drivers (compiled once) and the kernels (compiled per instruction set).
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "abacist/tensor.hpp"
#include "core/dropout.hpp"
#include "core/mask.hpp"
#include "cpu/row_state.hpp"
#include "cpu/simd/target.hpp"

namespace abacist::cpu {

/// The block table of one sequence: row j of K or V is row j % size of page ids[j / size]. Null
/// ids: rows lie one after the other.
struct Pages {
  const std::int32_t* ids = nullptr;
  std::int64_t size = 1;
  std::int64_t stride = 0;  ///< elements from one page to the next
  std::int64_t count = 0;   ///< pages of the pool; ids outside are invalid
  core::Interval seen{};    ///< rows that some query sees; others are not read
};

/// One head group of one sequence of an operand: element (row i, head g of the group, dim c) lies
/// at data[i * row + g * head + c * dim], of a paged one at its page's offset more.
template <class Void>
struct BasicOperand {
  Void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t row = 0, head = 0, dim = 0;
  Pages pages{};
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
using RowStates = BasicRowValues<RowState>;

/// A float per head of a group: sinks. Null data: none.
struct HeadValues {
  const float* data = nullptr;
  std::int64_t stride = 0;

  float at(std::int64_t g) const { return data[g * stride]; }
};

/// One head group of one sequence of a bias or boolean mask: element (row i, head g, key j) lies at
/// data[i * row + g * head + j * key], j < keys. Null data: none.
struct PairOperand {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t row = 0, head = 0, key = 0;
  std::int64_t keys = 0;
};

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
  PairOperand bias;     ///< added, in natural units; -inf hides
  PairOperand visible;  ///< u8; 0 hides; may join a plain rule
  PairOperand valid;    ///< u8 for each key, where the sequence has invalid pages; as visible

  bool has_pairs() const {
    return bias.data != nullptr || visible.data != nullptr || valid.data != nullptr;
  }

  /// `added`: slopes or a bias will be. Precondition: scale finite in float.
  static ScoreRule make(double scale, double softcap, bool added);
};

/// Head dimensions at most.
inline constexpr int kMaxHeadDim = 512;

/// Panels of a tile at most: kernels keep an array of what each panel sees.
inline constexpr int kMaxPanels = 64;

/// Tile sizes of a run; a function of the problem and the instruction set alone.
struct Tiles {
  int rows = 0;  ///< query rows (packed: i * group + g), a multiple of panel_rows, at most
                 ///< kMaxPanels of them
  int keys = 0;  ///< keys of a block, a multiple of key_step
};

/// One work item of the forward pass: query rows [first_row, last_row) of one key/value head
/// against keys [first_key, last_key).
struct ForwardTask {
  Operand q, k, v;  ///< k and v: head 0 of the operand is the group's key/value head
  Output o;
  RowOutput lse;  ///< data null: not wanted
  HeadValues sinks;
  /// Of a key split: where rows leave their state, and O stays undivided; sinks and LSE are the
  /// merge's then. Data null: the item sees all keys.
  RowStates states;
  core::DropoutRule dropout;  ///< of the group's first head
  core::MaskRule rule;
  ScoreRule score;
  std::int64_t group = 1;
  /// More than 1: the heads of that many key/value heads are one group, whose rows are all of the
  /// item's, one panel at most; head g reads key/value head g / (group / kv_heads) of k and v.
  std::int64_t kv_heads = 1;
  std::int64_t d_qk = 0, d_v = 0;
  std::int64_t first_row = 0, last_row = 0;
  std::int64_t first_key = 0, last_key = 0;  ///< first_key is a multiple of tiles.keys
  Tiles tiles;
  /// Every block of the head's keys as `pack_keys` left it; null: the item packs them itself.
  const float* packed_keys = nullptr;
};

/// Where the gradient of a bias goes: element (row i, head g, key j) of the head group adds to
/// data[i * row + g * head + j * key], strides being 0 along axes that are summed. Items that add
/// to the same elements do so one after the other, in an order that the problem fixes.
struct BiasGradient {
  float* data = nullptr;  ///< null: not wanted
  std::int64_t row = 0, head = 0, key = 0;
  bool rows_summed = false;
  bool rows_split = false;  ///< heads of one query row may lie in two row tiles
  /// [tiles], of this key block: who has added last; null if no other item adds to these elements.
  std::int64_t* turns = nullptr;
  std::int64_t tiles = 0;            ///< row tiles of the longest sequence; 1 if rows_summed
  std::int64_t before = 0, own = 0;  ///< what `turns` holds before and after this item's addition
};

/// When a key block adds its part of dQ to a row tile.
struct DqTurn {
  std::int64_t chain = 0;
  int number = 0;     ///< blocks of the chain before it that the tile sees
  bool last = false;  ///< no later block of any chain adds
};

/// What all items of one key/value head of one sequence share in the backward pass. Rows are
/// packed, r = i * group + g; a row tile is `tiles.rows` of them.
struct BackwardHead {
  Operand q, k, v, o, d_o;
  Output dq, dk, dv;
  RowValues lse, d_lse;  ///< d_lse: data null if absent
  HeadValues sinks;      ///< data null unless their gradient is wanted
  BiasGradient d_bias;
  core::DropoutRule dropout;  ///< of the group's first head
  core::MaskRule rule;
  ScoreRule score;
  float scale = 1.0f;
  std::int64_t group = 1;
  std::int64_t d_qk = 0, d_v = 0;
  std::int64_t rows = 0;  ///< packed rows
  Tiles tiles;
  std::int64_t chains = 1;  ///< key block b adds its dQ in chain b % chains
  // In the workspace, over row tiles:
  float* lse_base2 = nullptr;   ///< [row tiles][tiles.rows]; +inf for a row that sees no key
  float* d = nullptr;           ///< [row tiles][tiles.rows]; D = rowsum(dO o O) - dLSE
  float* dq_sum = nullptr;      ///< [row tiles][panels][d_qk][panel_rows], of the first chain
  std::int64_t dq_chain = 0;    ///< floats from one chain's dq_sum to the next one's
  int* turns = nullptr;         ///< [row tiles][chains]; key blocks that have added their dQ
  double* sink_sums = nullptr;  ///< [row tiles][group]; sums of -exp(sink - LSE) D; with sinks

  std::int64_t row_tiles() const { return (rows + tiles.rows - 1) / tiles.rows; }
  /// Key blocks that some row of the tile sees: [begin, end).
  core::Interval key_blocks(std::int64_t row_tile) const {
    const std::int64_t first = row_tile * tiles.rows;
    const std::int64_t last = first + tiles.rows < rows ? first + tiles.rows : rows;
    const core::Interval seen = rule.visible_any(first / group, (last - 1) / group + 1);
    if (seen.empty()) return {0, 0};
    return {seen.begin / tiles.keys, (seen.end + tiles.keys - 1) / tiles.keys};
  }
  DqTurn dq_turn(std::int64_t key_block, std::int64_t row_tile) const {
    const core::Interval blocks = key_blocks(row_tile);
    return {key_block % chains, static_cast<int>((key_block - blocks.begin) / chains),
            key_block + 1 == blocks.end};
  }
  float* dq_sum_of(std::int64_t chain, std::int64_t row_tile) const {
    return dq_sum + chain * dq_chain + row_tile * tiles.rows * d_qk;
  }
};

struct Kernels {
  Target target;
  int panel_rows;  ///< query rows that a register tile spans
  int key_step;    ///< keys (or head dims) that a register tile spans
  int few_rows;    ///< packed rows of a head up to which heads may share an item (kv_heads)
  std::size_t (*forward_scratch_bytes)(const Tiles&, std::int64_t d_qk, std::int64_t d_v);
  void (*forward)(const ForwardTask&, std::byte* scratch);
  /// Floats of a packed block of K and V.
  std::size_t (*packed_floats)(const Tiles&, std::int64_t d_qk, std::int64_t d_v);
  /// Packs keys [block * tiles.keys, ...) of the task's head; `packed` is aligned to 64 bytes.
  void (*pack_keys)(const ForwardTask&, std::int64_t block, float* packed);
  /// `group_of_row_sums`: heads of a group if a bias gradient is summed over rows, else 0.
  std::size_t (*backward_scratch_bytes)(const Tiles&, std::int64_t d_qk, std::int64_t d_v,
                                        std::int64_t group_of_row_sums);
  /// Before any item of the head: lse_base2, d and turns of one row tile; dQ = 0 if it sees no key.
  void (*backward_prepare)(const BackwardHead&, std::int64_t row_tile, std::byte* scratch);
  /// dK and dV of one key block, and its part of dQ. For each row tile it waits for its turn: dQ is
  /// summed in ascending order of key blocks, whatever the threads do.
  void (*backward)(const BackwardHead&, std::int64_t key_block, std::byte* scratch);
  /// After all items of the head, where it has several chains: adds them, and writes dQ of one row
  /// tile.
  void (*backward_finish)(const BackwardHead&, std::int64_t row_tile);
  /// `steps` FMAs on each of a full set of accumulators, in registers; returns the FLOPs.
  std::int64_t (*fma_burst)(std::int64_t steps, float* sink);
};

/// Null if not built for this processor family.
const Kernels* kernels(Target target);

}  // namespace abacist::cpu
