// Forward pass on the CPU: planning, and the items of a run.
//
// An item is (key split, sequence, key/value head, tile of packed query rows); with few rows, all
// those of several heads. Items are handed out by tickets, within a head the later tiles first:
// under causal masks those are the longest. The first quarter of a head's rows is cut into small
// tiles, which all heads keep for the end, so that threads finish together although processors
// differ in speed. Keys are split only when rows alone give too few items. Tiles and splits follow
// from the problem, never from the threads, so the bits do not depend on the thread count.
//
// Where the packed K and V of all heads fit kSharedBytes, the first tickets pack them once for all
// items, which wait for their head's blocks; else each item packs what it reads. On 16 cores an
// item of 192 rows spent 18% of its time on packing, one of 768 rows 5%.
#include <algorithm>
#include <atomic>
#include <bit>

#include "cpu/driver.hpp"
#include "cpu/splits.hpp"

namespace abacist::cpu {
namespace {

using core::Count;

/// Fewer items than this leave threads of a large machine idle: cut smaller tiles, then split keys.
constexpr std::int64_t kEnoughItems = 48;
constexpr std::int64_t kFewItems = 32;
constexpr std::int64_t kMinKeysOfSplit = 512;
/// Packed K and V of a run at most, and the rows of a tile then: small ones balance better.
constexpr std::int64_t kSharedBytes = std::int64_t{32} << 20;
constexpr std::int64_t kSharedRows = 192;

/// A pass over pages of this plan, in the workspace: the status word first of all, and of each
/// sequence which keys lie in valid pages.
struct PagedChoices {
  std::size_t valid_offset = 0;  ///< [b][s_k] bytes, written only for a sequence with invalid pages
  std::size_t flags_offset = 0;  ///< [b] bytes: whether the sequence has invalid pages
};

struct ForwardChoices {
  const Kernels* kernels = nullptr;
  Tiles tiles{};
  std::int64_t heads = 1;        ///< key/value heads of an item
  std::int64_t small_rows = 0;   ///< of a small tile
  std::int64_t small_tiles = 0;  ///< of a head, from row 0 on
  std::int64_t row_tiles = 0;    ///< of the longest sequence, small ones not counted
  std::int64_t splits = 1;
  std::size_t scratch_bytes = 0;  ///< per thread
  std::size_t scratch_offset = 0;
  PagedChoices paged;
  std::size_t split_o_offset = 0;
  std::size_t split_states_offset = 0;
  std::size_t index_offset = 0;     ///< varlen: first item of each sequence
  std::int64_t shared_blocks = 0;   ///< of a head, packed once for all items; 0: each packs its own
  std::size_t packed_offset = 0;    ///< [head][block] of packed keys
  std::size_t counters_offset = 0;  ///< [head] int: blocks packed

  /// Packed rows of a head that small tiles cover.
  std::int64_t small_end() const { return small_tiles * small_rows; }
  /// Items of one sequence for each of its row tiles.
  std::int64_t head_runs(const core::Geometry& g) const { return ceil_div(g.h_k, heads); }
  /// Row tiles of all heads and sequences, small ones too.
  Count tiles_of_heads(const core::Geometry& g) const {
    return Count{g.b} * head_runs(g) * (row_tiles + small_tiles);
  }
};

/// Whether each key is seen by few tiles of `rows` rows: a window of less than three.
bool is_narrow(const core::Resolved& resolved, std::int64_t rows) {
  const core::Geometry& g = resolved.geometry;
  const core::MaskRule rule = core::mask_rule(resolved.problem.options.mask, g.s_q, g.s_k);
  return rule.left + rule.right < 3 * rows / std::max<std::int64_t>(g.group, 1);
}

/// Tile sizes: Q and O of a tile stay near L2 (up to 1 MiB; they stream, so a part in L3 does not
/// hurt), K and V of a block in it (96 KiB). Many rows amortise the packing of K and V: at 96 rows
/// it takes a fifth of the time, at 768 3% (d 128, Zen 4: 78.7, 91.5 and 98.5 GFLOP/s at 96, 384
/// and 768 rows).
Tiles choose_tiles(const Kernels& kernels, const core::Resolved& resolved, bool invariant) {
  const core::Geometry& g = resolved.geometry;
  const std::int64_t packed = g.packed_rows();
  const std::int64_t panel = kernels.panel_rows;
  const std::int64_t most = std::max<std::int64_t>(262144 / (g.d_qk + g.d_v), panel);
  std::int64_t rows = std::min({std::int64_t{768}, most, kMaxPanels * panel});
  const Count heads = g.kv_heads();
  std::int64_t keys = std::clamp<std::int64_t>(24576 / (g.d_qk + g.d_v), 32, 96);
  if (invariant) {
    rows = std::min(rows, kSharedRows);
  } else {
    // Under a window every item packs its keys, which long tiles amortise.
    const std::int64_t enough = is_narrow(resolved, rows) ? kFewItems : kEnoughItems;
    while (rows > 96 && (heads * ceil_div(packed, rows)).value < enough) rows /= 2;
    keys = std::min(keys, std::max<std::int64_t>(g.s_k, 1));
  }
  keys = ceil_div(keys, kernels.key_step) * kernels.key_step;
  return {static_cast<int>(ceil_div(rows, panel) * panel), static_cast<int>(keys)};
}

/// Key/value heads of an item: with few rows as many as a panel has lanes for (few-inl.h says why).
std::int64_t choose_heads(const Kernels& kernels, const core::Geometry& g) {
  const std::int64_t rows = g.packed_rows();
  if (rows == 0 || rows > kernels.few_rows) return 1;
  const auto padded = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(rows)));
  return std::clamp<std::int64_t>(kernels.panel_rows / padded, 1, std::max<std::int64_t>(g.h_k, 1));
}

