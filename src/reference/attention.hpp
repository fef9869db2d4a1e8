// Attention of one (sequence, key/value head) in float64, straight from the formulas.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/backend.hpp"

namespace abacist::reference {

/// A worker's memory: everything of one key/value head as float64.
struct Scratch {
  double* keys;    // [len_k, d_qk]
  double* values;  // [len_k, d_v]
  double* dk;      // [len_k, d_qk], backward only
  double* dv;      // [len_k, d_v], backward only
  double* scores;  // [len_k]: the scores of a query row, then its probabilities
  double* qk_row;  // [d_qk]: a row of Q
  double* qk_sum;  // [d_qk]: a row of dQ
  double* v_row;   // [d_v]: a row of dO
  double* v_sum;   // [d_v]: a row of O
  double* v_part;  // [d_v]: O over a run of keys
  double* d_bias;  // of all workers, which then is one: the gradient of the bias, row-major
  TensorSpec d_bias_spec;
  std::atomic<std::uint32_t>* faults;  // DeviceFault bits of the run
};

/// Doubles that a Scratch for `max_len_k` keys needs; saturates.
std::size_t scratch_doubles(const core::Geometry& geometry, Pass pass, std::int64_t max_len_k);

/// Carves a Scratch out of scratch_doubles() doubles.
Scratch carve(double* memory, const core::Geometry& geometry, Pass pass, std::int64_t max_len_k);

/// Told after each query row.
struct RowsDone {
  void (*call)(void* context) = nullptr;
  void* context = nullptr;
  void operator()() const {
    if (call != nullptr) call(context);
  }
};

/// O and LSE of all query heads of key/value head `head_k` in `sequence`.
void forward(const core::Resolved& resolved, const ForwardTensors& tensors,
             const core::Sequence& sequence, std::int64_t head_k, const Scratch& scratch,
             const RowsDone& done);

/// dQ of all query heads of the group, dK and dV of `head_k`. P comes from the LSE that is given
/// and D from the O that is given (they may be those of a merge over more keys); for an oracle give
/// both in f64.
void backward(const core::Resolved& resolved, const BackwardTensors& tensors,
              const core::Sequence& sequence, std::int64_t head_k, const Scratch& scratch,
              const RowsDone& done);

/// dSink of every query head.
void sink_gradients(const core::Resolved& resolved, const BackwardTensors& tensors);

}  // namespace abacist::reference
