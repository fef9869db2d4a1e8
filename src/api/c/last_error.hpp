// The C API's thread-local last error, and the border that no exception crosses.
#pragma once

#include <exception>
#include <new>

#include "abacist/abacist.h"
#include "abacist/status.hpp"

namespace abacist::api::c {

/// Keeps an error for abacist_last_error; returns its status code. Allocates nothing.
abacist_status record(abacist_status code, const char* argument, const char* message) noexcept;

/// An error of the C++ API, its argument under the name that it has in C.
abacist_status record(const Error& error) noexcept;

/// Runs `body`, which returns a Status; whatever it returns or throws becomes a status code.
template <class Body>
abacist_status guarded(const Body& body) noexcept {
  try {
    const Status status = body();
    return status ? ABACIST_OK : record(status.error());
  } catch (const std::bad_alloc&) {
    return record(ABACIST_OUT_OF_MEMORY, "", "an allocation failed");
  } catch (const std::exception& exception) {
    return record(ABACIST_INTERNAL_ERROR, "", exception.what());
  } catch (...) {
    return record(ABACIST_INTERNAL_ERROR, "", "an exception of unknown type");
  }
}

}  // namespace abacist::api::c
