// What the forward and backward drivers share: views of one head group, work by tickets, planning.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <optional>
#include <string>

#include "core/backend.hpp"
#include "core/figures.hpp"
#include "cpu/parallel.hpp"
#include "cpu/simd/kernels.hpp"

namespace abacist::cpu {

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return a / b + (a % b > 0 ? 1 : 0);
}

/// data + elements; null, which is only where there is no element, stays null: no offset may be
/// added.
template <class T>
constexpr T* advanced(T* data, std::int64_t elements) {
  return data == nullptr ? nullptr : data + elements;
}

/// Rows of `sequence` and heads from `head` on, of a q-, k-, v- or o-shaped operand.
template <class Void>
BasicOperand<Void> view(const BasicTensor<Void>& tensor, std::int64_t sequence, std::int64_t first,
                        std::int64_t head) {
  using Byte = std::conditional_t<std::is_const_v<Void>, const std::byte, std::byte>;
  const core::RowStrides s(tensor);
  return {advanced(static_cast<Byte*>(tensor.data),
                   s.at(sequence, first, head) * size_of(tensor.dtype)),
          tensor.dtype, s.row, s.head, s.dim};
}

/// The same of an LSE-shaped operand; data is null if it is absent.
template <class Float, class Void>
BasicRowValues<Float> row_view(const BasicTensor<Void>& tensor, std::int64_t sequence,
                               std::int64_t first, std::int64_t head) {
  if (!tensor.present()) return {};
  const core::LseStrides s(tensor);
  return {advanced(static_cast<Float*>(tensor.data), s.at(sequence, head, first)), s.row, s.head};
}

/// The operands that make scores, of ForwardTensors or BackwardTensors.
struct ScoreOperands {
  ConstTensor slopes, bias, visible;

  template <class Tensors>
  explicit ScoreOperands(const Tensors& t)
      : slopes(t.alibi_slopes), bias(t.bias), visible(t.visible) {}
};

/// Score rule of one head group of one sequence.
ScoreRule score_rule(const core::Resolved& resolved, const ScoreOperands& operands,
                     std::int64_t sequence, std::int64_t head);

/// Why the CPU backend cannot serve, if so; the rules that forward and backward share.
std::optional<Error> decline(const core::Resolved& resolved);

/// Sinks of one head group; data is null if there are none.
inline HeadValues head_view(const ConstTensor& sinks, std::int64_t head) {
  if (!sinks.present()) return {};
  return {advanced(static_cast<const float*>(sinks.data), head * sinks.stride[0]), sinks.stride[0]};
}

/// Sum of visit(keys that the tile sees, rows of the tile) over the row tiles that cut packed rows
/// [first, last) of every head into pieces of `rows`. An upper bound for varlen, for key_lengths (a
/// shorter sequence never has a tile that sees more keys), and for more tiles than a plan has time
/// to walk.
template <class Visit>
Figure tile_visits(const core::Resolved& resolved, std::int64_t first, std::int64_t last,
                   std::int64_t rows, const Visit& visit) {
  constexpr std::int64_t kMostTiles = 1 << 14;  // 0.1 ms
  const core::Geometry& g = resolved.geometry;
  const core::MaskRule rule = core::mask_rule(resolved.problem.options.mask, g.s_q, g.s_k);
  if (g.varlen || ceil_div(last - first, rows) > kMostTiles) {
    const core::Interval most{0, std::min({g.s_k, g.total_k, rule.left + rule.right + rows})};
    const core::Count tiles = core::Count{ceil_div(last - first, rows)} * g.b;
    return {(tiles * g.h_k * visit(most, rows)).value, false};
  }
  core::Count sum = 0;
  for (std::int64_t r = first; r < last; r += rows) {
    const std::int64_t end = std::min(r + rows, last);
    sum = sum + visit(rule.visible_any(r / g.group, (end - 1) / g.group + 1), end - r);
  }
  return {(sum * g.kv_heads()).value, !g.key_lengths};
}

/// Bytes of the bias and boolean mask that row tiles of `rows` read, at most: of each pair that a
/// tile meets its own element, or of each key one element for the whole tile.
core::Count pair_bytes(const core::Resolved& resolved, std::int64_t first, std::int64_t last,
                       std::int64_t rows);

/// Threads of a plan whose work comes in `items` pieces.
int plan_threads(const PlanOptions& options, std::int64_t items);

/// Cuts a workspace into 256-byte aligned parts; sizes past 63 bits stop at the largest number, so
/// that no real workspace is ever large enough.
struct WorkspaceLayout {
  core::Count bytes = 0;

  /// Appends `count` elements; returns their offset.
  std::size_t reserve(core::Count count, std::int64_t size) {
    const auto offset = static_cast<std::size_t>(bytes.value);
    const core::Count wanted = count * size + 255;
    bytes = bytes + (wanted == core::Count::largest() ? wanted : wanted.value / 256 * 256);
    return offset;
  }
};

/// The part of a run's workspace at an offset of its layout.
template <class T>
T* in_workspace(const RunOptions& options, std::size_t offset) {
  return reinterpret_cast<T*>(static_cast<std::byte*>(options.workspace.data) + offset);
}

/// Counts finished items and reports their share.
class Progress {
 public:
  Progress(const RunOptions& options, std::int64_t items) : options_(options), items_(items) {}

  void finish_item() {
    if (options_.progress == nullptr) return;
    const std::int64_t done = done_.fetch_add(1, std::memory_order_relaxed) + 1;
    options_.progress(static_cast<double>(done) / static_cast<double>(items_),
                      options_.progress_context);
  }

 private:
  const RunOptions& options_;
  std::int64_t items_;
  std::atomic<std::int64_t> done_{0};
};

/// Runs body(item, worker) for items [0, count), handed out in order by a ticket counter.
template <class Body>
void for_each_ticket(std::int64_t count, int threads, const Body& body) {
  std::atomic<std::int64_t> next{0};
  const int workers = static_cast<int>(std::min<std::int64_t>(threads, count));
  parallel_for(workers, [&](int worker) {
    for (;;) {
      const std::int64_t item = next.fetch_add(1, std::memory_order_relaxed);
      if (item >= count) return;
      body(item, worker);
    }
  });
}

/// The forward pass (forward.cpp) and the backward pass (backward.cpp).
Result<core::Draft> plan_forward(const core::Resolved& resolved, const PlanOptions& options);
Status run_forward(const core::ForwardCall& call);
Result<core::Draft> plan_backward(const core::Resolved& resolved, const PlanOptions& options);
Status run_backward(const core::BackwardCall& call);

}  // namespace abacist::cpu
