// Backward pass on the CPU: planning, and the two stages of a run.
//
// Stage one, per row tile: D = rowsum(dO o O) - dLSE, LSE in base-2 units. Stage two, per key
// block: dK, dV, and its part of dQ, which is summed in workspace in ascending order of key blocks
// (see simd/backward-inl.h). Items go out key block by key block over all heads, so that an item's
// predecessor in the same head has long started; the bits do not depend on the thread count.
#include <algorithm>

#include "core/figures.hpp"
#include "core/numeric.hpp"
#include "cpu/driver.hpp"

namespace abacist::cpu {
namespace {

using core::Count;

/// Which items add to the same elements of a bias gradient: those of all sequences, or heads, or
/// both. Each set of elements has a table of turns, [key blocks][row tiles].
struct BiasTurns {
  bool wanted = false, over_batch = false, over_heads = false, over_rows = false;
  std::int64_t blocks = 0, tiles = 0;

  BiasTurns() = default;
  BiasTurns(const TensorSpec& d_bias, const core::Geometry& g, const Tiles& t)
      : wanted(d_bias.present() && g.group > 0) {  // else no row adds to it
    if (!wanted) return;
    over_batch = d_bias.shape[0] == 1 && g.b > 1;
    over_heads = d_bias.shape[1] == 1 && g.h_k > 1;
    over_rows = d_bias.shape[2] == 1;
    blocks = ceil_div(g.s_k, t.keys);
    tiles = over_rows ? 1 : ceil_div(g.packed_rows(), t.rows);
  }

