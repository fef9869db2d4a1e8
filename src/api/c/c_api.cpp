// The functions of abacist.h: conversions around the C++ API, inside a border that no exception
// crosses.
#include "abacist/abacist.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include "abacist/attention.hpp"
#include "abacist/plan.hpp"
#include "abacist/version.hpp"
#include "api/c/convert.hpp"
#include "api/c/last_error.hpp"
#include "api/c/plan_handle.hpp"
#include "api/registry.hpp"
#include "api/validate.hpp"

namespace abacist::api::c {
namespace {

Error null_plan() { return invalid("plan", "is null"); }

Status run_in_one_line(Pass pass, const abacist_tensors* tensors, const abacist_options* options,
                       const abacist_plan_options* plan_options,
                       const abacist_run_options* run_options) {
  const auto bound = bind(pass, tensors);
  if (!bound) return bound.error();
  const auto o = options_of(options);
  if (!o) return o.error();
  const auto p = plan_options_of(plan_options);
  if (!p) return p.error();
  const auto r = run_options_of(run_options);
  if (!r) return r.error();
  return pass == Pass::forward ? forward(forward_tensors(*bound), *o, *p, *r)
                               : backward(backward_tensors(*bound), *o, *p, *r);
}

Result<Problem> problem_of(int32_t pass, const abacist_tensors* tensors,
                           const abacist_options* options) {
  const auto which = pass_of(pass);
  if (!which) return which.error();
  auto bound = bind(*which, tensors);
  if (!bound) return bound.error();
  auto o = options_of(options);
  if (!o) return o.error();
  return Problem{*which, std::move(bound).value().specs, std::move(o).value()};
}

Status run(const Plan& plan, const Result<Bound>& bound, const abacist_run_options* options) {
  if (!bound) return bound.error();
  const auto r = run_options_of(options);
  if (!r) return r.error();
  return plan.problem().pass == Pass::forward ? plan.run(forward_tensors(*bound), *r)
                                              : plan.run(backward_tensors(*bound), *r);
}

Status create(int32_t pass, const abacist_tensors* tensors, const abacist_options* options,
              const abacist_plan_options* plan_options, abacist_plan** plan) {
  if (plan == nullptr) return invalid("plan", "is null, must point at where the plan goes");
  *plan = nullptr;
  const auto problem = problem_of(pass, tensors, options);
  if (!problem) return problem.error();
  const auto p = plan_options_of(plan_options);
  if (!p) return p.error();
  auto planned = abacist::plan(*problem, *p);
  if (!planned) return planned.error();
  *plan = new abacist_plan{std::move(planned).value()};
  return {};
}

Status merge_parts(const abacist_partial* parts, size_t count, const abacist_tensors* into) {
  const auto targets = merge_targets_of(into);
  if (!targets) return targets.error();
  if (parts == nullptr && count > 0) return invalid("parts", "is null");
  std::vector<Partial> all;
  for (size_t p = 0; p < count; ++p) {
    const std::string prefix = "parts[" + std::to_string(p) + "].";
    const auto part_o = tensor_of((prefix + "o").c_str(), parts[p].o);
    if (!part_o) return part_o.error();
    const auto part_lse = tensor_of((prefix + "lse").c_str(), parts[p].lse);
    if (!part_lse) return part_lse.error();
    all.push_back({*part_o, *part_lse});
  }
  return merge(all, targets->o, targets->lse, targets->sinks);
}

Status write_text(const std::string& from, char* text, size_t capacity, size_t* length) {
  if (text == nullptr && capacity > 0) return invalid("text", "is null, but capacity is not 0");
  if (length != nullptr) *length = from.size();
  if (capacity == 0) return {};
  const size_t taken = std::min(from.size(), capacity - 1);
  std::memcpy(text, from.data(), taken);
  text[taken] = '\0';
  return {};
}

}  // namespace
}  // namespace abacist::api::c

namespace c = abacist::api::c;
using abacist::Status;

abacist_status abacist_forward(const abacist_tensors* tensors, const abacist_options* options,
                               const abacist_plan_options* plan_options,
                               const abacist_run_options* run_options) noexcept {
  return c::guarded([&] {
    return c::run_in_one_line(abacist::Pass::forward, tensors, options, plan_options, run_options);
  });
}

abacist_status abacist_backward(const abacist_tensors* tensors, const abacist_options* options,
                                const abacist_plan_options* plan_options,
                                const abacist_run_options* run_options) noexcept {
  return c::guarded([&] {
    return c::run_in_one_line(abacist::Pass::backward, tensors, options, plan_options, run_options);
  });
}

abacist_status abacist_merge(const abacist_partial* parts, size_t count,
                             const abacist_tensors* into) noexcept {
  return c::guarded([&] { return c::merge_parts(parts, count, into); });
}

abacist_status abacist_validate(int32_t pass, const abacist_tensors* tensors,
                                const abacist_options* options) noexcept {
  return c::guarded([&]() -> Status {
    const auto problem = c::problem_of(pass, tensors, options);
    if (!problem) return problem.error();
    return abacist::validate(*problem);
  });
}

abacist_status abacist_plan_create(int32_t pass, const abacist_tensors* tensors,
                                   const abacist_options* options,
                                   const abacist_plan_options* plan_options,
                                   abacist_plan** plan) noexcept {
  return c::guarded([&] { return c::create(pass, tensors, options, plan_options, plan); });
}

