// The second kernel of a forward pass whose keys are split: O and LSE of each row from the partial
// results of all splits (partial.cuh).
//
// With M the largest maximum of a row and w_s = 2^(m_s - M):  O = sum w_s O_s / sum w_s l_s
// (FlashAttention's merge of key blocks). Sinks join here. O_s is divided by the sum before it is
// added up: no overflow that the whole row would not have. The order of all sums is fixed by the
// number of splits.
//
// A row's splits are dealt out to `row_warps` warps, which put their sums together in shared
// memory; a lane has 4 columns of each 128. A chain of two reads (sums, then O) from the L2 and a
// barrier: what counts is that all reads of a kind are under way at once, and that blocks are
// small: they wait for the kernel before on the few multiprocessors that it leaves. Bytes: partial
// results once, O and LSE.
#include <cuda_runtime.h>

#include <algorithm>

#include "../../ptx/sm90.cuh"
#include "merge.hpp"
#include "partial.cuh"
#include "rows.hpp"
#include "softmax.cuh"

namespace abacist::cuda::sm90 {
namespace {

constexpr int kMostWarps = 8;
constexpr float kNothingSeen = -1.0f;  // a weight

struct MergeParams {
  const float* partials;
  int splits, partial_rows, d_v;
  void* o;
  float* lse;
  const float* sinks;
  const int32_t* cu_seqlens_q;
  int64_t o_stride_b, o_stride_s, o_stride_h;
  int b, h_q, s_q, total_q;
  int rows, row_s;  // [b][h_q][s_q], or [h_q][total_q]; the last extent
  int row_warps;    // of a row, a power of two
  int never;        // 0: a branch on it keeps loads before it together (consumer.cuh)
};

// Where a row is, of [b][h_q][s_q], or of [h_q][total_q]. By a whole warp.
struct MergeRow {
  bool valid;  // varlen: rows that belong to no sequence are none
  int head = 0;
  int64_t o = 0;
  __device__ MergeRow(const MergeParams& p, int row) : valid(row < p.rows) {
    if (!valid) return;
    const int of_heads = row / p.row_s, position = row - of_heads * p.row_s;
    const int batch = p.cu_seqlens_q ? 0 : of_heads / p.h_q;
    head = of_heads - batch * p.h_q;
    o = batch * p.o_stride_b + head * p.o_stride_h + position * p.o_stride_s;
    if (p.cu_seqlens_q) valid = has_owner(p, position);
  }

 private:
  // Asks every sequence: lengths on the device may break their rules.
  static __device__ bool has_owner(const MergeParams& p, int token) {
    for (int begin = 0; begin < p.b; begin += 32) {
      bool owns = false;
      if (const int n = begin + int(threadIdx.x % 32); n < p.b) {
        const SequencePart part(p.cu_seqlens_q, n, p.s_q, p.total_q);
        owns = token >= part.offset && token < part.offset + part.length;
      }
      if (__any_sync(0xffffffffu, owns)) return true;
    }
    return false;
  }
};

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

// A row over all splits: the same in all lanes, and in all of the row's warps.
struct WholeRow {
  float m = -INFINITY, l = 0.0f;  // as of a row that was never split
  int first_seen;                 // a split in which it sees a key, if there is one