  bool shared() const { return over_batch || over_heads; }
  Count count(const core::Geometry& g) const {
    if (!shared()) return 0;
    return Count{over_batch ? 1 : g.b} * (over_heads ? 1 : g.h_k) * blocks * tiles;
  }
};

struct BackwardChoices {
  const Kernels* kernels = nullptr;
  Tiles tiles{};
  std::int64_t chains = 1;        ///< of a head's key blocks, in which they add to dQ
  Count dq_chain = 0;             ///< floats of one chain's sums, over all heads
  std::size_t scratch_bytes = 0;  ///< per thread
  // Offsets in the workspace.
  std::size_t lse_offset = 0, d_offset = 0, dq_offset = 0, turns_offset = 0, index_offset = 0;
  std::size_t sinks_offset = 0, bias_turns_offset = 0;
  BiasTurns bias;
};

/// Fewer items than this leave threads of a large machine idle.
constexpr std::int64_t kEnoughItems = 128;

/// Tile sizes: what an item keeps per key (K twice, V, dK and dV) stays in L2 up to 640 KiB. Every
/// key block packs all rows that see it anew, so large blocks pay: 256 keys instead of 128 gain 8%
/// at d 64 and d 128 (Zen 4). Two panels of rows halve the traffic of dK and dV, four of narrow
/// ones.
Tiles choose_tiles(const Kernels& kernels, const core::Geometry& g, bool invariant) {
  const std::int64_t packed = g.packed_rows();
  const std::int64_t panel = kernels.panel_rows;
  const std::int64_t step = kernels.key_step;
  std::int64_t panels = panel >= 24 ? 2 : 4;
  if (g.d_qk + g.d_v > 512) panels /= 2;
  if (!invariant) panels = std::clamp<std::int64_t>(ceil_div(packed, panel), 1, panels);
  std::int64_t keys = std::clamp<std::int64_t>(163840 / (3 * g.d_qk + 2 * g.d_v), 32, 256);
  const Count heads = g.kv_heads();
  if (!invariant) {
    while (keys > 128 && (heads * ceil_div(g.s_k, keys)).value < kEnoughItems) keys /= 2;
    keys = std::min(keys, std::max<std::int64_t>(g.s_k, 1));
  }
  keys = ceil_div(keys, step) * step;
  return {static_cast<int>(panels * panel), static_cast<int>(keys)};
}

/// Heads times chains that keep threads of a large machine from waiting for each other's turns, and
/// the bytes of their sums at most.
constexpr std::int64_t kEnoughChains = 16;
constexpr std::int64_t kChainBytes = std::int64_t{64} << 20;

/// Key blocks of one chain run as a pipeline, as fast as its slowest thread: several chains where
/// heads are few, of two blocks or more each.
std::int64_t choose_chains(const core::Geometry& g, const Tiles& tiles, Count dq_floats) {
  const std::int64_t blocks = ceil_div(g.s_k, tiles.keys);
  const Count bytes = dq_floats * std::int64_t{sizeof(float)};
  std::int64_t chains = 1;
  while ((Count{g.kv_heads()} * chains).value < kEnoughChains && 4 * chains <= blocks &&
         (bytes * 2 * chains).value <= kChainBytes) {
    chains *= 2;
  }
  return chains;
}

void fill_figures(const core::Resolved& resolved, const BackwardChoices& c, PlanInfo& info) {
  const core::Geometry& g = resolved.geometry;
  const Operands& x = resolved.problem.operands;
  info.visible_pairs = visible_pairs(resolved);
  info.flops = {(Count{info.visible_pairs.value} * 2 * (3 * g.d_qk + 2 * g.d_v)).value,
                info.visible_pairs.exact};
  const std::int64_t in = size_of(x.q.dtype);
  const Count rows = Count{g.total_q} * g.h_q;
  const std::int64_t o_bytes = g.d_v * (size_of(x.o.dtype) + size_of(x.d_o.dtype));
  const Count prepare = rows * (o_bytes + 4 + 8 + (x.d_lse.present() ? 4 : 0));
  const Count keys_once =
      Count{g.total_k} * g.h_k *
      ((g.d_qk + g.d_v) * in + g.d_qk * size_of(x.dk.dtype) + g.d_v * size_of(x.dv.dtype));
  // Each key block reads Q, dO, LSE, D and reads and writes the dQ sum of the rows that see it.
  const std::int64_t keys = c.tiles.keys;
  const Figure visits = tile_visits(resolved, 0, g.packed_rows(), c.tiles.rows,
                                    [keys, &g](core::Interval seen, std::int64_t tile_rows) {
                                      if (seen.empty()) return std::int64_t{0};
                                      // As many keys elsewhere may touch one block more.
                                      const std::int64_t blocks =
                                          g.ragged() ? ceil_div(seen.size() - 1, keys) + 1
                                                     : ceil_div(seen.end, keys) - seen.begin / keys;
                                      return tile_rows * std::min(blocks, ceil_div(g.s_k, keys));
                                    });
  const std::int64_t per_visit = g.d_qk * in + g.d_v * size_of(x.d_o.dtype) + 8 + 2 * 4 * g.d_qk;
  // Cleared, then each element read and written for every pair that adds to it.
  const Count d_bias = x.d_bias.present()
                           ? Count{info.visible_pairs.value} * 2 * 4 + core::elements(x.d_bias) * 4
                           : Count{0};
  const Count pairs = pair_bytes(resolved, 0, g.packed_rows(), c.tiles.rows);
  info.slow_memory_bytes = {(prepare + keys_once + Count{visits.value} * per_visit +
                             rows * g.d_qk * size_of(x.dq.dtype) + pairs + d_bias)
                                .value,
                            visits.exact && !resolved.hides_by_data()};
  // Standard attention reads and writes P, dP and dS in float: P read twice, dP and dS written and
  // read.
  const Count scores = g.ragged() ? Count{info.visible_pairs.value} : rows * g.s_k;
  info.standard_memory_bytes = {
      (prepare + keys_once + rows * (2 * g.d_qk * in + o_bytes) + scores * 4 * 7).value,
      !g.ragged()};
}

/// A head of a run with its place in the workspace.
class Heads {
 public:
  Heads(const core::BackwardCall& call, const BackwardChoices& choices)
      : call_(call),
        geometry_(call.resolved.geometry),
        choices_(choices),
        lengths_(core::Lengths::of(call.tensors)) {
    if (!geometry_.varlen) {
      tiles_ = geometry_.kv_heads() * row_tiles(geometry_.s_q);
      items_ = geometry_.kv_heads() * ceil_div(geometry_.s_k, choices_.tiles.keys);
      return;
    }
    first_tile_ = in_workspace<std::int64_t>(call_.options, choices.index_offset);
    first_item_ = first_tile_ + geometry_.b + 1;
    for (std::int64_t s = 0; s < geometry_.b; ++s) {
      first_tile_[s] = tiles_;
      first_item_[s] = items_;
      tiles_ += geometry_.h_k * row_tiles(sequence(s).len_q);
      items_ += geometry_.h_k * key_blocks(sequence(s));
    }
    first_tile_[geometry_.b] = tiles_;
    first_item_[geometry_.b] = items_;
  }

  const core::Geometry& geometry() const { return geometry_; }
  std::int64_t tiles() const { return tiles_; }
  std::int64_t items() const { return items_; }