/// Decides on packing K and V once for all items, and then on smaller tiles.
void choose_sharing(const core::Resolved& resolved, ForwardChoices& c) {
  const core::Geometry& g = resolved.geometry;
  // Under a narrow window a key is packed by a few items, straight into their L2, which is cheaper
  // than through memory (s 2,048: window of 512 at d 64 174 -> 179 GFLOP/s, of 1,024 189 -> 193;
  // bf16, d 128, 512: 184 -> 193).
  if (is_narrow(resolved, c.tiles.rows)) return;
  const std::int64_t panel = c.kernels->panel_rows;
  const std::int64_t rows = ceil_div(kSharedRows, panel) * panel;
  const std::int64_t blocks = ceil_div(g.s_k, c.tiles.keys);
  const auto block_bytes =
      static_cast<std::int64_t>(c.kernels->packed_floats(c.tiles, g.d_qk, g.d_v) * sizeof(float));
  if (g.varlen || g.packed_rows() <= rows) return;
  if ((Count{g.kv_heads()} * blocks * block_bytes).value > kSharedBytes) return;
  c.shared_blocks = blocks;
  c.tiles.rows = static_cast<int>(std::min<std::int64_t>(c.tiles.rows, rows));
}

/// Cuts the rows of a head: a quarter into small tiles (not for varlen, nor where rows are few),
/// the rest evenly.
void cut_rows(const core::Geometry& g, ForwardChoices& c) {
  const std::int64_t packed = g.packed_rows();
  const std::int64_t panel = c.kernels->panel_rows;
  const std::int64_t least = c.shared_blocks > 0 ? 48 : 96;  // packing makes narrow tiles dear
  c.small_rows = ceil_div(std::max<std::int64_t>(c.tiles.rows / 4, least), panel) * panel;
  const Count tiles = Count{g.kv_heads()} * ceil_div(packed, c.tiles.rows);
  const bool many = !g.varlen && tiles.value >= kFewItems;
  if (many && c.small_rows < c.tiles.rows) c.small_tiles = packed / 4 / c.small_rows;
  const std::int64_t rest = packed - c.small_end();
  c.row_tiles = ceil_div(rest, c.tiles.rows);
  const std::int64_t even = ceil_div(rest, std::max<std::int64_t>(c.row_tiles, 1));
  c.tiles.rows = static_cast<int>(std::max<std::int64_t>(ceil_div(even, panel), 1) * panel);
}

std::int64_t choose_splits(const core::Geometry& g, const ForwardChoices& c) {
  const std::int64_t items = c.tiles_of_heads(g).value;
  if (items == 0 || items >= kFewItems) return 1;
  const std::int64_t least = std::max<std::int64_t>(kMinKeysOfSplit / c.heads, 64);
  return std::max<std::int64_t>(std::min(ceil_div(kFewItems, items), g.s_k / least), 1);
}

