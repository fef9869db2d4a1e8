// No exception crosses the library: its functions end in `catch (...) { return api::caught(); }`.
#pragma once

#include <exception>
#include <new>
#include <system_error>

#include "abacist/status.hpp"

namespace abacist::api {

/// The error that stands for the exception being handled. What the library itself can meet is a
/// lack of memory, or of threads; anything else was thrown by the caller's code and goes on.
inline Error caught() {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return {ErrorCode::out_of_memory, "", "out of memory"};  // short enough to need none
  } catch (const std::system_error&) {
    return {ErrorCode::out_of_memory, "", "no more threads"};
  }
}

}  // namespace abacist::api