  /// Calls body(head, row tile).
  template <class Body>
  void with_tile(std::int64_t index, const Body& body) const {
    std::int64_t s = 0;
    if (geometry_.varlen) {
      s = find(first_tile_, index);
      index -= first_tile_[s];
    } else {
      const std::int64_t per_sequence = geometry_.h_k * row_tiles(geometry_.s_q);
      s = index / per_sequence;
      index %= per_sequence;
    }
    const std::int64_t per_head = row_tiles(sequence(s).len_q);
    body(head(sequence(s), index / per_head), index % per_head);
  }

  /// Calls body(head, key block). Key blocks ascend; all heads (varlen: of the sequence) take
  /// turns. With key_lengths a block may lie beyond the sequence's keys.
  template <class Body>
  void with_item(std::int64_t ticket, const Body& body) const {
    std::int64_t s = 0;
    std::int64_t kv_head = 0;
    std::int64_t block = 0;
    if (geometry_.varlen) {
      s = find(first_item_, ticket);
      ticket -= first_item_[s];
      block = ticket / geometry_.h_k;
      kv_head = ticket % geometry_.h_k;
    } else {
      const std::int64_t heads = geometry_.kv_heads();
      block = ticket / heads;
      s = ticket % heads / geometry_.h_k;
      kv_head = ticket % geometry_.h_k;
    }
    BackwardHead h = head(sequence(s), kv_head);
    if (choices_.bias.wanted) h.d_bias = bias_gradient(s, kv_head, block);
    body(h, block);
  }

  /// dSink of every query head: the sums of its row tiles, sequences and tiles ascending.
  void finish_sinks() const {
    const Tensor& out = call_.tensors.d_sinks;
    if (!out.present()) return;
    for (std::int64_t head = 0; head < geometry_.h_q; ++head) {
      double sum = 0.0;
      for (std::int64_t n = 0; n < geometry_.b; ++n) {
        const core::Sequence s = sequence(n);
        const std::int64_t first = first_tile(s, head / geometry_.group);
        const double* sums =
            in_workspace<double>(call_.options, choices_.sinks_offset) + head % geometry_.group;
        for (std::int64_t t = 0; t < row_tiles(s.len_q); ++t)
          sum += sums[(first + t) * geometry_.group];
      }
      static_cast<float*>(out.data)[head * out.stride[0]] = static_cast<float>(sum);
    }
  }

 private:
  core::Sequence sequence(std::int64_t s) const {
    return core::sequence_at(geometry_, lengths_, s);
  }
  std::int64_t row_tiles(std::int64_t len_q) const {
    return ceil_div(len_q * geometry_.group, choices_.tiles.rows);
  }
  /// Row tiles before those of this head, over the batch.
  std::int64_t first_tile(const core::Sequence& s, std::int64_t kv_head) const {
    const std::int64_t of_sequences =
        geometry_.varlen ? first_tile_[s.index] : s.index * geometry_.h_k * row_tiles(s.len_q);
    return of_sequences + kv_head * row_tiles(s.len_q);
  }
  std::int64_t key_blocks(const core::Sequence& s) const {
    return ceil_div(s.len_k, choices_.tiles.keys);
  }
  std::int64_t find(const std::int64_t* first, std::int64_t index) const {
    return std::upper_bound(first, first + geometry_.b + 1, index) - first - 1;
  }

  /// Items of a block come in the order of tickets, sequences and heads ascending, so that each
  /// waits for an earlier ticket only.
  BiasGradient bias_gradient(std::int64_t s, std::int64_t kv_head, std::int64_t block) const {
    const core::Geometry& g = geometry_;
    const BiasTurns& turns = choices_.bias;
    const Tensor& d_bias = call_.tensors.d_bias;
    const core::PairStrides strides(d_bias);
    BiasGradient x;
    x.data = advanced(static_cast<float*>(d_bias.data), strides.at(s, kv_head * g.group, 0, 0));
    x.row = strides.row;
    x.head = strides.head;
    x.key = strides.key;
    x.rows_summed = turns.over_rows;
    x.rows_split = !turns.over_rows && choices_.tiles.rows % g.group != 0;
    x.tiles = turns.tiles;
    if (!turns.shared()) return x;
    const std::int64_t table = (turns.over_batch ? 0 : s) * (turns.over_heads ? 1 : g.h_k) +
                               (turns.over_heads ? 0 : kv_head);
    x.turns = in_workspace<std::int64_t>(call_.options, choices_.bias_turns_offset) +
              (table * turns.blocks + block) * turns.tiles;
    const auto turn_of = [&](std::int64_t n, std::int64_t h) { return n * g.h_k + h + 1; };
    x.own = turn_of(s, kv_head);
    if (turns.over_heads && kv_head > 0) {
      x.before = turn_of(s, kv_head - 1);
    } else if (turns.over_batch) {
      std::int64_t n = s - 1;
      while (n >= 0 && key_blocks(sequence(n)) <= block) --n;
      if (n >= 0) x.before = turn_of(n, turns.over_heads ? g.h_k - 1 : kv_head);
    }
    return x;
  }