void fill_figures(const core::Resolved& resolved, const ForwardChoices& c, PlanInfo& info) {
  const core::Geometry& g = resolved.geometry;
  const Operands& x = resolved.problem.operands;
  info.visible_pairs = visible_pairs(resolved);
  info.flops = {(Count{info.visible_pairs.value} * 2 * (g.d_qk + g.d_v)).value,
                info.visible_pairs.exact};
  const std::int64_t in = size_of(x.q.dtype);
  const Count rows = Count{g.total_q} * g.h_q;
  const Count once = rows * (g.d_qk * in + g.d_v * size_of(x.o.dtype) + (x.lse.present() ? 4 : 0));
  // K and V pass once per tile of rows; a tile reads the union of its rows' intervals.
  const auto seen_keys = [](core::Interval seen, std::int64_t) { return seen.size(); };
  const std::int64_t packed = g.packed_rows();
  const Figure small = tile_visits(resolved, 0, c.small_end(), c.small_rows, seen_keys);
  const Figure large = tile_visits(resolved, c.small_end(), packed, c.tiles.rows, seen_keys);
  const Count keys = Count{small.value} + large.value;
  const std::int64_t split_row = g.d_v * 4 + std::int64_t{sizeof(RowState)};
  const Count partials = c.splits > 1 ? rows * c.splits * split_row * 2 : Count{0};
  const Count pairs = pair_bytes(resolved, 0, c.small_end(), c.small_rows) +
                      pair_bytes(resolved, c.small_end(), packed, c.tiles.rows);
  info.slow_memory_bytes = {(once + keys * (g.d_qk + g.d_v) * in + partials + pairs).value,
                            small.exact && large.exact && !resolved.hides_by_data()};
  // Standard attention writes and reads scores and probabilities, in float, once each.
  const Count scores = g.ragged() ? Count{info.visible_pairs.value} : rows * g.s_k;
  info.standard_memory_bytes = {
      (once + Count{g.total_k} * g.h_k * (g.d_qk + g.d_v) * in + scores * 4 * 4).value,
      !g.ragged()};
}

struct Item {
  std::int64_t split;
  std::int64_t kv_head, kv_heads;    // the first, and how many
  std::int64_t first_row, last_row;  // packed, over the query heads of all of them
  core::Sequence sequence;
};

/// Finds items of a run; holds the varlen index.
class Items {
 public:
  Items(const core::ForwardCall& call, const ForwardChoices& choices)
      : geometry_(call.resolved.geometry),
        choices_(choices),
        lengths_(core::Lengths::of(call.tensors)) {
    const std::int64_t head_runs = choices.head_runs(geometry_);
    if (!geometry_.varlen) {
      small_first_ = geometry_.b * head_runs * choices.row_tiles * choices.splits;
      count_ = small_first_ + geometry_.b * head_runs * choices.small_tiles * choices.splits;
      return;
    }
    first_ = in_workspace<std::int64_t>(call.options, choices.index_offset);
    for (std::int64_t s = 0; s < geometry_.b; ++s) {
      first_[s] = count_;
      count_ += row_tiles(sequence(s)) * head_runs * choices.splits;
    }
    first_[geometry_.b] = count_;
  }

  std::int64_t count() const { return count_; }

  /// Key/value head `index` of all sequences, without rows.
  Item head(std::int64_t index) const {
    return {0, index % geometry_.h_k, 1, 0, 0, sequence(index / geometry_.h_k)};
  }

  Item operator[](std::int64_t ticket) const {
    if (geometry_.varlen) {
      const std::int64_t s =
          std::upper_bound(first_, first_ + geometry_.b + 1, ticket) - first_ - 1;
      return cut(sequence(s), ticket - first_[s], 0, choices_.tiles.rows, row_tiles(sequence(s)));
    }
    const bool small = ticket >= small_first_;
    const std::int64_t tiles = small ? choices_.small_tiles : choices_.row_tiles;
    const std::int64_t per_sequence = tiles * choices_.head_runs(geometry_) * choices_.splits;
    if (small) ticket -= small_first_;
    const core::Sequence s = sequence(ticket / per_sequence);
    return small ? cut(s, ticket % per_sequence, 0, choices_.small_rows, tiles)
                 : cut(s, ticket % per_sequence, choices_.small_end(), choices_.tiles.rows, tiles);
  }

