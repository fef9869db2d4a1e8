// Host side of the Hopper forward kernel: checks, tensor maps, schedule, launch.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "arguments.hpp"
#include "instance.hpp"
#include "params.cuh"

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

// (d, s, h, b) with a box of 64 columns x rows. An axis of length 1 or 0 gets a stride TMA accepts.
bool encode_map(CUtensorMap& map, ForwardType type, const void* base, int64_t d, int64_t s,
                int64_t h, int64_t b, const ForwardStrides& stride, int rows) {
  const auto bytes = [](int64_t extent, int64_t elements) {
    return cuuint64_t(extent > 1 ? elements * 2 : 16);
  };
  const cuuint64_t sizes[4] = {
      cuuint64_t(std::max<int64_t>(d, 1)), cuuint64_t(std::max<int64_t>(s, 1)),
      cuuint64_t(std::max<int64_t>(h, 1)), cuuint64_t(std::max<int64_t>(b, 1))};
  const cuuint64_t strides[3] = {bytes(s, stride.s), bytes(h, stride.h), bytes(b, stride.b)};
  const cuuint32_t box[4] = {64, cuuint32_t(rows), 1, 1}, step[4] = {1, 1, 1, 1};
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
// (With softcap or ALiBi the long shapes of d 64, 192/128 and 256 would spill, so they are not
// built.)
const ForwardInstance* find_instance(const ForwardGeometry& g, bool modified, bool short_shapes) {
  const ForwardInstance* chosen = nullptr;
  for (int i = 0; i < kForwardInstanceCount; ++i) {
    const ForwardInstance& candidate = *kForwardInstances[i];
    const ForwardTile& tile = candidate.tile;
    if (candidate.type != g.type || candidate.modified != modified || g.d_qk > tile.d_qk ||
        g.d_v > tile.d_v)
      continue;
    if (chosen && (chosen->tile.d_qk != tile.d_qk || chosen->tile.d_v != tile.d_v)) break;
    chosen = &candidate;
    if (tile.longest == 0 || (short_shapes && std::max(g.s_q, g.s_k) <= tile.longest)) break;
  }
  return chosen;
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

}  // namespace

size_t forward_workspace_bytes(const ForwardArguments&) { return 0; }

ForwardStatus choose_forward(const ForwardArguments& arguments, int multiprocessors,
                             ForwardChoice& choice) {
  const ForwardGeometry& g = arguments.geometry;
  choice = {};
  if (g.b == 0 || g.h_q == 0 || g.s_q == 0) return {};
  if (g.b < 0 || g.h_q < 0 || g.h_k < 1 || g.s_q < 0 || g.s_k < 0 || g.h_q % g.h_k != 0) {
    return {ForwardStatus::invalid, "lengths must not be negative and h_q a multiple of h_k",
            cudaSuccess};
  }
  constexpr int64_t kLongest = int64_t(1) << 28;
  if (g.s_q > kLongest || g.s_k > kLongest || g.total_q > kLongest * 4 ||
      g.total_k > kLongest * 4) {
    return refuse("sequences longer than 2^28 tokens, or more than 2^30 in all");
  }
  if (g.d_qk < 8 || g.d_v < 8 || g.d_qk % 8 || g.d_v % 8)
    return refuse("head dimensions must be multiples of 8");
  const ForwardScore& score = arguments.score;
  const bool modified = score.softcap != 0 || score.alibi_slopes;
  if (!(score.softcap >= 0))
    return {ForwardStatus::invalid, "softcap must not be negative", cudaSuccess};
  const ForwardInstance* instance = find_instance(g, modified, !arguments.no_short_shapes);
  if (!instance) return refuse("no kernel for this head dimension and type");
  const ForwardTile& tile = instance->tile;
  const int64_t tiles_per_head = (g.s_q + tile.rows() - 1) / tile.rows();
  if (g.b > (int64_t(1) << 30) / g.h_q / tiles_per_head)
    return refuse("more than 2^30 query tiles");
  choice.instance = instance;
  choice.rows = tile.rows();
  choice.keys = tile.keys;
  choice.threads = tile.threads();
  choice.query_tiles = g.b * g.h_q * tiles_per_head;
  choice.blocks = int(std::min<int64_t>(multiprocessors, choice.query_tiles));
  return {};
}

cudaError_t load_forward(const ForwardChoice& choice) {
  if (!choice.instance) return cudaSuccess;
  return cudaFuncSetAttribute(choice.instance->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              int(choice.instance->shared_bytes));
}

ForwardStatus launch_forward(const ForwardArguments& arguments, cudaStream_t stream) {
  const ForwardGeometry& g = arguments.geometry;
  const ForwardOperands& t = arguments.operands;
  const ForwardScore& score = arguments.score;
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return {ForwardStatus::cuda_error, cudaGetErrorString(error), error};
  ForwardChoice choice;
  const ForwardStatus chosen = choose_forward(arguments, multiprocessors, choice);
  if (chosen.code != ForwardStatus::ok || !choice.instance) return chosen;
  const ForwardInstance* instance = choice.instance;
  const bool varlen_q = g.cu_seqlens_q, varlen_k = g.cu_seqlens_k;
  const int64_t q_b = varlen_q ? 1 : g.b, q_s = varlen_q ? g.total_q : g.s_q;
  const int64_t k_b = varlen_k ? 1 : g.b, k_s = varlen_k ? g.total_k : g.s_k;
  if (!tma_strides_fit(t.q, q_s, g.h_q, q_b, t.q_stride) ||
      !tma_strides_fit(t.k, k_s, g.h_k, k_b, t.k_stride) ||
      !tma_strides_fit(t.v, k_s, g.h_k, k_b, t.v_stride) ||
      !tma_strides_fit(t.o, q_s, g.h_q, q_b, t.o_stride)) {
    return refuse(
        "pointers must be 16-byte aligned and strides non-negative multiples of 8 elements");
  }
  const ForwardTile& tile = instance->tile;
  if (!find_encode_tiled())
    return {ForwardStatus::cuda_error, "the driver has no cuTensorMapEncodeTiled", cudaSuccess};

  ForwardParams p{};
  if (!encode_map(p.q_map, g.type, t.q, g.d_qk, q_s, g.h_q, q_b, t.q_stride, 64) ||
      !encode_map(p.k_map, g.type, t.k, g.d_qk, k_s, g.h_k, k_b, t.k_stride, tile.keys) ||
      !encode_map(p.v_map, g.type, t.v, g.d_v, k_s, g.h_k, k_b, t.v_stride, tile.keys) ||
      !encode_map(p.o_map, g.type, t.o, g.d_v, q_s, g.h_q, q_b, t.o_stride, 16)) {
    return refuse("TMA does not accept these strides");
  }
  p.o = t.o;
  p.lse = t.lse;
  p.o_stride_b = varlen_q ? 0 : t.o_stride.b;
  p.o_stride_s = t.o_stride.s;
  p.o_stride_h = t.o_stride.h;
  p.lse_stride_h = q_s;
  p.lse_stride_b = varlen_q ? 0 : g.h_q * g.s_q;
  p.cu_seqlens_q = g.cu_seqlens_q;
  p.cu_seqlens_k = g.cu_seqlens_k;
  p.k_lengths = g.k_lengths;
  p.sinks = score.sinks;
  p.alibi_slopes = score.alibi_slopes;
  constexpr double kLog2E = 1.4426950408889634;
  p.scale_log2 = float(double(score.scale) * kLog2E);
  if (score.softcap != 0) {
    p.softcap_in = float(2 * kLog2E * score.scale / score.softcap);
    p.softcap_out = float(kLog2E * score.softcap);
  }
  if (p.scale_log2 == 0 && !instance->modified)
    p.scale_log2 = 0x1p-149f;  // 0 times a masked score of -inf would be NaN
  p.frozen_masked = instance->modified || p.scale_log2 > 0;
  p.b = int(g.b);
  p.h_q = int(g.h_q);
  p.heads_per_kv_head = int(g.h_q / g.h_k);
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

  const int64_t tiles_per_head = (g.s_q + tile.rows() - 1) / tile.rows();
  const int64_t heads = g.b * g.h_q;
  p.tiles_per_head = int(tiles_per_head);
  p.tile_count = int(choice.query_tiles);
  // Heads of one section share the L2: their K and V should take at most 24 of its 50 MB.
  const int64_t head_bytes = std::max<int64_t>(1, g.s_k * (g.d_qk + g.d_v) * 2 * g.h_k / g.h_q);
  p.heads_per_section = int(std::clamp<int64_t>((int64_t(24) << 20) / head_bytes, 1, heads));
  p.order = choose_order(arguments, tiles_per_head);
  if (p.order == 1) {
    p.paired_heads = count_paired_heads(heads, tiles_per_head, choice.blocks);
    p.odd_pairs = int(p.paired_heads / 2 * tiles_per_head % choice.blocks);
  }
  if (p.order == 2) p.tile_counter = static_cast<uint32_t*>(arguments.workspace);
  error = load_forward(choice);
  if (error == cudaSuccess && p.tile_counter) error = cudaMemsetAsync(p.tile_counter, 0, 4, stream);
  if (error == cudaSuccess) {
    void* kernel_arguments[] = {&p};
    // The prologue may overlap the end of the kernel before it in the stream; reads and writes
    // wait.
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t launch{};
    launch.gridDim = dim3(unsigned(choice.blocks));
    launch.blockDim = dim3(unsigned(tile.threads()));
    launch.dynamicSmemBytes = instance->shared_bytes;
    launch.stream = stream;
    launch.attrs = &overlap;
    launch.numAttrs = 1;
    error = cudaLaunchKernelExC(&launch, instance->kernel, kernel_arguments);
  }
  if (error != cudaSuccess) return {ForwardStatus::cuda_error, cudaGetErrorString(error), error};
  return {};
}

}  // namespace abacist::cuda::sm90
