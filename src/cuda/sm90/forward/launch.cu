// Host side of the Hopper forward kernel: checks, tensor maps, schedule, launch.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "arguments.hpp"
#include "instance.hpp"
#include "merge.hpp"
#include "params.cuh"
#include "rows.hpp"

namespace abacist::cuda::sm90 {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver is found at run time: the library loads on machines that have none.
EncodeTiled find_encode_tiled() {
  static const EncodeTiled encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                         &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess) {
      entry = nullptr;
    }
    return reinterpret_cast<EncodeTiled>(entry);
  }();
  return encode;
}

// (d, s, h, b) with a box of 64 columns x rows, or, for several heads side by side, (d, h, s, b)
// with 64 columns x heads x rows. An axis of length 1 or 0 gets a stride TMA accepts.
bool encode_map(CUtensorMap& map, ForwardType type, const void* base, int64_t d, int64_t s,
                int64_t h, int64_t b, const ForwardStrides& stride, int rows, int heads = 1) {
  const auto bytes = [](int64_t extent, int64_t elements) {
    return cuuint64_t(extent > 1 ? elements * 2 : 16);
  };
  cuuint64_t sizes[4] = {cuuint64_t(std::max<int64_t>(d, 1)), cuuint64_t(std::max<int64_t>(s, 1)),
                         cuuint64_t(std::max<int64_t>(h, 1)), cuuint64_t(std::max<int64_t>(b, 1))};
  cuuint64_t strides[3] = {bytes(s, stride.s), bytes(h, stride.h), bytes(b, stride.b)};
  cuuint32_t box[4] = {64, cuuint32_t(rows), 1, 1};
  const cuuint32_t step[4] = {1, 1, 1, 1};
  if (heads > 1) {
    std::swap(sizes[1], sizes[2]);
    std::swap(strides[0], strides[1]);
    box[1] = cuuint32_t(heads);
    box[2] = cuuint32_t(rows);
  }
  return find_encode_tiled()(&map,
                             type == ForwardType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                      : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                             4, const_cast<void*>(base), sizes, strides, box, step,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool tma_strides_fit(const void* base, int64_t s, int64_t h, int64_t b,
                     const ForwardStrides& stride) {
  const auto fits = [](int64_t extent, int64_t elements) {
    return extent <= 1 || (elements >= 0 && elements % 8 == 0 && elements < (int64_t(1) << 38));
  };
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && fits(s, stride.s) && fits(h, stride.h) &&
         fits(b, stride.b);
}

ForwardStatus refuse(const char* reason) {
  return {ForwardStatus::unsupported, reason, cudaSuccess};
}

// The narrowest shape that fits; of several for it, the first whose length fits, else the last.
// (With softcap or ALiBi the long shapes of d 64 and 256 would spill; those of d 96 and 192/128 are
// not built, since the next ones serve. Packed heads run in the shapes with softcap and
// ALiBi, split keys in kernels of three widths. That for d 256 serves softcap, ALiBi and packed
// heads, too.)
enum class Serves { plain, packed, split };
const ForwardInstance* find_instance(const ForwardGeometry& g, bool modified, bool short_shapes,
                                     Serves what = Serves::plain) {
  const ForwardInstance* chosen = nullptr;
  for (int i = 0; i < kForwardInstanceCount; ++i) {
    const ForwardInstance& candidate = *kForwardInstances[i];
    const ForwardTile& tile = candidate.tile;
    // Kernels that can do more are slower.
    const bool able = what == Serves::plain ? candidate.modified == modified : tile.packs;
    const bool serves = able && (what == Serves::split ? tile.splits : !tile.only_splits());
    if (candidate.is_short || candidate.type != g.type || !serves || g.d_qk > tile.d_qk ||
        g.d_v > tile.d_v)
      continue;
    if (chosen && (chosen->tile.d_qk != tile.d_qk || chosen->tile.d_v != tile.d_v)) break;
    chosen = &candidate;
    if (tile.longest == 0 || (short_shapes && std::max(g.s_q, g.s_k) <= tile.longest)) break;
  }
  return chosen;
}

const ForwardInstance* find_short_instance(const ForwardArguments& arguments) {
  const ForwardGeometry& g = arguments.geometry;
  for (int i = 0; i < kForwardInstanceCount; ++i) {
    const ForwardInstance& candidate = *kForwardInstances[i];
    const ForwardTile& tile = candidate.tile;
    if (!candidate.is_short || candidate.type != g.type || std::max(g.d_qk, g.d_v) > tile.d_qk)
      continue;
    const bool fits = std::max(g.s_q, g.s_k) <= tile.longest;
    return arguments.row_choice == 3 || (arguments.row_choice == 0 && fits) ? &candidate : nullptr;
  }
  return nullptr;
}

// The order in which query tiles are taken (TileOrder::Kind).
int choose_order(const ForwardArguments& arguments, int64_t tiles_per_head) {
  const ForwardGeometry& g = arguments.geometry;
  const bool uneven = arguments.mask.right < g.s_q + g.s_k && tiles_per_head > 1;
  return uneven ? arguments.tile_order == 2 ? 2 : 1 : 0;
}

// How many heads are dealt out in pairs of tiles (schedule.cuh): as many as leave the rest, and the
// pair that some blocks have had more than others, two rounds of tiles or more.
int count_paired_heads(int64_t heads, int64_t tiles_per_head, int64_t blocks) {
  int64_t paired = std::max<int64_t>(0, heads - blocks / tiles_per_head) / 2 * 2;
  while (paired > 0 &&
         (heads - paired) * tiles_per_head + paired / 2 * tiles_per_head % blocks < 2 * blocks)
    paired -= 2;
  return int(paired);
}

// Sequences and rows of the tensors: a varlen batch is one long sequence.
struct Extents {
  int64_t q_b, q_s, k_b, k_s;
};
Extents extents_of(const ForwardGeometry& g) {
  return {g.cu_seqlens_q ? 1 : g.b, g.cu_seqlens_q ? g.total_q : g.s_q, g.cu_seqlens_k ? 1 : g.b,
          g.cu_seqlens_k ? g.total_k : g.s_k};
}

bool encode_maps(const ForwardArguments& arguments, const ForwardChoice& choice, ForwardParams& p) {
  const ForwardGeometry& g = arguments.geometry;
  const ForwardOperands& t = arguments.operands;
  const auto [q_b, q_s, k_b, k_s] = extents_of(g);
  const ForwardRows& rows = choice.warpgroup;
  return encode_map(p.q_map, g.type, t.q, g.d_qk, q_s, g.h_q, q_b, t.q_stride, rows.positions,
                    rows.heads) &&
         encode_map(p.k_map, g.type, t.k, g.d_qk, k_s, g.h_k, k_b, t.k_stride, choice.keys) &&
         encode_map(p.v_map, g.type, t.v, g.d_v, k_s, g.h_k, k_b, t.v_stride, choice.keys) &&
         encode_map(p.o_map, g.type, t.o, g.d_v, q_s, g.h_q, q_b, t.o_stride, 16);
}

void fill_short_params(const ForwardArguments& arguments, ShortParams& p) {
  const ForwardOperands& t = arguments.operands;
  p.q = t.q;
  p.k = t.k;
  p.v = t.v;
  p.q_stride_b = t.q_stride.b, p.q_stride_s = t.q_stride.s, p.q_stride_h = t.q_stride.h;
  p.k_stride_b = t.k_stride.b, p.k_stride_s = t.k_stride.s, p.k_stride_h = t.k_stride.h;
  p.v_stride_b = t.v_stride.b, p.v_stride_s = t.v_stride.s, p.v_stride_h = t.v_stride.h;
  p.h_q = int(arguments.geometry.h_q);
  p.d_qk = int(arguments.geometry.d_qk);
}

void fill_score(const ForwardArguments& arguments, bool modified, ForwardParams& p) {
  const ForwardScore& score = arguments.score;
  p.sinks = score.sinks;
  p.alibi_slopes = score.alibi_slopes;
  constexpr double kLog2E = 1.4426950408889634;
  const bool capped = score.softcap != 0;
  p.modified = modified ? ForwardParams::scaled : ForwardParams::unmodified;
  p.score_log2 = float(double(capped ? score.softcap : score.scale) * kLog2E);
  p.scale_log2 = modified ? 1.0f : p.score_log2;
  if (capped) {
    p.modified = ForwardParams::capped;
    p.softcap_in = float(score.scale / (kSoftcapUnit * score.softcap));
    // tanh(y) / y in powers of y^2, 0 <= y < 0.625: least relative error (1.07e-7).
    constexpr double kSeries[] = {0.999999893132, -0.333319542502, 0.133045259976, -0.0518218666683,
                                  0.01505094513};
    double factor = double(score.softcap) * kLog2E * kSoftcapUnit;
    for (int i = 0; i < 5; ++i, factor *= kSoftcapUnit * kSoftcapUnit)
      p.softcap_series[i] = float(kSeries[i] * factor);
  }
}

// All but the tensor maps.
void fill_params(const ForwardArguments& arguments, const ForwardChoice& choice, ForwardParams& p) {
  const ForwardGeometry& g = arguments.geometry;
  const ForwardOperands& t = arguments.operands;
  const bool varlen_q = g.cu_seqlens_q;
  p.o = t.o;
  p.lse = t.lse;
  p.o_stride_b = varlen_q ? 0 : t.o_stride.b;
  p.o_stride_s = t.o_stride.s;
  p.o_stride_h = t.o_stride.h;
  p.lse_stride_h = extents_of(g).q_s;
  p.lse_stride_b = varlen_q ? 0 : g.h_q * g.s_q;
  p.cu_seqlens_q = g.cu_seqlens_q;
  p.cu_seqlens_k = g.cu_seqlens_k;
  p.k_lengths = g.k_lengths;
  fill_score(arguments, choice.modified, p);
  p.b = int(g.b);
  p.heads_per_kv_head = int(g.h_q / g.h_k);
  const ForwardRows& rows = choice.warpgroup;
  p.row_heads = rows.heads;
  p.row_positions = rows.positions;
  p.row_divisor = (65536 + rows.heads - 1) / rows.heads;
  p.splits = choice.splits;
  if (choice.splits > 1) {
    p.partials = static_cast<float*>(arguments.workspace);
    p.partial_rows = int(partial_rows(g));
  }
  p.tile_heads = int(choice.tile_heads * choice.splits);
  p.tile_heads_per_kv_head = int(choice.tile_heads / g.h_k * choice.splits);
  p.q_slice_bytes = rows.heads * rows.positions * choice.instance->tile.qk_panels() * 128;
  p.s_q = int(g.s_q);
  p.s_k = int(g.s_k);
  p.total_q = int(g.total_q);
  p.total_k = int(g.total_k);
  p.d_v = int(g.d_v);
  const int64_t far = g.s_q + g.s_k;  // as good as unbounded
  p.left = int(std::clamp<int64_t>(arguments.mask.left, -far, far));
  p.right = int(std::clamp<int64_t>(arguments.mask.right, -far, far));
  p.top_left = arguments.mask.top_left;
  p.always_online = arguments.disabled_fast_path;

  const int64_t heads = g.b * p.tile_heads;
  p.tiles_per_head = int(choice.tiles_per_head);
  p.tile_count = int(choice.query_tiles * choice.splits);
  // Heads of one section share the L2: their K and V should take at most 24 of its 50 MB.
  const int64_t head_bytes =
      std::max<int64_t>(1, g.s_k * (g.d_qk + g.d_v) * 2 * g.h_k / p.tile_heads);
  p.heads_per_section = int(std::clamp<int64_t>((int64_t(24) << 20) / head_bytes, 1, heads));
  p.order = choose_order(arguments, choice.tiles_per_head);
  if (p.order == 1) {
    p.paired_heads = count_paired_heads(heads, choice.tiles_per_head, choice.blocks);
    p.odd_pairs = int(p.paired_heads / 2 * choice.tiles_per_head % choice.blocks);
  }
  if (p.order == 2) p.tile_counter = static_cast<uint32_t*>(arguments.workspace);
}

cudaError_t enqueue(const ForwardChoice& choice, ShortParams& p, cudaStream_t stream) {
  void* kernel_arguments[] = {&p};  // the tiled kernels take the part that is ForwardParams
  // The prologue may overlap the end of the kernel before it in the stream; reads and writes wait.
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(unsigned(choice.blocks));
  launch.blockDim = dim3(unsigned(choice.threads));
  launch.dynamicSmemBytes = choice.instance->shared_bytes;
  launch.stream = stream;
  launch.attrs = &overlap;
  launch.numAttrs = choice.instance->is_short ? 0 : 1;
  return cudaLaunchKernelExC(&launch, choice.instance->kernel, kernel_arguments);
}

constexpr int64_t kMostTiles = int64_t(1) << 30;

ForwardStatus check_sizes(const ForwardArguments& arguments) {
  const ForwardGeometry& g = arguments.geometry;
  if (g.b < 0 || g.h_q < 0 || g.h_k < 1 || g.s_q < 0 || g.s_k < 0 || g.h_q % g.h_k != 0) {
    return {ForwardStatus::invalid, "lengths must not be negative and h_q a multiple of h_k",
            cudaSuccess};
  }
  constexpr int64_t kLongest = int64_t(1) << 28;
  if (g.s_q > kLongest || g.s_k > kLongest || g.total_q > kLongest * 4 ||
      g.total_k > kLongest * 4) {
    return refuse("sequences longer than 2^28 tokens, or more than 2^30 in all");
  }
  if (g.h_q > kMostTiles) return refuse("more than 2^30 query heads");
  if (g.b > kMostTiles / g.h_k) return refuse("more than 2^30 query tiles");  // a kv head has one
  if (g.d_qk < 8 || g.d_v < 8 || g.d_qk % 8 || g.d_v % 8)
    return refuse("head dimensions must be multiples of 8");
  if (!(arguments.score.softcap >= 0))
    return {ForwardStatus::invalid, "softcap must not be negative", cudaSuccess};
  return {};
}

// Instance, rows and splits.
ForwardStatus choose_instance(const ForwardArguments& arguments, int multiprocessors,
                              ForwardChoice& choice) {
  const ForwardGeometry& g = arguments.geometry;
  const ForwardScore& score = arguments.score;
  // Scales of 0 and below are for those kernels, too: they scale before they mask, and so tell a
  // score of -inf, which turns to NaN or +inf, from a masked one.
  const bool modified = score.softcap != 0 || score.alibi_slopes || score.scale <= 0;
  choice.modified = modified;
  choice.instance = find_short_instance(arguments);
  if (choice.instance) return {};
  const auto find = [&](Serves what) {
    return find_instance(g, modified, !arguments.no_short_shapes, what);
  };
  const ForwardInstance* const plain = find(Serves::plain);
  const ForwardInstance* const packed = find(Serves::packed);
  const ForwardInstance* const split = find(Serves::split);
  if (!plain) return refuse("no kernel for this head dimension and type");
  if (packed) choice.warpgroup = choose_rows(arguments, plain->tile, packed->tile, multiprocessors);
  if (arguments.row_choice == 2 && !packed)
    return refuse("no kernel for packed heads of this head dimension and type");
  choice.instance = choice.warpgroup.packed() ? packed : plain;
  if (arguments.splits > (split ? kMostSplits : 1)) return refuse("too many splits of the keys");
  if (split) {
    const ForwardSplit chosen = choose_split(arguments, choice.instance->tile, split->tile,
                                             choice.warpgroup, multiprocessors);
    if (chosen.splits > 1) {
      choice.instance = split;
      choice.warpgroup = chosen.rows;
      choice.splits = chosen.splits;
      choice.workspace_bytes = partial_bytes(g, chosen.splits);
      choice.merge_bytes = merge_read_bytes(g, chosen.splits);
    }
  }
  return {};
}

}  // namespace

ForwardStatus choose_forward(const ForwardArguments& arguments, int multiprocessors,
                             ForwardChoice& choice) {
  const ForwardGeometry& g = arguments.geometry;
  choice = {};
  if (g.b == 0 || g.h_q == 0 || g.s_q == 0) return {};
  ForwardStatus status = check_sizes(arguments);
  if (status.code == ForwardStatus::ok)
    status = choose_instance(arguments, multiprocessors, choice);
  if (status.code != ForwardStatus::ok) return status;
  const ForwardInstance* const instance = choice.instance;
  const ForwardTile& tile = instance->tile;
  choice.keys = tile.keys;
  if (instance->is_short) {
    choice.rows = choice.positions = kShortRows;
    choice.tile_heads = g.h_q;
    choice.threads = kShortThreads;
  } else {
    choice.rows = tile.rows();
    choice.positions = int64_t{tile.groups} * choice.warpgroup.positions;
    choice.tile_heads = choice.warpgroup.tile_heads(g.h_q, g.h_k);
    choice.threads = tile.threads();
  }
  choice.tiles_per_head = (g.s_q + choice.positions - 1) / choice.positions;
  if (g.b > kMostTiles / choice.splits / choice.tile_heads / choice.tiles_per_head)
    return refuse("more than 2^30 query tiles");
  choice.query_tiles = g.b * choice.tile_heads * choice.tiles_per_head;
  if (instance->is_short) {
    constexpr int kWarps = kShortThreads / 32;
    choice.blocks = int((choice.query_tiles + kWarps - 1) / kWarps);
  } else {
    choice.blocks = int(std::min<int64_t>(multiprocessors, choice.query_tiles * choice.splits));
  }
  return {};
}

static cudaError_t allow_shared_bytes(const ForwardInstance& instance) {
  return cudaFuncSetAttribute(instance.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              int(instance.shared_bytes));
}

cudaError_t load_forward(const ForwardChoice& choice) {
  if (!choice.instance) return cudaSuccess;
  const cudaError_t error = choice.splits > 1 ? load_merge(choice.instance->type) : cudaSuccess;
  return error != cudaSuccess ? error : allow_shared_bytes(*choice.instance);
}

// On the current device.
static ForwardStatus choose_here(const ForwardArguments& arguments, ForwardChoice& choice) {
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return {ForwardStatus::cuda_error, cudaGetErrorString(error), error};
  return choose_forward(arguments, multiprocessors, choice);
}

size_t forward_workspace_bytes(const ForwardArguments& arguments) {
  ForwardChoice choice;
  choose_here(arguments, choice);
  return choice.workspace_bytes;
}

ForwardStatus launch_forward(const ForwardArguments& arguments, cudaStream_t stream) {
  ForwardChoice choice;
  const ForwardStatus chosen = choose_here(arguments, choice);
  if (chosen.code != ForwardStatus::ok) return chosen;
  const cudaError_t error = load_forward(choice);
  if (error != cudaSuccess) return {ForwardStatus::cuda_error, cudaGetErrorString(error), error};
  return launch_forward(arguments, choice, stream);
}

ForwardStatus launch_forward(const ForwardArguments& arguments, const ForwardChoice& choice,
                             cudaStream_t stream) {
  const ForwardGeometry& g = arguments.geometry;
  const ForwardOperands& t = arguments.operands;
  if (!choice.instance) return {};
  if (choice.workspace_bytes > 0 && !arguments.workspace)
    return {ForwardStatus::invalid, "a split over keys needs a workspace", cudaSuccess};
  const auto [q_b, q_s, k_b, k_s] = extents_of(g);
  if (!tma_strides_fit(t.q, q_s, g.h_q, q_b, t.q_stride) ||
      !tma_strides_fit(t.k, k_s, g.h_k, k_b, t.k_stride) ||
      !tma_strides_fit(t.v, k_s, g.h_k, k_b, t.v_stride) ||
      !tma_strides_fit(t.o, q_s, g.h_q, q_b, t.o_stride)) {
    return refuse(
        "pointers must be 16-byte aligned and strides non-negative multiples of 8 elements");
  }
  ShortParams p{};
  fill_params(arguments, choice, p);
  if (choice.instance->is_short) {
    fill_short_params(arguments, p);
  } else {
    if (!find_encode_tiled())
      return {ForwardStatus::cuda_error, "the driver has no cuTensorMapEncodeTiled", cudaSuccess};
    if (!encode_maps(arguments, choice, p)) return refuse("TMA does not accept these strides");
  }
  cudaError_t error = allow_shared_bytes(*choice.instance);
  if (error == cudaSuccess && p.tile_counter) error = cudaMemsetAsync(p.tile_counter, 0, 4, stream);
  if (error == cudaSuccess) error = enqueue(choice, p, stream);
  if (error == cudaSuccess && choice.splits > 1)
    error = launch_merge(arguments, choice.splits, stream);
  if (error != cudaSuccess) return {ForwardStatus::cuda_error, cudaGetErrorString(error), error};
  return {};
}

}  // namespace abacist::cuda::sm90