 private:
  core::Sequence sequence(std::int64_t s) const {
    return core::sequence_at(geometry_, lengths_, s);
  }
  std::int64_t row_tiles(const core::Sequence& s) const {
    return ceil_div(s.len_q * geometry_.group, choices_.tiles.rows);
  }

  /// Item `index` of a sequence whose heads have `tiles` tiles of `rows` rows from `first_row` on.
  Item cut(const core::Sequence& s, std::int64_t index, std::int64_t first_row, std::int64_t rows,
           std::int64_t tiles) const {
    const std::int64_t split = index % choices_.splits;
    index /= choices_.splits;
    first_row += (tiles - 1 - index % tiles) * rows;
    const std::int64_t kv_head = index / tiles * choices_.heads;
    const std::int64_t kv_heads = std::min(choices_.heads, geometry_.h_k - kv_head);
    const std::int64_t last_row = s.len_q * geometry_.group * kv_heads;
    return {split, kv_head, kv_heads, first_row, std::min(first_row + rows, last_row), s};
  }

  const core::Geometry& geometry_;
  const ForwardChoices& choices_;
  core::Lengths lengths_;
  std::int64_t* first_ = nullptr;  // [b + 1]
  std::int64_t small_first_ = 0;
  std::int64_t count_ = 0;
};

/// Keys of a sequence that some query sees.
core::Interval seen_keys(const core::ForwardCall& call, const core::Sequence& s) {
  const core::MaskRule rule = core::mask_rule(call.resolved.problem.options.mask, s.len_q, s.len_k);
  const core::Interval seen = s.len_q > 0 ? rule.visible_any(0, s.len_q) : core::Interval{};
  return seen.empty() ? core::Interval{} : seen;
}

const std::int32_t* page_ids(const core::ForwardCall& call, const core::Sequence& s) {
  const ConstTensor& table = call.tensors.block_table;
  return static_cast<const std::int32_t*>(table.data) + s.index * table.stride[0];
}

/// Keys of one head; of a paged cache with the sequence's block table.
Operand key_view(const core::ForwardCall& call, const ConstTensor& tensor, const core::Sequence& s,
                 std::int64_t head) {
  const core::Geometry& g = call.resolved.geometry;
  if (!g.paged) return view(tensor, s.index, s.first_k, head);
  Operand keys = view(tensor, 0, 0, head);
  keys.pages = {page_ids(call, s), g.page_size, tensor.stride[0], g.pages, seen_keys(call, s)};
  return keys;
}

/// Looks for invalid ids among the pages of one sequence that queries see.
bool find_invalid_pages(const core::ForwardCall& call, const ForwardChoices& c,
                        const core::Sequence& s) {
  const core::Geometry& g = call.resolved.geometry;
  const core::Interval seen = seen_keys(call, s);
  const std::int32_t* ids = page_ids(call, s);
  auto* valid = in_workspace<std::uint8_t>(call.options, c.paged.valid_offset) + s.index * g.s_k;
  bool any = false;
  for (std::int64_t p = seen.begin / g.page_size; p * g.page_size < seen.end; ++p) {
    if (ids[p] >= 0 && ids[p] < g.pages) continue;
    if (!any) std::fill_n(valid, g.s_k, std::uint8_t{1});
    any = true;
    std::fill_n(valid + p * g.page_size, g.page_size, std::uint8_t{0});
  }
  in_workspace<std::uint8_t>(call.options, c.paged.flags_offset)[s.index] = any ? 1 : 0;
  return any;
}

/// The status word, and the keys of invalid pages.
void check_pages(const core::ForwardCall& call, const ForwardChoices& c) {
  const core::Geometry& g = call.resolved.geometry;
  std::atomic<std::uint32_t> faults = 0;
  for_each_ticket(g.b, call.draft.info.threads, [&](std::int64_t n, int) {
    const core::Sequence s = core::sequence_at(g, core::Lengths::of(call.tensors), n);
    if (find_invalid_pages(call, c, s)) faults.fetch_or(DeviceFault::block_table);
  });
  *in_workspace<std::uint32_t>(call.options, 0) = faults;
}

SplitResults split_results(const core::ForwardCall& call, const ForwardChoices& c) {
  const core::Geometry& g = call.resolved.geometry;
  return {in_workspace<float>(call.options, c.split_o_offset),
          in_workspace<RowState>(call.options, c.split_states_offset), c.splits, g.total_q * g.h_q};
}

