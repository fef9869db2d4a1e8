/* The C API of Abacist: exact attention that never writes the score matrix.
 *
 *     O = softmax(scale * Q K^T, over the visible keys) V,  LSE = logsumexp over the visible keys
 *
 * Everything that the C++ API offers, for C99 and newer, C++11 and newer, and for foreign function
 * interfaces that load the shared library without a compiler. docs/contract.md says what a result
 * must be.
 *
 *     abacist_tensors t = {.struct_size = sizeof t};
 *     const int64_t shape[] = {b, s, h, d};
 *     t.q = abacist_contiguous(q, ABACIST_F32, 4, shape);  // and t.k, t.v, t.o
 *     abacist_options options = {.struct_size = sizeof options, .causal = 1};
 *     if (abacist_forward(&t, &options, NULL, NULL) != ABACIST_OK) puts(abacist_last_error());
 *
 * Rules that hold for all of it:
 *
 * - **Status.** A function that can fail returns an abacist_status: ABACIST_OK, or what kind of
 *   thing went wrong; abacist_last_error() then says which argument, what it was and what it must
 *   be. Nothing is written after an error of an argument (page ids in a block table are data: see
 *   abacist_forward). No exception leaves the library, and it never prints or ends the program.
 * - **Structs.** Each begins with `struct_size`, which must be its `sizeof`. Every other field that
 *   is zero has its default, so a struct that is zeroed but for its size is one of defaults. Later
 *   versions append fields: a library takes older, shorter structs, and newer, longer ones as long
 *   as what it does not know is zero. abacist_tensor and abacist_partial have no size: they stay as
 *   they are. A pointer to options may be NULL for all defaults.
 * - **Numbers** of the enumerations are fixed; fields that hold them are int32_t.
 * - **Threads.** All functions may be called from any thread. A plan may run in many at once, each
 *   run with its own workspace and outputs.
 */
#ifndef ABACIST_ABACIST_H
#define ABACIST_ABACIST_H

#include <stddef.h>
#include <stdint.h>

#include "abacist/export.h"
#include "abacist/version.h"

