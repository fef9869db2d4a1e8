#include "api/registry.hpp"

#include "cpu/cpu.hpp"
#include "reference/reference.hpp"

#if defined(ABACIST_HAS_CUDA)
#include "cuda/backend/cuda.hpp"
#endif

namespace abacist::api {
namespace {

#if !defined(ABACIST_HAS_CUDA)
/// Says why device tensors find no implementation; never runs.
constexpr core::Implementation kNoCuda = {
    "cuda", Backend::cuda,
    [](const core::Resolved&, const PlanOptions&) -> Result<core::Draft> {
      return Error{ErrorCode::unsupported, "", "this build has no CUDA backend (ABACIST_CUDA=OFF)"};
    },
    nullptr, nullptr};
#endif

}  // namespace

std::span<const core::Implementation* const> implementations() {
  static constexpr const core::Implementation* kAll[] = {
    &cpu::kImplementation,
#if defined(ABACIST_HAS_CUDA)
    &cuda::kImplementation,
#else
    &kNoCuda,
#endif
    &reference::kImplementation,
  };
  return kAll;
}

}  // namespace abacist::api