/// Packed keys of a run, shared by its items.
struct SharedKeys {
  float* packed;  ///< [head][block]
  int* counters;  ///< [head]: blocks packed
  std::size_t head_floats;

  SharedKeys(const core::ForwardCall& call, const ForwardChoices& c) {
    const core::Geometry& g = call.resolved.geometry;
    packed = in_workspace<float>(call.options, c.packed_offset);
    counters = in_workspace<int>(call.options, c.counters_offset);
    head_floats = static_cast<std::size_t>(c.shared_blocks) *
                  c.kernels->packed_floats(c.tiles, g.d_qk, g.d_v);
  }
  float* of_head(std::int64_t head) const {
    return packed + static_cast<std::size_t>(head) * head_floats;
  }
};

ForwardTask make_task(const core::ForwardCall& call, const ForwardChoices& c, const Item& item) {
  const core::Geometry& g = call.resolved.geometry;
  const ForwardTensors& t = call.tensors;
  const core::Sequence& s = item.sequence;
  const std::int64_t head = item.kv_head * g.group;
  ForwardTask task;
  task.q = view(t.q, s.index, s.first_q, head);
  task.k = key_view(call, t.k, s, item.kv_head);
  task.v = key_view(call, t.v, s, item.kv_head);
  if (c.splits == 1) {
    task.o = view(t.o, s.index, s.first_q, head);
    task.lse = row_view<float>(t.lse, s.index, s.first_q, head);
    task.sinks = head_view(t.sinks, head);
  } else {
    const SplitResults results = split_results(call, c);
    const std::int64_t token = g.varlen ? s.first_q : s.index * g.s_q;
    const std::int64_t first = item.split * results.rows + token * g.h_q + head;
    task.o = {results.o + first * g.d_v, DType::f32, g.h_q * g.d_v, g.d_v, 1};
    task.states = {results.states + first, g.h_q, 1};
  }
  task.rule = core::mask_rule(call.resolved.problem.options.mask, s.len_q, s.len_k);
  task.score = score_rule(call.resolved, ScoreOperands(t), s.index, head);
  if (g.paged && in_workspace<std::uint8_t>(call.options, c.paged.flags_offset)[s.index] != 0) {
    task.score.valid = {
        in_workspace<std::uint8_t>(call.options, c.paged.valid_offset) + s.index * g.s_k,
        DType::u8,
        0,
        0,
        1,
        g.s_k};
  }
  task.dropout = core::dropout_rule(call.resolved.problem.options.dropout, g.h_q, s.index, head);
  task.group = g.group * item.kv_heads;
  task.kv_heads = item.kv_heads;
  task.d_qk = g.d_qk;
  task.d_v = g.d_v;
  task.first_row = item.first_row;
  task.last_row = item.last_row;
  const std::int64_t keys_of_split =
      ceil_div(ceil_div(s.len_k, c.splits), c.tiles.keys) * c.tiles.keys;
  task.first_key = std::min(item.split * keys_of_split, s.len_k);
  task.last_key = std::min(task.first_key + keys_of_split, s.len_k);
  task.tiles = c.tiles;
  if (c.shared_blocks > 0) {
    task.packed_keys = SharedKeys(call, c).of_head(s.index * g.h_k + item.kv_head);
  }
  return task;
}

/// Packs block `ticket % shared_blocks` of head `ticket / shared_blocks`, if some query sees it.
void pack_shared(const core::ForwardCall& call, const ForwardChoices& c, const Items& items,
                 std::int64_t ticket) {
  const SharedKeys shared(call, c);
  const std::int64_t head = ticket / c.shared_blocks;
  const std::int64_t block = ticket % c.shared_blocks;
  const Item item = items.head(head);
  ForwardTask task = make_task(call, c, item);
  task.last_key = task.rule.len_k;
  const core::Interval seen = seen_keys(call, item.sequence);
  if (block * c.tiles.keys < seen.end && (block + 1) * c.tiles.keys > seen.begin) {
    const std::size_t floats = c.kernels->packed_floats(c.tiles, task.d_qk, task.d_v);
    c.kernels->pack_keys(task, block,
                         shared.of_head(head) + static_cast<std::size_t>(block) * floats);
  }
  std::atomic_ref<int>(shared.counters[head]).fetch_add(1, std::memory_order_release);
}

}  // namespace