void abacist_plan_destroy(abacist_plan* plan) noexcept { delete plan; }

abacist_status abacist_plan_get_info(const abacist_plan* plan, abacist_plan_info* info) noexcept {
  return c::guarded([&]() -> Status {
    if (plan == nullptr) return c::null_plan();
    return c::write(plan->plan.info(), info);
  });
}

const char* abacist_plan_declined(const abacist_plan* plan, size_t index) noexcept {
  if (plan == nullptr || index >= plan->plan.info().declined.size()) return nullptr;
  return plan->plan.info().declined[index].c_str();
}

abacist_status abacist_plan_get_problem(const abacist_plan* plan, int32_t* pass,
                                        abacist_tensors* tensors,
                                        abacist_options* options) noexcept {
  return c::guarded([&]() -> Status {
    if (plan == nullptr) return c::null_plan();
    const abacist::Problem& problem = plan->plan.problem();
    if (tensors != nullptr) {
      if (Status s = c::write(problem.operands, tensors); !s) return s;
    }
    if (options != nullptr) {
      if (Status s = c::write(problem.options, options); !s) return s;
    }
    if (pass != nullptr) *pass = static_cast<int32_t>(problem.pass);
    return {};
  });
}

abacist_status abacist_plan_explain(const abacist_plan* plan, char* text, size_t capacity,
                                    size_t* length) noexcept {
  return c::guarded([&]() -> Status {
    if (plan == nullptr) return c::null_plan();
    const std::string explained = abacist::explain(plan->plan);
    if (explained.empty()) throw std::bad_alloc();
    return c::write_text(explained, text, capacity, length);
  });
}

abacist_status abacist_plan_run(const abacist_plan* plan, const abacist_tensors* tensors,
                                const abacist_run_options* options) noexcept {
  return c::guarded([&]() -> Status {
    if (plan == nullptr) return c::null_plan();
    return c::run(plan->plan, c::bind(plan->plan.problem().pass, tensors), options);
  });
}

abacist_status abacist_plan_run_pointers(const abacist_plan* plan, const abacist_pointers* pointers,
                                         const abacist_run_options* options) noexcept {
  return c::guarded([&]() -> Status {
    if (plan == nullptr) return c::null_plan();
    return c::run(plan->plan, c::bind(plan->plan.problem(), pointers), options);
  });
}

abacist_status abacist_plan_device_status(const abacist_plan* plan,
                                          const abacist_run_options* options) noexcept {
  return c::guarded([&]() -> Status {
    if (plan == nullptr) return c::null_plan();
    const auto r = c::run_options_of(options);
    if (!r) return r.error();
    return plan->plan.device_status(*r);
  });
}

abacist_tensor abacist_contiguous(void* data, int32_t dtype, int32_t rank,
                                  const int64_t* shape) noexcept {
  abacist_tensor tensor{};
  tensor.data = data;
  tensor.dtype = dtype;
  const bool sane = rank == 0 || (rank > 0 && rank <= ABACIST_MAX_RANK && shape != nullptr);
  tensor.rank = sane ? rank : -1;
  int64_t stride = 1;
  for (int32_t axis = tensor.rank; axis-- > 0;) {
    tensor.shape[axis] = shape[axis];
    tensor.stride[axis] = stride;
    if (__builtin_mul_overflow(stride, shape[axis], &stride)) {
      stride = std::numeric_limits<int64_t>::min();
    }
  }
  return tensor;
}

size_t abacist_dtype_size(int32_t dtype) noexcept {
  if (dtype < ABACIST_F32 || dtype > ABACIST_U8) return 0;
  return static_cast<size_t>(abacist::size_of(static_cast<abacist::DType>(dtype)));
}

const char* abacist_dtype_name(int32_t dtype) noexcept {
  if (dtype < ABACIST_F32 || dtype > ABACIST_U8) return "unknown";
  return to_string(static_cast<abacist::DType>(dtype));
}

const char* abacist_backend_name(int32_t backend) noexcept {
  if (backend < ABACIST_BACKEND_AUTOMATIC || backend > ABACIST_BACKEND_CUDA) return "unknown";
  return to_string(static_cast<abacist::Backend>(backend));
}

const char* abacist_status_name(abacist_status status) noexcept {
  switch (status) {
    case ABACIST_OK:
      return "ok";
    case ABACIST_INVALID_ARGUMENT:
      return to_string(abacist::ErrorCode::invalid_argument);
    case ABACIST_UNSUPPORTED:
      return to_string(abacist::ErrorCode::unsupported);
    case ABACIST_OUT_OF_MEMORY:
      return to_string(abacist::ErrorCode::out_of_memory);
    case ABACIST_DEVICE_ERROR:
      return to_string(abacist::ErrorCode::device_error);
    case ABACIST_INTERNAL_ERROR:
      return "internal error";
    default:
      return "unknown";
  }
}

int32_t abacist_has_backend(int32_t backend) noexcept {
  for (const abacist::core::Implementation* one : abacist::api::implementations()) {
    // What this build lacks stands in the list all the same, to say so to the planner.
    if (static_cast<int32_t>(one->backend) == backend && one->forward != nullptr) return 1;
  }
  return 0;
}

const char* abacist_version() noexcept { return abacist::version(); }

const char* abacist_cpu_targets() noexcept { return abacist::cpu_targets(); }