  BackwardHead head(const core::Sequence& s, std::int64_t kv_head) const {
    const core::Geometry& g = geometry_;
    const BackwardTensors& t = call_.tensors;
    const std::int64_t q_head = kv_head * g.group;
    BackwardHead h;
    h.q = view(t.q, s.index, s.first_q, q_head);
    h.k = view(t.k, s.index, s.first_k, kv_head);
    h.v = view(t.v, s.index, s.first_k, kv_head);
    h.o = view(t.o, s.index, s.first_q, q_head);
    h.d_o = view(t.d_o, s.index, s.first_q, q_head);
    h.dq = view(t.dq, s.index, s.first_q, q_head);
    h.dk = view(t.dk, s.index, s.first_k, kv_head);
    h.dv = view(t.dv, s.index, s.first_k, kv_head);
    h.lse = row_view<const float>(t.lse, s.index, s.first_q, q_head);
    h.d_lse = row_view<const float>(t.d_lse, s.index, s.first_q, q_head);
    h.rule = core::mask_rule(call_.resolved.problem.options.mask, s.len_q, s.len_k);
    h.score = score_rule(call_.resolved, ScoreOperands(t), s.index, q_head);
    h.dropout = core::dropout_rule(call_.resolved.problem.options.dropout, g.h_q, s.index, q_head);
    h.scale = static_cast<float>(call_.resolved.scale);
    h.group = g.group;
    h.d_qk = g.d_qk;
    h.d_v = g.d_v;
    h.rows = s.len_q * g.group;
    h.tiles = choices_.tiles;
    const std::int64_t first = first_tile(s, kv_head);
    const std::int64_t row = first * choices_.tiles.rows;
    h.lse_base2 = in_workspace<float>(call_.options, choices_.lse_offset) + row;
    h.d = in_workspace<float>(call_.options, choices_.d_offset) + row;
    h.chains = choices_.chains;
    h.dq_sum = in_workspace<float>(call_.options, choices_.dq_offset) + row * g.d_qk;
    h.dq_chain = choices_.dq_chain.value;
    h.turns = in_workspace<int>(call_.options, choices_.turns_offset) + first * choices_.chains;
    if (t.d_sinks.present()) {
      h.sinks = head_view(t.sinks, q_head);
      h.sink_sums = in_workspace<double>(call_.options, choices_.sinks_offset) + first * g.group;
    }
    return h;
  }