/* NOLINTBEGIN(readability-identifier-naming): names of C */
#ifdef __cplusplus
#define ABACIST_NOEXCEPT noexcept
extern "C" {
#else
#define ABACIST_NOEXCEPT
#endif

/** What kind of thing went wrong: a value of enum abacist_status_code. */
typedef int32_t abacist_status;

enum abacist_status_code {
  ABACIST_OK = 0,
  ABACIST_INVALID_ARGUMENT = 1, /**< An argument breaks its documented rules. */
  ABACIST_UNSUPPORTED = 2,      /**< Valid, but no backend at hand computes it. */
  ABACIST_OUT_OF_MEMORY = 3,    /**< Memory could not be had. */
  ABACIST_DEVICE_ERROR = 4,     /**< The device runtime reported a failure. */
  ABACIST_INTERNAL_ERROR = 5    /**< A defect of the library, please report it. */
};

/** Element types. */
enum abacist_dtype {
  ABACIST_F32 = 0,
  ABACIST_BF16 = 1,
  ABACIST_F16 = 2,
  ABACIST_F64 = 3,
  ABACIST_I32 = 4,
  ABACIST_U8 = 5 /**< Truth values: 0 is false, anything else true. */
};

enum abacist_device_type { ABACIST_CPU = 0, ABACIST_CUDA = 1 };

enum abacist_pass { ABACIST_FORWARD = 0, ABACIST_BACKWARD = 1 };

/** Where query 0 stands among the keys: `shift = len_k - len_q` (bottom-right, the last query sees
 *  the last key) or 0 (top-left). */
enum abacist_align { ABACIST_BOTTOM_RIGHT = 0, ABACIST_TOP_LEFT = 1 };

/** ABACIST_BACKEND_AUTOMATIC takes the first implementation that serves. Another value forces one,
 *  and it is an error if that one cannot. */
enum abacist_backend {
  ABACIST_BACKEND_AUTOMATIC = 0,
  ABACIST_BACKEND_CPU = 1,
  ABACIST_BACKEND_REFERENCE = 2, /**< float64, O(N^2): the oracle of the tests */
  ABACIST_BACKEND_CUDA = 3
};

/** A side of a window without a bound. */
#define ABACIST_UNBOUNDED INT64_MAX

/** Entries of a tensor's shape and stride. */
#define ABACIST_MAX_RANK 4

/** A non-owning strided view. One whose bytes are all zero (rank 0) is absent. */
typedef struct abacist_tensor {
  void* data;           /**< Element [0, ..., 0]; only an output is written through it. */
  int32_t dtype;        /**< enum abacist_dtype */
  int32_t rank;         /**< Number of axes; 0: no tensor. */
  int32_t device_type;  /**< enum abacist_device_type */
  int32_t device_index; /**< 0 for the CPU. */
  int64_t shape[ABACIST_MAX_RANK];
  int64_t stride[ABACIST_MAX_RANK]; /**< In elements, any sign. */
} abacist_tensor;

/** The operands of both passes; what a pass does not list must be absent.
 *
 *  Forward reads q, k, v and writes o and, if present, lse. Backward reads q, k, v, o, lse (both as
 *  the forward pass wrote them) and d_o, and writes dq, dk, dv.
 *
 *  Dense tensors are `[b, s, h, d]`; with cu_seqlens they are `[total, h, d]`. q, k and v share one
 *  type of f32, bf16 and f16 (the reference backend takes f64 and mixtures). h_q % h_k == 0: query
 *  head h uses key/value head h / (h_q / h_k). Outputs may not overlap any other operand. */
typedef struct abacist_tensors {
  size_t struct_size;
  abacist_tensor q;            /**< [b, s_q, h_q, d_qk] or [total_q, h_q, d_qk] */
  abacist_tensor k;            /**< [b, s_k, h_k, d_qk] or [total_k, h_k, d_qk] */
  abacist_tensor v;            /**< [b, s_k, h_k, d_v] or [total_k, h_k, d_v] */
  abacist_tensor o;            /**< [b, s_q, h_q, d_v] or [total_q, h_q, d_v]; type of q, or f32 */
  abacist_tensor lse;          /**< f32 [b, h_q, s_q] or [h_q, total_q]; natural logarithm.
                                    Forward: optional. */
  abacist_tensor d_o;          /**< Backward: gradient by o; its shape, type of q or f32. */
  abacist_tensor d_lse;        /**< Backward: gradient by lse, optional; f32, its shape. */
  abacist_tensor dq, dk, dv;   /**< Backward: shapes of q, k, v, their type or f32. */
  abacist_tensor alibi_slopes; /**< Optional; f32 [h_q] or [b, h_q]; adds
                                    -slope * |i + shift - j| to a score. */
  abacist_tensor cu_seqlens_q; /**< Varlen: i32 [b + 1], contiguous, 0 first, ascending. */
  abacist_tensor cu_seqlens_k; /**< Varlen: i32 [b + 1], contiguous. */
  abacist_tensor sinks;        /**< Optional; f32 [h_q], a raw logit per head (not scaled, capped or
                                    biased; -inf: none) whose exp joins the denominator once. lse
                                    includes it; a row that sees no key has lse = sink. Partial
                                    results carry no sink: give it to abacist_merge. */
  abacist_tensor d_sinks;      /**< Backward: gradient by sinks, optional; f32 [h_q]. */
  abacist_tensor key_lengths;  /**< Dense, optional; i32 [b], contiguous: sequence n has keys
                                    [0, key_lengths[n]) of its s_k; beyond, nothing is read, and
                                    dk and dv are set to 0. */
  abacist_tensor bias;         /**< Optional; [b|1, h_q|1, s_q|1, s_k], f32 or the type of q: added
                                    to the score, not scaled. An axis of 1 stands for all. -inf hides
                                    a key as a 0 in `visible` does; NaN and +inf make the row NaN.
                                    Varlen: s_q and s_k are max_s_q and max_s_k, and rows and keys
                                    count from their sequence's first. */
  abacist_tensor d_bias;       /**< Backward: gradient by bias, optional; f32, its shape. */
  abacist_tensor visible;      /**< Optional; u8, shaped as bias can be: a query sees a key only
                                    where this is not 0 (on top of the mask of the options). */
  abacist_tensor block_table;  /**< Forward, optional; i32 [b, max_pages], rows contiguous: k and v
                                    are pools [pages, page_size, h_k, d], key j of sequence n is row
                                    j % page_size of page block_table[n, j / page_size];
                                    key_lengths is required. Pages that no query sees are not read.
                                    Keys of a page outside [0, pages) are skipped and
                                    abacist_plan_device_status tells, on the host, too; there
                                    abacist_forward returns what it tells. */
} abacist_tensors;

/** The pointers alone, for a run of a plan that knows the rest. NULL where the plan has no such
 *  operand. */
typedef struct abacist_pointers {
  size_t struct_size;
  void *q, *k, *v, *o, *lse, *d_o, *d_lse, *dq, *dk, *dv;
  void *alibi_slopes, *cu_seqlens_q, *cu_seqlens_k;
  void *sinks, *d_sinks, *key_lengths;
  void *bias, *d_bias, *visible;
  void* block_table;
} abacist_pointers;

/** Mask and score: everything but the data and the shapes. */
typedef struct abacist_options {
  size_t struct_size;
  int32_t causal;       /**< 1: query i sees key j only if j <= i + shift. */
  int32_t align;        /**< enum abacist_align */
  int32_t has_window;   /**< 1: the two bounds hold, i + shift - left <= j <= i + shift + right. */
  int32_t has_scale;    /**< 1: `scale` holds; else 1 / sqrt(d_qk). */
  int64_t window_left;  /**< >= 0, or ABACIST_UNBOUNDED */
  int64_t window_right; /**< >= 0, or ABACIST_UNBOUNDED */
  double scale;         /**< Factor of q k; finite in float, may be zero or negative. */
  double softcap;       /**< Scores become cap * tanh(score / cap); 0: none. */
  int64_t max_s_q;      /**< Varlen: bound of the lengths, required; ignored otherwise. */
  int64_t max_s_k;
  double dropout_p; /**< In [0, 1]: O = (M o P / (1 - p)) V, lse stays that without. M is a
                         function of (seed, sequence, head, query, key), the same in both
                         passes; docs/contract.md has the bits. */
  uint64_t dropout_seed;
} abacist_options;

/** How to plan. The environment variables ABACIST_BACKEND (automatic, cpu, reference, cuda) and
 *  ABACIST_CPU_TARGET (portable, avx2, avx512, neon) force a choice for tests. */
typedef struct abacist_plan_options {
  size_t struct_size;
  int32_t backend; /**< enum abacist_backend */
  int32_t threads; /**< At most so many; 0: those of the calling thread's oneTBB arena, which
                      honours the affinity mask. Never changes a result's bits, and means nothing
                        on a GPU. */
  int32_t batch_invariant; /**< 1: a sequence's results depend on that sequence alone, not on b, on
                                other sequences, nor on whether k and v are dense, varlen or paged
                                (see PlanOptions in plan.hpp). May be slower. */
  int32_t reserved;        /**< 0 */
} abacist_plan_options;

/** `done` is the share of the work done so far, in [0, 1]. Called from worker threads. */
typedef void (*abacist_progress)(double done, void* context);

/** How to run. */
typedef struct abacist_run_options {
  size_t struct_size;
  void* workspace;        /**< Of the plan's workspace_bytes, aligned to 256 bytes, in the memory of
                               the tensors' device, any content, for one run at a time. The one-line
                               calls allocate it if NULL: on the host, or by cudaMallocAsync and
                               cudaFreeAsync on the stream. */
  size_t workspace_bytes; /**< Size of what `workspace` points at. */
  void* stream;           /**< A cudaStream_t of the tensors' device: the run is enqueued there and
                               returns without waiting. NULL: the legacy default stream; tensors on
                               the host: must be NULL. It may be under capture (a run with a
                               workspace allocates nothing and waits for nothing). */
  abacist_progress progress; /**< Runs on a GPU never call it. */
  void* progress_context;
} abacist_run_options;

/** Bits of a device run's status word, the first 4 bytes of its workspace if the plan has lengths
 *  in device memory: which operand there broke its rules. */
enum abacist_device_fault {
  ABACIST_FAULT_CU_SEQLENS_Q = 1,
  ABACIST_FAULT_CU_SEQLENS_K = 2,
  ABACIST_FAULT_KEY_LENGTHS = 4,
  ABACIST_FAULT_BLOCK_TABLE = 8
};

/** Required alignment of a workspace. */
#define ABACIST_WORKSPACE_ALIGNMENT 256

/** What a plan will do. A figure is exact where its `_exact` is 1, else an upper bound (varlen:
 *  lengths are data). */
typedef struct abacist_plan_info {
  size_t struct_size;
  const char* kernel; /**< E.g. "cpu.forward.avx512"; lives as long as the plan. */
  int32_t rows;       /**< Query rows of a tile (heads of a group packed in). */
  int32_t keys;       /**< Keys of a tile. */
  int64_t splits;     /**< Parts that the keys of a row are cut into; a function of the problem,
                           on a GPU of its number of multiprocessors, too. */
  int64_t work_items;
  int32_t threads;        /**< That a run uses; on a GPU those of a block. */
  int32_t grid;           /**< Blocks of the launch; 0 on the host. */
  size_t workspace_bytes; /**< Shared part + threads * scratch_bytes_per_thread. */
  size_t scratch_bytes_per_thread;
  int64_t visible_pairs;         /**< (query row, key) pairs that see each other, all heads. */
  int64_t flops;                 /**< Of those: 2 (d_qk + d_v), backward 2 (3 d_qk + 2 d_v). */
  int64_t slow_memory_bytes;     /**< To and from slow memory, as often as each tile moves; on a
                                      GPU between the L2 cache and the multiprocessors. */
  int64_t operand_bytes;         /**< Each operand once: no implementation moves less. */
  int64_t standard_memory_bytes; /**< For attention that writes scores and probabilities. */
  int32_t visible_pairs_exact;
  int32_t flops_exact;
  int32_t slow_memory_bytes_exact;
  int32_t operand_bytes_exact;
  int32_t standard_memory_bytes_exact;
  int32_t deterministic;   /**< 1: same bits on every run, thread count and timing. */
  size_t declined;         /**< Implementations passed over; see abacist_plan_declined. */
  int32_t batch_invariant; /**< As abacist_plan_options asked. */
  int32_t reserved;        /**< 0 */
} abacist_plan_info;

/** Which elements of a head turn together: neighbours (2i, 2i + 1), or (i, i + d_rot / 2). */
enum abacist_rotary_style { ABACIST_INTERLEAVED = 0, ABACIST_HALF_SPLIT = 1 };

/** Rotary position embedding: a pair (a, b) of the first d_rot elements of a head at position p
 *  becomes (a cos - b sin, a sin + b cos); elements past d_rot stay. */
typedef struct abacist_rotary {
  size_t struct_size;
  abacist_tensor cos; /**< f32 [positions, d_rot / 2] */
  abacist_tensor sin; /**< As cos. */
  int32_t style;      /**< enum abacist_rotary_style */
  int32_t reserved;   /**< 0 */
} abacist_rotary;

/** New keys and values, and the cache that takes them; one type of f32, bf16, f16. */
typedef struct abacist_append_tensors {
  size_t struct_size;
  abacist_tensor k;           /**< [b, s_new, h_k, d_qk] */
  abacist_tensor v;           /**< [b, s_new, h_k, d_v] */
  abacist_tensor k_cache;     /**< [b, s_k, h_k, d_qk], or [pages, page_size, h_k, d_qk] */
  abacist_tensor v_cache;     /**< [b, s_k, h_k, d_v], or [pages, page_size, h_k, d_v] */
  abacist_tensor lengths;     /**< i32 [b]: keys that each sequence has already. */
  abacist_tensor block_table; /**< With pages: i32 [b, max_pages]. */
} abacist_append_tensors;

/** One partial result: attention of the same queries over a part of the keys. */
typedef struct abacist_partial {
  abacist_tensor o;   /**< [b, s_q, h_q, d_v] or [total_q, h_q, d_v]; f32, bf16 or f16 */
  abacist_tensor lse; /**< f32 [b, h_q, s_q] or [h_q, total_q] */
} abacist_partial;

/** A validated problem with the implementation that serves it. */
typedef struct abacist_plan abacist_plan;

/* ---- Errors ------------------------------------------------------------------------------- */

/** Text of the last error in this thread: "invalid argument: k: h_k is 3, must divide h_q = 4", or
 *  "" before the first. It stays until the next error in this thread; a success leaves it alone. */
ABACIST_API const char* abacist_last_error(void) ABACIST_NOEXCEPT;

/** The argument of that error ("k", "window_left"), or "" if it is not one argument's fault. */
ABACIST_API const char* abacist_last_error_argument(void) ABACIST_NOEXCEPT;

/** What that argument was and what it must be: "h_k is 3, must divide h_q = 4". */
ABACIST_API const char* abacist_last_error_message(void) ABACIST_NOEXCEPT;

/* ---- One-line calls ----------------------------------------------------------------------- */

/** O = softmax(scale Q K^T + mask) V, and LSE if it is present: planned and run.
 *  Reads `tensors->struct_size` and the operands; the other arguments may be NULL.
 *  Page ids in a block table are data: keys of a page outside the pool are skipped, O and LSE are
 *  written, and on the host the call then returns ABACIST_INVALID_ARGUMENT for `block_table`, as
 *  abacist_plan_device_status does. On a GPU (no pages so far, but lengths in device memory) it
 *  returns once the run is enqueued and cannot tell: where that matters, keep a plan and its
 *  workspace, and ask abacist_plan_device_status. */
ABACIST_API abacist_status abacist_forward(const abacist_tensors* tensors,
                                           const abacist_options* options,
                                           const abacist_plan_options* plan_options,
                                           const abacist_run_options* run_options) ABACIST_NOEXCEPT;

/** dQ, dK, dV from dO (and dLSE). */
ABACIST_API abacist_status
abacist_backward(const abacist_tensors* tensors, const abacist_options* options,
                 const abacist_plan_options* plan_options,
                 const abacist_run_options* run_options) ABACIST_NOEXCEPT;

/** Merges partial results over disjoint sets of keys into `into->o` and, if present, `into->lse`:
 *  `lse = log sum exp(lse_p)`, `o = sum exp(lse_p - lse) o_p`, in the order given. (0, -inf) is
 *  neutral; one non-empty part is returned bit for bit (types permitting). `into->sinks`, if
 *  present, join the denominator once. No other operand may be present. On the host only. */
ABACIST_API abacist_status abacist_merge(const abacist_partial* parts, size_t count,
                                         const abacist_tensors* into) ABACIST_NOEXCEPT;

/* ---- Plans -------------------------------------------------------------------------------- */

/** Checks every rule that needs no data (the tensors' `data` is not looked at). */
ABACIST_API abacist_status abacist_validate(int32_t pass, const abacist_tensors* tensors,
                                            const abacist_options* options) ABACIST_NOEXCEPT;

/** Validates the problem, walks the implementations in order, and stores the plan of the first that
 *  serves in `*plan` (NULL after an error), to be freed with abacist_plan_destroy. Reads no tensor
 *  data; costs microseconds.
 *
 *     abacist_plan* plan;
 *     if (abacist_plan_create(ABACIST_FORWARD, &t, &options, NULL, &plan) != ABACIST_OK) ...
 *     abacist_plan_info info = {.struct_size = sizeof info};
 *     abacist_plan_get_info(plan, &info);
 *     size_t bytes = (info.workspace_bytes + 255) / 256 * 256;
 *     abacist_run_options run = {.struct_size = sizeof run,
 *                                .workspace = aligned_alloc(256, bytes), .workspace_bytes = bytes};
 *     abacist_plan_run(plan, &t, &run);
 */
ABACIST_API abacist_status abacist_plan_create(int32_t pass, const abacist_tensors* tensors,
                                               const abacist_options* options,
                                               const abacist_plan_options* plan_options,
                                               abacist_plan** plan) ABACIST_NOEXCEPT;

/** Frees a plan; NULL is fine. */
ABACIST_API void abacist_plan_destroy(abacist_plan* plan) ABACIST_NOEXCEPT;

/** Fills `*info`, as far as its `struct_size` says that it reaches. */
ABACIST_API abacist_status abacist_plan_get_info(const abacist_plan* plan,
                                                 abacist_plan_info* info) ABACIST_NOEXCEPT;

/** "name: reason" of the implementation number `index` that was passed over; NULL past the last.
 *  Lives as long as the plan. */
ABACIST_API const char* abacist_plan_declined(const abacist_plan* plan,
                                              size_t index) ABACIST_NOEXCEPT;

/** The problem that was planned; each of the three may be NULL. The tensors' `data` is NULL. */
ABACIST_API abacist_status abacist_plan_get_problem(const abacist_plan* plan, int32_t* pass,
                                                    abacist_tensors* tensors,
                                                    abacist_options* options) ABACIST_NOEXCEPT;

/** The plan as text, several lines without a line break at the end. Stores its length without the
 *  final 0 in `*length` (may be NULL), and as much of it as fits, always with a final 0, in `text`
 *  (may be NULL if `capacity` is 0). */
ABACIST_API abacist_status abacist_plan_explain(const abacist_plan* plan, char* text,
                                                size_t capacity, size_t* length) ABACIST_NOEXCEPT;

/** Runs the plan. The tensors must have the types, shapes and strides that were planned. Every
 *  argument is checked before anything is written. */
ABACIST_API abacist_status abacist_plan_run(const abacist_plan* plan,
                                            const abacist_tensors* tensors,
                                            const abacist_run_options* options) ABACIST_NOEXCEPT;

/** The same for callers that know that their tensors are laid out as was planned: pointers alone.
 *  Cheapest way to run from another language. */
ABACIST_API abacist_status
abacist_plan_run_pointers(const abacist_plan* plan, const abacist_pointers* pointers,
                          const abacist_run_options* options) ABACIST_NOEXCEPT;

/** What the last run with this workspace found in operands that only the device reads (cu_seqlens,
 *  key_lengths) and, on the host, too, in a block table. Waits for the stream, then reads the
 *  status word: ABACIST_OK, or ABACIST_INVALID_ARGUMENT for the operand that broke its rules. Such
 *  data never makes a run touch memory outside its operands; the rows of a sequence whose lengths
 *  break the rules are unspecified. Plans without such operands are always fine and do not wait. */
ABACIST_API abacist_status abacist_plan_device_status(
    const abacist_plan* plan, const abacist_run_options* options) ABACIST_NOEXCEPT;

/* ---- Caches of keys and values ------------------------------------------------------------ */

/** Writes k, rotated if `rotary` is not NULL, and v behind the keys that each sequence has: row r
 * of sequence n becomes key lengths[n] + r, which is its position, too. The caller raises the
 * lengths afterwards. On the host. A cache without room, a page id outside the pool, a position
 * past the tables or a block table that sends two new keys to the same row of the same page is an
 * error, and then nothing has been written. */
ABACIST_API abacist_status abacist_append(const abacist_append_tensors* tensors,
                                          const abacist_rotary* rotary) ABACIST_NOEXCEPT;

/** Rotates x [b, s, h, d] to `out`, of the same shape and type (x itself is fine): row r of
 * sequence n stands at position positions[n] + r; positions i32 [b]. */
ABACIST_API abacist_status abacist_rotate(const abacist_tensor* x, const abacist_tensor* positions,
                                          const abacist_rotary* rotary,
                                          const abacist_tensor* out) ABACIST_NOEXCEPT;

/* ---- Tensors and what is there ------------------------------------------------------------ */

/** A row-major contiguous CPU tensor; `shape` has `rank` entries. A rank outside [0, 4] or a shape
 *  that overflows gives a tensor that every call rejects. */
ABACIST_API abacist_tensor abacist_contiguous(void* data, int32_t dtype, int32_t rank,
                                              const int64_t* shape) ABACIST_NOEXCEPT;

/** Bytes of an element, 0 for a number that is no dtype. */
ABACIST_API size_t abacist_dtype_size(int32_t dtype) ABACIST_NOEXCEPT;

/** "f32", "cpu", "invalid argument", ...; "unknown" for a number without a name. */
ABACIST_API const char* abacist_dtype_name(int32_t dtype) ABACIST_NOEXCEPT;
ABACIST_API const char* abacist_backend_name(int32_t backend) ABACIST_NOEXCEPT;
ABACIST_API const char* abacist_status_name(abacist_status status) ABACIST_NOEXCEPT;

/** 1 if this build of the library has the backend. */
ABACIST_API int32_t abacist_has_backend(int32_t backend) ABACIST_NOEXCEPT;

/** "0.1.0" of the library that is loaded (the ABACIST_VERSION_ macros are those of the header). */
ABACIST_API const char* abacist_version(void) ABACIST_NOEXCEPT;

/** The instruction sets that the CPU backend was built for and this processor has, best first,
 *  comma-separated: "avx512,avx2,portable". */
ABACIST_API const char* abacist_cpu_targets(void) ABACIST_NOEXCEPT;

#ifdef __cplusplus
} /* extern "C" */
#endif
/* NOLINTEND(readability-identifier-naming) */

#endif