  // Leaves in `weights` what each split's O counts for, relative to m; kNothingSeen where it does
  // not.
  __device__ WholeRow(const MergeParams& p, int row, float (&weights)[kMostSplits]) {
    constexpr int kSums = kMostSplits / 32;  // of a lane
    const int lane = threadIdx.x % 32;
    const auto* sums =
        reinterpret_cast<const float2*>(p.partials + int64_t(p.partial_rows) * p.d_v) + row;
    const int64_t stride = int64_t(p.partial_rows) * (p.d_v + 2) / 2;
    float2 part[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int split = i * 32 + lane;
      part[i] = split < p.splits ? sums[split * stride] : float2{-INFINITY, 1.0f};
    }
    first_seen = kMostSplits;
#pragma unroll
    for (int i = kSums - 1; i >= 0; --i) {
      if (is_seen(part[i])) first_seen = i * 32 + lane, m = fmaxf(m, part[i].x);
    }
    m = warp_max(m);
    first_seen = __reduce_min_sync(0xffffffffu, first_seen);
    // A maximum of -inf is that of keys whose scores are: they weigh 0, also if all are.
    const float relative = m == -INFINITY ? 0.0f : m;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      float weight = kNothingSeen;
      if (is_seen(part[i])) {
        weight = ptx::exp2_approx(part[i].x - relative);
        l += weight * part[i].y;
      }
      if (i * 32 < p.splits) weights[i * 32 + lane] = weight;
    }
    l = first_seen < kMostSplits ? warp_sum(l) : 1.0f;
    __syncwarp();
  }
};

// A warp's share of a row's O: splits `first`, `first` + `step` and so on, their weights times
// `factor`. Where there is nothing to read, something is read that is there: no branch, so that all
// loads are under way at once.
template <int Panels>
__device__ __forceinline__ void add_splits(const MergeParams& p, int row, int first, int step,
                                           const float (&weights)[kMostSplits], int first_seen,
                                           float factor, float4 (&o)[Panels]) {
  constexpr int kLoads = 8 / Panels;  // splits asked for at once
  const int column = threadIdx.x % 32 * 4;
  const int64_t stride = int64_t(p.partial_rows) * (p.d_v + 2);
  const float* const from = p.partials + int64_t(row) * p.d_v;
  for (int begin = first; begin < p.splits; begin += kLoads * step) {
    float4 x[kLoads][Panels];
    float weight[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int split = begin + i * step;
      weight[i] = split < p.splits ? weights[split] : kNothingSeen;
      const float* line = from + (weight[i] == kNothingSeen ? first_seen : split) * stride;
#pragma unroll
      for (int panel = 0; panel < Panels; ++panel) {
        const int at = panel * 128 + column;
        x[i][panel] = __ldcg(reinterpret_cast<const float4*>(line + (at < p.d_v ? at : 0)));
      }
    }
#pragma unroll 1
    for (int i = 0; i < p.never; ++i) asm volatile("nanosleep.u32 20;" ::: "memory");
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (weight[i] == kNothingSeen) continue;
      const float by = weight[i] * factor;
#pragma unroll
      for (int panel = 0; panel < Panels; ++panel) {
        float4& sum = o[panel];
        sum.x = fmaf(by, x[i][panel].x, sum.x);
        sum.y = fmaf(by, x[i][panel].y, sum.y);
        sum.z = fmaf(by, x[i][panel].z, sum.z);
        sum.w = fmaf(by, x[i][panel].w, sum.w);
      }
    }
  }
}

// Panels: of 128 columns.
template <class Element, int Panels>
__global__ void __launch_bounds__(kMostWarps * 32)
    merge_kernel(const __grid_constant__ MergeParams p) {
  __shared__ float weights[kMostWarps][kMostSplits];
  __shared__ float4 shares[kMostWarps][Panels][32];
  ptx::launch_dependents();
  ptx::wait_for_prerequisites();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32,
            block_rows = blockDim.x / 32 / p.row_warps;
  const int member = warp % p.row_warps, row = int(blockIdx.x) * block_rows + warp / p.row_warps;
  const MergeRow at(p, row);
  float4 o[Panels] = {};
  float m = 0.0f, l = 0.0f;
  if (at.valid) {
    const WholeRow whole(p, row, weights[warp]);
    m = whole.m;
    l = whole.l;
    const float scaled = p.sinks ? add_sink(p.sinks[at.head] * 1.4426950408889634f, m, l) : 1.0f;
    // Divided before it is added up: nothing overflows that the row as a whole would not.
    if (whole.first_seen < kMostSplits)
      add_splits<Panels>(p, row, member, p.row_warps, weights[warp], whole.first_seen, scaled / l,
                         o);
  }
  if (p.row_warps > 1) {
#pragma unroll
    for (int panel = 0; panel < Panels; ++panel) shares[warp][panel][lane] = o[panel];
    __syncthreads();
    for (int other = 1; member == 0 && other < p.row_warps; ++other) {
#pragma unroll
      for (int panel = 0; panel < Panels; ++panel) {
        const float4 share = shares[warp + other][panel][lane];
        o[panel].x += share.x;
        o[panel].y += share.y;
        o[panel].z += share.z;
        o[panel].w += share.w;
      }
    }
  }
  if (!at.valid || member != 0) return;
  auto* const out = static_cast<Element*>(p.o) + at.o;
#pragma unroll
  for (int panel = 0; panel < Panels; ++panel) {
    const int column = panel * 128 + lane * 4;
    if (column >= p.d_v) break;
    *reinterpret_cast<uint2*>(out + column) = {ptx::pack<Element>(o[panel].x, o[panel].y),
                                               ptx::pack<Element>(o[panel].z, o[panel].w)};
  }
  if (p.lse && lane == 0) p.lse[row] = lse_of(m, l);
}