Result<core::Draft> plan_forward(const core::Resolved& resolved, const PlanOptions& options) {
  const auto target = choose_target();
  if (!target) return target.error();
  const core::Geometry& g = resolved.geometry;
  auto c = std::make_shared<ForwardChoices>();
  c->kernels = kernels(target.value());
  c->tiles = choose_tiles(*c->kernels, resolved, options.batch_invariant);
  c->heads = choose_heads(*c->kernels, g);
  choose_sharing(resolved, *c);
  if (options.batch_invariant) {
    c->small_rows = c->tiles.rows;
    c->row_tiles = ceil_div(g.packed_rows(), c->tiles.rows);
  } else {
    cut_rows(g, *c);
    c->splits = choose_splits(g, *c);
  }
  c->scratch_bytes = round_up(c->kernels->forward_scratch_bytes(c->tiles, g.d_qk, g.d_v), 256);

  core::Draft draft;
  PlanInfo& info = draft.info;
  info.kernel = std::string("cpu.forward.") + to_string(target.value());
  info.rows = c->tiles.rows;
  info.keys = c->tiles.keys;
  info.splits = c->splits;
  info.batch_invariant = options.batch_invariant;
  info.work_items = (c->tiles_of_heads(g) * c->splits).value;
  info.threads = plan_threads(options, info.work_items);
  info.scratch_bytes_per_thread = c->scratch_bytes;
  WorkspaceLayout layout;
  if (g.paged) layout.reserve(1, sizeof(std::uint32_t));  // the status word: first of all
  c->scratch_offset = layout.reserve(info.threads, static_cast<std::int64_t>(c->scratch_bytes));
  if (g.paged) {
    c->paged.flags_offset = layout.reserve(g.b, 1);
    c->paged.valid_offset = layout.reserve(Count{g.b} * g.s_k, 1);
  }
  if (g.varlen) c->index_offset = layout.reserve(g.b + 1, sizeof(std::int64_t));
  if (c->splits > 1) {
    const Count rows = Count{c->splits} * g.total_q * g.h_q;
    c->split_o_offset = layout.reserve(rows * g.d_v, sizeof(float));
    c->split_states_offset = layout.reserve(rows, sizeof(RowState));
  }
  if (c->shared_blocks > 0) {
    const auto floats =
        static_cast<std::int64_t>(c->kernels->packed_floats(c->tiles, g.d_qk, g.d_v));
    c->packed_offset =
        layout.reserve(Count{g.kv_heads()} * c->shared_blocks * floats, sizeof(float));
    c->counters_offset = layout.reserve(g.kv_heads(), sizeof(int));
  }
  info.workspace_bytes = static_cast<std::size_t>(layout.bytes.value);
  fill_figures(resolved, *c, info);
  draft.choices = std::move(c);
  return draft;
}

Status run_forward(const core::ForwardCall& call) {
  const auto& c = *static_cast<const ForwardChoices*>(call.draft.choices.get());
  const Items items(call, c);
  Progress progress(call.options, items.count());
  auto* scratch = in_workspace<std::byte>(call.options, c.scratch_offset);
  if (call.resolved.geometry.paged) check_pages(call, c);
  const int threads = call.draft.info.threads;
  const std::int64_t heads = call.resolved.geometry.kv_heads();
  const std::int64_t packs = heads * c.shared_blocks;
  const SharedKeys shared(call, c);
  if (packs > 0) std::fill_n(shared.counters, heads, 0);
  for_each_ticket(packs + items.count(), threads, [&](std::int64_t ticket, int worker) {
    if (ticket < packs) return pack_shared(call, c, items, ticket);
    const Item item = items[ticket - packs];
    if (packs > 0) {
      wait_until(shared.counters[item.sequence.index * call.resolved.geometry.h_k + item.kv_head],
                 static_cast<int>(c.shared_blocks));
    }
    c.kernels->forward(make_task(call, c, item),
                       scratch + static_cast<std::size_t>(worker) * c.scratch_bytes);
    progress.finish_item();
  });
  if (c.splits == 1) return {};
  // Rows past cu_seqlens_q[b] have no result, and are not written.
  const std::int64_t tokens = call.resolved.geometry.varlen
                                  ? static_cast<const std::int32_t*>(
                                        call.tensors.cu_seqlens_q.data)[call.resolved.geometry.b]
                                  : call.resolved.geometry.total_q;
  merge_splits(call, split_results(call, c), tokens, threads);
  return {};
}

}  // namespace abacist::cpu