  const core::BackwardCall& call_;
  const core::Geometry& geometry_;
  const BackwardChoices& choices_;
  core::Lengths lengths_;
  std::int64_t* first_tile_ = nullptr;  // [b + 1]
  std::int64_t* first_item_ = nullptr;  // [b + 1]
  std::int64_t tiles_ = 0;
  std::int64_t items_ = 0;
};

/// The gradient of the bias starts at 0, and nobody has had a turn.
void clear_bias_gradient(const core::BackwardCall& call, const BackwardChoices& c) {
  const Tensor& x = call.tensors.d_bias;
  if (!x.present()) return;
  auto* turns = in_workspace<std::int64_t>(call.options, c.bias_turns_offset);
  std::fill_n(turns, c.bias.count(call.resolved.geometry).value, std::int64_t{0});
  if (x.shape[3] == 0) return;  // no elements; data may be null
  const std::int64_t rows = x.shape[0] * x.shape[1] * x.shape[2];
  for_each_ticket(rows, call.draft.info.threads, [&](std::int64_t row, int) {
    float* to = static_cast<float*>(x.data) + row % x.shape[2] * x.stride[2] +
                row / x.shape[2] % x.shape[1] * x.stride[1] +
                row / x.shape[2] / x.shape[1] * x.stride[0];
    for (std::int64_t j = 0; j < x.shape[3]; ++j) to[j * x.stride[3]] = 0.0f;
  });
}

/// dK and dV of the block's keys past the sequence's length are 0.
void clear_padding(const BackwardHead& head, std::int64_t key_block, std::int64_t s_k) {
  const std::int64_t first = key_block * head.tiles.keys;
  const std::int64_t last = std::min(first + head.tiles.keys, s_k);
  for (std::int64_t key = std::max(first, head.rule.len_k); key < last; ++key) {
    for (const auto& [x, d] : {std::pair{&head.dk, head.d_qk}, {&head.dv, head.d_v}}) {
      for (std::int64_t c = 0; c < d; ++c) {
        core::store_element(x->data, x->dtype, key * x->row + c * x->dim, 0.0);
      }
    }
  }
}

}  // namespace

Result<core::Draft> plan_backward(const core::Resolved& resolved, const PlanOptions& options) {
  const auto target = choose_target();
  if (!target) return target.error();
  const core::Geometry& g = resolved.geometry;
  auto c = std::make_shared<BackwardChoices>();
  c->kernels = kernels(target.value());
  c->tiles = choose_tiles(*c->kernels, g, options.batch_invariant);
  c->bias = BiasTurns(resolved.problem.operands.d_bias, g, c->tiles);
  c->scratch_bytes = round_up(
      c->kernels->backward_scratch_bytes(c->tiles, g.d_qk, g.d_v, c->bias.over_rows ? g.group : 0),
      256);
  const Count per_head = g.varlen ? Count{(Count{g.total_q} * g.group).value / c->tiles.rows} + g.b
                                  : Count{g.b} * ceil_div(g.packed_rows(), c->tiles.rows);
  const Count row_tiles = per_head * g.h_k;

  core::Draft draft;
  PlanInfo& info = draft.info;
  info.kernel = std::string("cpu.backward.") + to_string(target.value());
  info.rows = c->tiles.rows;
  info.keys = c->tiles.keys;
  info.batch_invariant = options.batch_invariant;
  info.work_items = g.varlen ? (Count{g.total_k / c->tiles.keys + g.b} * g.h_k).value
                             : (Count{g.kv_heads()} * ceil_div(g.s_k, c->tiles.keys)).value;
  info.threads = plan_threads(options, std::max(info.work_items, row_tiles.value));
  info.scratch_bytes_per_thread = c->scratch_bytes;
  WorkspaceLayout layout;
  layout.reserve(info.threads, static_cast<std::int64_t>(c->scratch_bytes));
  const Count rows = row_tiles * c->tiles.rows;
  c->lse_offset = layout.reserve(rows, sizeof(float));
  c->d_offset = layout.reserve(rows, sizeof(float));
  c->dq_chain = rows * g.d_qk;
  if (!options.batch_invariant) c->chains = choose_chains(g, c->tiles, c->dq_chain);
  c->dq_offset = layout.reserve(c->dq_chain * c->chains, sizeof(float));
  c->turns_offset = layout.reserve(row_tiles * c->chains, sizeof(int));
  if (resolved.problem.operands.d_sinks.present()) {
    c->sinks_offset = layout.reserve(row_tiles * g.group, sizeof(double));
  }
  c->bias_turns_offset = layout.reserve(c->bias.count(g), sizeof(std::int64_t));
  if (g.varlen) c->index_offset = layout.reserve(2 * (g.b + 1), sizeof(std::int64_t));
  info.workspace_bytes = static_cast<std::size_t>(layout.bytes.value);
  fill_figures(resolved, *c, info);
  draft.choices = std::move(c);
  return draft;
}

Status run_backward(const core::BackwardCall& call) {
  const auto& c = *static_cast<const BackwardChoices*>(call.draft.choices.get());
  const Heads heads(call, c);
  const int threads = call.draft.info.threads;
  const auto scratch = [&](int worker) {
    return in_workspace<std::byte>(call.options,
                                   static_cast<std::size_t>(worker) * c.scratch_bytes);
  };
  for_each_ticket(heads.tiles(), threads, [&](std::int64_t index, int worker) {
    heads.with_tile(index, [&](const BackwardHead& head, std::int64_t row_tile) {
      c.kernels->backward_prepare(head, row_tile, scratch(worker));
    });
  });
  heads.finish_sinks();
  clear_bias_gradient(call, c);
  Progress progress(call.options, heads.items());
  for_each_ticket(heads.items(), threads, [&](std::int64_t ticket, int worker) {
    heads.with_item(ticket, [&](const BackwardHead& head, std::int64_t key_block) {
      if (key_block * c.tiles.keys < head.rule.len_k) {
        c.kernels->backward(head, key_block, scratch(worker));
      }
      if (heads.geometry().key_lengths) clear_padding(head, key_block, heads.geometry().s_k);
    });
    progress.finish_item();
  });
  if (c.chains > 1) {
    for_each_ticket(heads.tiles(), threads, [&](std::int64_t index, int) {
      heads.with_tile(index, c.kernels->backward_finish);
    });
  }
  return {};
}

}  // namespace abacist::cpu