template <class Element>
const void* kernel_of(int64_t d_v) {
  return d_v <= 128 ? reinterpret_cast<const void*>(&merge_kernel<Element, 1>)
                    : reinterpret_cast<const void*>(&merge_kernel<Element, 2>);
}
const void* kernel_of(ForwardType type, int64_t d_v) {
  return type == ForwardType::f16 ? kernel_of<__half>(d_v) : kernel_of<__nv_bfloat16>(d_v);
}

// Eight splits a warp or so.
int warps_of_row(int splits) {
  int warps = 1;
  while (warps < kMostWarps && warps * 8 < splits) warps *= 2;
  return warps;
}

}  // namespace

int64_t merge_read_bytes(const ForwardGeometry& g, int splits) {
  const int64_t warps = warps_of_row(splits), loads = g.d_v <= 128 ? 8 : 4;
  const int64_t trips = (splits + warps * loads - 1) / (warps * loads);
  return result_rows(g) * warps * (trips * loads * g.d_v * 4 + splits * 32);
}

cudaError_t load_merge(ForwardType type) {
  for (const int64_t d_v : {128, 256}) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel_of(type, d_v));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t launch_merge(const ForwardArguments& arguments, int splits, cudaStream_t stream) {
  const ForwardGeometry& g = arguments.geometry;
  const ForwardOperands& t = arguments.operands;
  MergeParams p{};
  p.partials = static_cast<const float*>(arguments.workspace);
  p.splits = splits;
  p.partial_rows = int(partial_rows(g));
  p.d_v = int(g.d_v);
  p.o = t.o;
  p.lse = t.lse;
  p.sinks = arguments.score.sinks;
  p.cu_seqlens_q = g.cu_seqlens_q;
  p.o_stride_b = g.cu_seqlens_q ? 0 : t.o_stride.b;
  p.o_stride_s = t.o_stride.s;
  p.o_stride_h = t.o_stride.h;
  p.b = int(g.b);
  p.h_q = int(g.h_q);
  p.s_q = int(g.s_q);
  p.total_q = int(g.total_q);
  p.row_s = int(g.cu_seqlens_q ? g.total_q : g.s_q);
  p.rows = int(result_rows(g));
  p.row_warps = warps_of_row(splits);
  void* kernel_arguments[] = {&p};
  // It waits for the kernel before it, whose last blocks its launch overlaps.
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  const int warps = std::max(p.row_warps, 4), rows = warps / p.row_warps;  // of a block
  launch.gridDim = dim3(unsigned((p.rows + rows - 1) / rows));
  launch.blockDim = dim3(unsigned(warps * 32));
  launch.stream = stream;
  launch.attrs = &overlap;
  launch.numAttrs = 1;
  return cudaLaunchKernelExC(&launch, kernel_of(g.type, g.d_v), kernel_arguments);
}

}  // namespace abacist::cuda::sm90
