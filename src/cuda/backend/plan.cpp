#include "cuda/backend/plan.hpp"

#include <algorithm>
#include <string>

#include "core/figures.hpp"
#include "core/saturate.hpp"
#include "cuda/backend/decline.hpp"
#include "cuda/sm90/forward/instance.hpp"

namespace abacist::cuda {
namespace {

using core::Count;

constexpr std::size_t kStatusBytes = 256;
constexpr std::int64_t kCountedTiles = std::int64_t{1} << 14;  // a plan costs microseconds

sm90::ForwardStrides strides_of(const TensorSpec& spec) {
  if (!core::has_elements(spec)) return {0, 0, 0};  // theirs may be anything
  const core::RowStrides strides(spec);
  return {strides.batch, strides.row, strides.head};
}

/// Stands for memory that a plan does not have yet.
template <class T>
const T* some(const TensorSpec& spec) {
  static const T kAny{};
  return spec.present() ? &kAny : nullptr;
}

/// Query tiles of all heads. Lengths on the device: at most, each sequence's last may be a short
/// one.
Count tiles_of(const core::Geometry& g, const sm90::ForwardChoice& choice) {
  if (!g.varlen) return choice.query_tiles;
  return Count{std::min(g.total_q / choice.positions + g.b,
                        (Count{g.b} * choice.tiles_per_head).value)} *
         choice.tile_heads;
}

/// Rows of Q that all tiles load, of one head each. TMA loads whole tiles and cuts at the end of
/// the tensor, not at that of a sequence or group; the kernel for short sequences reads single
/// rows.
Count loaded_rows(const core::Geometry& g, const sm90::ForwardChoice& choice) {
  if (choice.instance->is_short) return Count{g.total_q} * g.h_q;
  const std::int64_t heads = choice.warpgroup.heads;
  if (g.varlen) return tiles_of(g, choice) * choice.positions * heads;
  const std::int64_t of_group = choice.tile_heads / g.h_k * heads;
  return Count{g.total_q} * ((Count{of_group} * (g.h_k - 1)).value + g.group);
}

/// Keys that all query tiles load: a tile walks whole key tiles, which TMA cuts at the end of the
/// tensor; the kernel for short sequences reads no key that it does not see, each of its warps for
/// itself, but finds what another head of the group has read in the L1 cache (measured: all of it).
Figure loaded_keys(const core::Resolved& resolved, const sm90::ForwardChoice& choice) {
  const core::Geometry& g = resolved.geometry;
  const std::int64_t heads = choice.tile_heads;
  const std::int64_t rows = choice.positions;  // of each head
  const std::int64_t tiles = choice.tiles_per_head;
  const core::MaskRule rule = core::mask_rule(resolved.problem.options.mask, g.s_q, g.s_k);
  const std::int64_t step = choice.instance->is_short ? 1 : choice.keys;
  if (g.ragged() || tiles > kCountedTiles) {
    const std::int64_t window = rule.left + rule.right + rows + 2 * std::int64_t{choice.keys};
    const std::int64_t longest =
        g.varlen ? std::min((g.s_k + step - 1) / step * step, g.total_k) : g.s_k;
    return {(tiles_of(g, choice) * std::min(longest, window)).value, false};
  }
  Count keys = 0;
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    const core::Interval seen = rule.visible_any(tile * rows, std::min((tile + 1) * rows, g.s_q));
    if (seen.empty()) continue;
    const std::int64_t begin = seen.begin / step * step;
    const std::int64_t end = (seen.end + step - 1) / step * step;
    keys = keys + (std::min(end, g.s_k) - begin);
  }
  return {(keys * g.b * heads).value, !choice.instance->is_short || g.group == 1};
}

void fill_figures(const core::Resolved& resolved, const sm90::ForwardChoice& choice,
                  PlanInfo& info) {
  const core::Geometry& g = resolved.geometry;
  info.visible_pairs = core::visible_pairs(resolved);
  info.flops = {(Count{info.visible_pairs.value} * 2 * (g.d_qk + g.d_v)).value,
                info.visible_pairs.exact};
  const std::int64_t lse = resolved.problem.operands.lse.present() ? 4 : 0;
  const Count once = loaded_rows(g, choice) * choice.splits * g.d_qk * 2 +
                     Count{g.total_q} * g.h_q * (g.d_v * 2 + lse);
  const Figure keys = loaded_keys(resolved, choice);
  // Partial results, written and read: O, maximum and sum. Less where rows see no key of a split.
  const Count partial =
      choice.splits == 1
          ? Count{0}
          : Count{g.total_q} * g.h_q * choice.splits * 4 * (g.d_v + 2) + choice.merge_bytes;
  info.slow_memory_bytes = {(once + partial + Count{keys.value} * (g.d_qk + g.d_v) * 2).value,
                            keys.exact && choice.splits == 1};
  info.standard_memory_bytes = core::standard_forward_bytes(resolved);
}

/// "cuda.forward.sm90.bf16.d192x128": the head dimensions computed with. ".packed": several query
/// heads in one tile. ".split": keys in parts, and a merge. ".short": 16 rows a warp.
std::string kernel_name(const sm90::ForwardChoice& choice) {
  const sm90::ForwardInstance& instance = *choice.instance;
  std::string name = "cuda.forward.sm90.";
  name += instance.type == sm90::ForwardType::bf16 ? "bf16" : "f16";
  name += ".d" + std::to_string(instance.tile.d_qk) + "x" + std::to_string(instance.tile.d_v);
  if (instance.is_short) return name + ".short";
  if (choice.modified) name += ".score";
  if (choice.warpgroup.packed()) name += ".packed";
  return choice.splits > 1 ? name + ".split" : name;
}

}  // namespace

