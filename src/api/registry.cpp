#include "api/registry.hpp"

#include "cpu/cpu.hpp"
#include "reference/reference.hpp"

namespace abacist::api {

std::span<const core::Implementation* const> implementations() {
  static constexpr const core::Implementation* kAll[] = {
      &cpu::kImplementation,
      &reference::kImplementation,
  };
  return kAll;
}

}  // namespace abacist::api
