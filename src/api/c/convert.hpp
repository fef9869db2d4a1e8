// The structs of the C API, and what they are in C++.
#pragma once

#include "abacist/abacist.h"
#include "abacist/attention.hpp"

namespace abacist::api::c {

/// Specs and pointers of every operand, whichever pass.
struct Bound {
  Operands specs{};
  abacist_pointers pointers{};
};

Result<Pass> pass_of(int32_t pass);
Result<Tensor> tensor_of(const char* name, const abacist_tensor& tensor);
abacist_tensor to_c(const TensorSpec& spec) noexcept;

/// Checked conversions of a caller's structs. `tensors` and `pointers` must not be null, options
/// may be. An operand that the pass has no use for is an error.
Result<Bound> bind(Pass pass, const abacist_tensors* tensors);
Result<Bound> bind(const Problem& planned, const abacist_pointers* pointers);
Result<Options> options_of(const abacist_options* options);
Result<PlanOptions> plan_options_of(const abacist_plan_options* options);
Result<RunOptions> run_options_of(const abacist_run_options* options);

/// What abacist_merge writes, and the sinks that it adds.
struct MergeTargets {
  Tensor o{}, lse{};
  ConstTensor sinks{};
};
Result<MergeTargets> merge_targets_of(const abacist_tensors* into);

ForwardTensors forward_tensors(const Bound& bound);
BackwardTensors backward_tensors(const Bound& bound);

/// Fills the caller's struct as far as its struct_size reaches.
Status write(const PlanInfo& info, abacist_plan_info* out);
Status write(const Operands& operands, abacist_tensors* out);
Status write(const Options& options, abacist_options* out);

}  // namespace abacist::api::c
