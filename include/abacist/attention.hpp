// One-line calls.
#pragma once

#include <span>

#include "abacist/plan.hpp"

namespace abacist {

/// O = softmax(scale * Q K^T + mask) V and LSE, planned and run in one call.
///
///     float q[...], k[...], v[...], o[...];
///     const auto spec = contiguous(DType::f32, {b, s, h, d});
///     Status s = forward({.q = {q, spec}, .k = {k, spec}, .v = {v, spec}, .o = {o, spec}},
///                        {.mask = {.causal = true}});
///
/// With a block table, page ids are data: keys of a page outside the pool are skipped, and O and
/// LSE are written. On the host the call then returns, after the run, the error that
/// Plan::device_status reports (invalid_argument, "block_table"). On a GPU (no pages so far, but
/// lengths in device memory) it returns once the run is enqueued and can't tell: where that
/// matters, keep a plan and its workspace, and ask it.
ABACIST_API Status forward(const ForwardTensors& tensors, const Options& options = {},
                           const PlanOptions& plan_options = {},
                           const RunOptions& run_options = {});

/// dQ, dK, dV from dO (and dLSE).
ABACIST_API Status backward(const BackwardTensors& tensors, const Options& options = {},
                            const PlanOptions& plan_options = {},
                            const RunOptions& run_options = {});

/// One partial result: attention of the same queries over a part of the keys.
struct Partial {
  ConstTensor o;    ///< [b, s_q, h_q, d_v] or [total_q, h_q, d_v]; f32, bf16 or f16
  ConstTensor lse;  ///< f32 [b, h_q, s_q] or [h_q, total_q]
};

/// Merges partial results over disjoint key sets: `lse = log sum exp(lse_p)`,
/// `o = sum exp(lse_p - lse) o_p`. (0, -inf) is neutral; one non-empty part is returned bit for bit
/// (dtypes permitting). The parts are added in the order given. `o` and `lse` may not overlap the
/// parts. `sinks`, f32 [h_q], joins the denominator of every row once (the parts carry none): lse
/// and o are then those of ForwardTensors::sinks.
ABACIST_API Status merge(std::span<const Partial> parts, const Tensor& o, const Tensor& lse = {},
                         const ConstTensor& sinks = {});

}  // namespace abacist