sm90::ForwardArguments forward_arguments(const core::Resolved& resolved) {
  const core::Geometry& g = resolved.geometry;
  const Operands& x = resolved.problem.operands;
  const Mask& mask = resolved.problem.options.mask;
  sm90::ForwardArguments a;
  a.operands.q_stride = strides_of(x.q);
  a.operands.k_stride = strides_of(x.k);
  a.operands.v_stride = strides_of(x.v);
  a.operands.o_stride = strides_of(x.o);
  a.geometry.type = x.q.dtype == DType::f16 ? sm90::ForwardType::f16 : sm90::ForwardType::bf16;
  a.geometry.b = g.b;
  a.geometry.s_q = g.s_q;
  a.geometry.s_k = g.s_k;
  a.geometry.h_q = g.h_q;
  a.geometry.h_k = g.h_k;
  a.geometry.d_qk = g.d_qk;
  a.geometry.d_v = g.d_v;
  a.geometry.total_q = g.varlen ? g.total_q : 0;
  a.geometry.total_k = g.varlen ? g.total_k : 0;
  a.geometry.cu_seqlens_q = some<std::int32_t>(x.cu_seqlens_q);
  a.geometry.cu_seqlens_k = some<std::int32_t>(x.cu_seqlens_k);
  a.geometry.k_lengths = some<std::int32_t>(x.key_lengths);
  a.mask.left = mask.window.left;
  a.mask.right = mask.causal ? 0 : mask.window.right;
  a.mask.top_left = mask.align == Align::top_left;
  a.score.scale = static_cast<float>(resolved.scale);
  a.score.softcap = static_cast<float>(resolved.problem.options.score.softcap);
  a.score.alibi_slopes = some<float>(x.alibi_slopes);
  a.score.sinks = some<float>(x.sinks);
  return a;
}

Result<core::Draft> plan_on(const core::Resolved& resolved, const DeviceFacts& device) {
  if (auto reason = decline(resolved)) return *reason;
  if (auto reason = decline(device)) return *reason;
  const sm90::ForwardArguments arguments = forward_arguments(resolved);
  sm90::ForwardChoice choice;
  const sm90::ForwardStatus status =
      sm90::choose_forward(arguments, device.multiprocessors, choice);
  if (status.code != sm90::ForwardStatus::ok) {
    return Error{ErrorCode::unsupported, "", status.reason};
  }
  Choices choices;
  choices.device = device;
  choices.launch = choice;
  choices.status_bytes = resolved.geometry.ragged() ? kStatusBytes : 0;
  core::Draft draft;
  PlanInfo& info = draft.info;
  info.kernel = choice.instance != nullptr ? kernel_name(choice) : "cuda.forward.nothing";
  info.rows = choice.rows;
  info.keys = choice.keys;
  info.splits = choice.splits;
  info.work_items = choice.query_tiles * choice.splits;
  info.threads = choice.threads;
  info.grid = choice.blocks;
  info.workspace_bytes = choices.status_bytes + choice.workspace_bytes;
  if (choice.instance != nullptr) fill_figures(resolved, choice, info);
  draft.choices = std::make_shared<Choices>(std::move(choices));
  return draft;
}

}  // namespace abacist::cuda
