// Plan once, run many times.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "abacist/problem.hpp"
#include "abacist/status.hpp"

struct CUstream_st;  // CUDA's; cudaStream_t and CUstream are pointers to it

namespace abacist {

/// Where work of a GPU is enqueued: a cudaStream_t, in a header that needs no CUDA.
using Stream = ::CUstream_st*;

enum class Backend : std::uint8_t { automatic, cpu, reference, cuda };

ABACIST_API const char* to_string(Backend backend) noexcept;

struct PlanOptions {
  /// `automatic` takes the first implementation that serves; another value forces one, and it is an
  /// error if that one cannot. The environment variable ABACIST_BACKEND forces one for tests, and
  /// ABACIST_CPU_TARGET (portable, avx2, avx512, neon) an instruction set.
  Backend backend = Backend::automatic;
  /// Threads that a run may use at most (never more than the work has pieces); 0: as many as the
  /// calling thread's oneTBB arena has (the default arena honours the affinity mask). Never changes
  /// a result's bits, and means nothing on a GPU.
  int threads = 0;
  /// The bits of a sequence's results (O, LSE, dQ, dK, dV) then depend on that sequence alone: not
  /// on b, on other sequences, on the longest length, nor on whether K and V are dense, varlen or
  /// paged. Tiles are fixed by the head dimensions and keys are never split, so small batches may
  /// be slower. Gradients that sum over sequences (d_bias over b, d_sinks) depend on them all.
  /// Plans for a GPU refuse it so far.
  bool batch_invariant = false;
};

/// A figure of the plan, and whether it is exact or an upper bound (varlen: lengths are data).
struct Figure {
  std::int64_t value = 0;
  bool exact = true;
};

/// What a plan will do, readable before anything runs.
struct PlanInfo {
  std::string kernel;  ///< e.g. "cpu.forward.avx512"
  int rows = 0;        ///< query rows of a tile (heads of a group packed in)
  int keys = 0;        ///< keys of a tile
  /// Parts that the keys of a row are cut into; a function of the problem, on a GPU of its number
  /// of multiprocessors, too.
  std::int64_t splits = 1;
  std::int64_t work_items = 0;
  int threads = 1;                  ///< that a run uses; on a GPU those of a block
  int grid = 0;                     ///< blocks of the launch; 0 on the host
  std::size_t workspace_bytes = 0;  ///< shared part + threads * scratch_bytes_per_thread
  std::size_t scratch_bytes_per_thread = 0;
  Figure visible_pairs;  ///< (query row, key) pairs that the mask lets see each other, all heads
  Figure flops;          ///< of those pairs: 2 (d_qk + d_v) forward, 2 (3 d_qk + 2 d_v) backward
  Figure slow_memory_bytes;  ///< to and from slow memory, each tile counted as often as it moves;
                             ///< on a GPU between the L2 cache and the multiprocessors
  Figure operand_bytes;      ///< each operand once: no implementation moves less
  Figure standard_memory_bytes;  ///< the same for attention that writes scores and probabilities
  bool deterministic = true;     ///< same bits on every run, thread count and timing
  bool batch_invariant = false;  ///< as PlanOptions asked
  std::vector<std::string> declined;  ///< "name: reason" of each implementation passed over
};

/// Bits of a device run's status word: which operand in device memory broke its rules.
struct DeviceFault {
  static constexpr std::uint32_t cu_seqlens_q = 1;
  static constexpr std::uint32_t cu_seqlens_k = 2;
  static constexpr std::uint32_t key_lengths = 4;
  static constexpr std::uint32_t block_table = 8;  ///< on the host, too; its keys were skipped
};

/// Caller-owned memory for one run at a time; any initial content.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

inline constexpr std::size_t kWorkspaceAlignment = 256;

struct RunOptions {
  /// A plan's run needs one of info().workspace_bytes, aligned to kWorkspaceAlignment and in the
  /// memory of the tensors' device (empty is fine if that is 0). The one-line calls allocate when
  /// it is empty: host memory, or cudaMallocAsync and cudaFreeAsync on the stream.
  Workspace workspace{};
  /// Tensors on a GPU: the run is enqueued here, in order, and returns without waiting; the default
  /// null is CUDA's legacy default stream. It must belong to the tensors' device, and may be under
  /// capture: a run with a workspace allocates nothing and waits for nothing. An error where the
  /// tensors are on the host.
  Stream stream = nullptr;
  /// Called now and then from worker threads with the share done so far, in [0, 1]. Must not throw.
  /// Runs on a GPU never call it: they are over, for the host, once they are enqueued.
  void (*progress)(double done, void* context) = nullptr;
  void* progress_context = nullptr;
};

/// A validated problem with the implementation that serves it. Cheap to copy; safe to run from many
/// threads at once, each run with its own workspace and outputs.
class ABACIST_API Plan {
 public:
  const PlanInfo& info() const noexcept;
  const Problem& problem() const noexcept;

  /// Runs the plan. The tensors must have the specs that were planned. Every host argument is
  /// checked before anything is written.
  Status run(const ForwardTensors& tensors, const RunOptions& options = {}) const;
  Status run(const BackwardTensors& tensors, const RunOptions& options = {}) const;

  /// What the last run with this workspace found in operands that only the device reads
  /// (cu_seqlens, key_lengths) and, on the host, too, in a block table. Waits for `options.stream`,
  /// then reads the status word. Ok, or an invalid_argument error that names the operand. Such data
  /// never makes a run touch memory outside its operands; the rows of a sequence whose lengths
  /// break the rules are unspecified. Plans without such operands are always fine and do not wait.
  ///
  ///     Status s = p->run(tensors, {.workspace = mine, .stream = stream});
  ///     if (s) s = p->device_status({.workspace = mine, .stream = stream});
  ///
  /// To read it without waiting (in a graph, say), copy the first 4 bytes of the workspace of a
  /// plan with such operands: a uint32 of DeviceFault bits, 0 if all was well.
  Status device_status(const RunOptions& options) const;

  struct State;  // not part of the API

 private:
  friend ABACIST_API Result<Plan> plan(const Problem&, const PlanOptions&);
  friend ABACIST_API Status forward(const ForwardTensors&, const Options&, const PlanOptions&,
                                    const RunOptions&);
  friend ABACIST_API Status backward(const BackwardTensors&, const Options&, const PlanOptions&,
                                     const RunOptions&);
  template <class Tensors>
  Status run_reporting(const Tensors& tensors, const RunOptions& options) const;
  template <class Tensors>
  Status run_allocating(const Tensors& tensors, const RunOptions& options) const;
  std::shared_ptr<const State> state_;
};

/// Validates the problem, walks the implementations in order, and returns the plan of the first
/// that serves, or why none does. Reads no tensor data; costs microseconds. (On a GPU the first
/// plan that chooses a kernel loads it there: milliseconds, and it may wait for work that is
/// running. Later plans and all runs do neither.)
///
///     Result<Plan> p = plan(make_problem(tensors, options));
///     if (!p) return report(p.error());
///     std::puts(explain(*p).c_str());
///     std::size_t bytes = (p->info().workspace_bytes + 255) / 256 * 256;
///     void* memory = std::aligned_alloc(kWorkspaceAlignment, bytes);
///     Status s = p->run(tensors, {.workspace = {memory, bytes}});
ABACIST_API Result<Plan> plan(const Problem& problem, const PlanOptions& options = {});

/// The plan as text, several lines without a line break at the end; "" if there is no memory for
/// it.
ABACIST_API std::string explain(const Plan& plan);

}  // namespace abacist
