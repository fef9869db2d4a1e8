// What a caller hands to the Hopper forward kernel, and what it gets back. Host code only.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace abacist::cuda::sm90 {

enum class ForwardType { bf16, f16 };

// Strides in elements; the last axis is contiguous.
struct ForwardStrides {
  int64_t b = 0, s = 0, h = 0;
};

struct ForwardOperands {
  const void* q = nullptr;  // [b, s_q, h_q, d_qk], or [total_q, h_q, d_qk]
  const void* k = nullptr;  // [b, s_k, h_k, d_qk], or [total_k, h_k, d_qk]
  const void* v = nullptr;  // [b, s_k, h_k, d_v],  or [total_k, h_k, d_v]
  void* o = nullptr;        // [b, s_q, h_q, d_v],  or [total_q, h_q, d_v]
  float* lse = nullptr;     // [b, h_q, s_q], or [h_q, total_q]; contiguous; may be null
  ForwardStrides q_stride, k_stride, v_stride, o_stride;
};

struct ForwardGeometry {
  ForwardType type = ForwardType::bf16;
  int64_t b = 0, s_q = 0, s_k = 0;  // varlen: the longest lengths
  int64_t h_q = 0, h_k = 0, d_qk = 0, d_v = 0;
  int64_t total_q = 0, total_k = 0;       // varlen only
  const int32_t* cu_seqlens_q = nullptr;  // device, [b + 1]; null: dense
  const int32_t* cu_seqlens_k = nullptr;  // device, [b + 1]
  const int32_t* k_lengths = nullptr;     // device, [b]: keys used of each sequence; null: all
};

inline constexpr int64_t kUnbounded = INT64_MAX;

struct ForwardMask {
  int64_t left = kUnbounded;   // keys before the diagonal that stay visible
  int64_t right = kUnbounded;  // keys after it; causal: 0
  bool top_left = false;       // diagonal at j = i instead of j = i + len_k - len_q
};

struct ForwardScore {
  float scale = 1.0f;                   // 1 / sqrt(d_qk) by default, decided by the caller
  float softcap = 0.0f;                 // 0: none
  const float* alibi_slopes = nullptr;  // device, [h_q]; null: none
  const float* sinks = nullptr;         // device, [h_q]; null: none
};

struct ForwardArguments {
  ForwardOperands operands;
  ForwardGeometry geometry;
  ForwardMask mask;
  ForwardScore score;
  void* workspace = nullptr;   // ForwardChoice::workspace_bytes, 256-byte aligned, any content
  int disabled_fast_path = 0;  // tests: 1 = always the true running maximum
  int no_short_shapes = 0;     // tests: 1 = the shapes for long sequences also for short ones
  int tile_order = 0;  // tests: 0 = as the schedule decides, 2 = from a counter in the workspace
  // Tests: what the rows of a tile are. 0 = as the problem says, 1 = one head's, 2 = with the heads
  // of every group packed, 3 = 16 of one head (short.cuh) where d allows.
  int row_choice = 0;
  int splits = 0;  // tests: 0 = as the problem says, 1 = none, more = so many parts of the keys
};

struct ForwardStatus {
  enum Code { ok, unsupported, invalid, cuda_error } code = ok;
  const char* reason = "";
  cudaError_t cuda = cudaSuccess;
};

struct ForwardInstance;

// The 64 rows of a warpgroup: `heads` query heads of a kv head at each of `positions` positions.
// 1 x 64: nothing is packed.
struct ForwardRows {
  int heads = 1, positions = 64;
  bool packed() const { return heads > 1; }
  // Heads of a sequence that have query tiles of their own.
  int64_t tile_heads(int64_t h_q, int64_t h_k) const {
    return (h_q / h_k + heads - 1) / heads * h_k;
  }
};

// What a launch on a GPU with so many multiprocessors would be.
struct ForwardChoice {
  const ForwardInstance* instance = nullptr;  // null: nothing to launch
  bool modified = false;                      // softcap, ALiBi, scale <= 0
  int rows = 0, keys = 0;                     // of a tile
  ForwardRows warpgroup;                      // what its rows are
  int64_t tile_heads = 0, tiles_per_head = 0;
  int64_t positions = 0;        // of a tile
  int threads = 0, blocks = 0;  // of the launch
  int64_t query_tiles = 0;      // of all heads; varlen: at most
  int splits = 1;               // of each query tile's keys; a merge follows
  size_t workspace_bytes = 0;
  int64_t merge_bytes = 0;  // that the merge reads at most
};

// Of pointers only whether they are null counts: what a plan needs, without memory or a GPU.
ForwardStatus choose_forward(const ForwardArguments& arguments, int multiprocessors,
                             ForwardChoice& choice);

// Loads the kernel onto the current device. The first launch does so, too, but may then wait for
// what runs there.
cudaError_t load_forward(const ForwardChoice& choice);

// Enqueues the forward pass on `stream`: no allocation, no synchronisation. `choice` is that of the
// same problem. After a status other than ok nothing has been launched (a cuda_error of the launch
// itself excepted).
ForwardStatus launch_forward(const ForwardArguments& arguments, const ForwardChoice& choice,
                             cudaStream_t stream);

// Both for the current device, without a plan: for tests and benchmarks of the kernel alone.
size_t forward_workspace_bytes(const ForwardArguments& arguments);
ForwardStatus launch_forward(const ForwardArguments& arguments, cudaStream_t stream);

}  // namespace abacist::cuda::sm90
