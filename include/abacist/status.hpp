// Errors as values: no exception crosses the library.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>

#include "abacist/export.hpp"

namespace abacist {

/// What kind of thing went wrong.
enum class ErrorCode : std::uint8_t {
  invalid_argument,  ///< An argument breaks its documented rules.
  unsupported,       ///< Valid, but no backend at hand computes it; the message says why.
  out_of_memory,     ///< A one-line call could not allocate its workspace.
  device_error,      ///< The device runtime reported a failure.
};

ABACIST_API const char* to_string(ErrorCode code) noexcept;

/// One error: the argument that caused it, what it was and what it must be.
struct Error {
  ErrorCode code = ErrorCode::invalid_argument;
  std::string argument;  ///< e.g. "k" or "mask.window.left"; empty if not one argument's fault.
  std::string message;   ///< e.g. "h_k is 3, must divide h_q = 4".
};

/// "invalid argument: k: h_k is 3, must divide h_q = 4"; "" if there is no memory for it
ABACIST_API std::string to_string(const Error& error);

/// A value or an Error.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}      // NOLINT(google-explicit-constructor)
  Result(Error error) : state_(std::move(error)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const noexcept { return state_.index() == 0; }
  explicit operator bool() const noexcept { return ok(); }
  /// Precondition: ok().
  const T& value() const& { return std::get<0>(state_); }
  T&& value() && { return std::get<0>(std::move(state_)); }
  const T& operator*() const& { return std::get<0>(state_); }
  const T* operator->() const { return &std::get<0>(state_); }
  /// Precondition: !ok().
  const Error& error() const { return std::get<1>(state_); }

 private:
  std::variant<T, Error> state_;
};

/// Success or an Error.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Error error) : state_(std::move(error)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const noexcept { return state_.index() == 0; }
  explicit operator bool() const noexcept { return ok(); }
  /// Precondition: !ok().
  const Error& error() const { return std::get<1>(state_); }

 private:
  std::variant<std::monostate, Error> state_;
};

}  // namespace abacist
