#include "api/c/last_error.hpp"

#include <array>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <utility>

namespace abacist::api::c {
namespace {

/// Fixed memory: an error must be kept even when an allocation has just failed.
struct LastError {
  std::array<char, 64> argument;
  std::array<char, 1024> message;
  std::array<char, 1152> text;  ///< "STATUS: ARGUMENT: MESSAGE"
};

thread_local constinit LastError last_error{};

/// Appends to the text in `buffer`; what does not fit is cut, not inside a UTF-8 sequence.
template <std::size_t Size>
void append(std::array<char, Size>& buffer, const char* text) noexcept {
  const std::size_t used = std::strlen(buffer.data());
  const std::size_t wanted = std::strlen(text);
  std::size_t taken = wanted < Size - 1 - used ? wanted : Size - 1 - used;
  const auto continues = [&] { return (static_cast<unsigned char>(text[taken]) & 0xc0) == 0x80; };
  while (taken < wanted && taken > 0 && continues()) --taken;
  std::memcpy(buffer.data() + used, text, taken);
  buffer[used + taken] = '\0';
}

abacist_status code_of(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::invalid_argument:
      return ABACIST_INVALID_ARGUMENT;
    case ErrorCode::unsupported:
      return ABACIST_UNSUPPORTED;
    case ErrorCode::out_of_memory:
      return ABACIST_OUT_OF_MEMORY;
    case ErrorCode::device_error:
      return ABACIST_DEVICE_ERROR;
  }
  return ABACIST_INTERNAL_ERROR;
}

/// The C API's options are flat.
constexpr std::pair<std::string_view, const char*> kFlatNames[] = {
    {"mask.align", "align"},
    {"mask.window.left", "window_left"},
    {"mask.window.right", "window_right"},
    {"score.scale", "scale"},
    {"score.softcap", "softcap"},
    {"max_lengths.s_q", "max_s_q"},
    {"max_lengths.s_k", "max_s_k"},
    {"dropout.p", "dropout_p"},
    {"rotary.cos", "cos"},
    {"rotary.sin", "sin"}};

}  // namespace

abacist_status record(const Error& error) noexcept {
  const char* argument = error.argument.c_str();
  for (const auto& [name, flat] : kFlatNames) {
    if (error.argument == name) argument = flat;
  }
  return record(code_of(error.code), argument, error.message.c_str());
}

abacist_status record(abacist_status code, const char* argument, const char* message) noexcept {
  LastError& error = last_error;
  error.argument[0] = error.message[0] = error.text[0] = '\0';
  append(error.argument, argument);
  append(error.message, message);
  append(error.text, abacist_status_name(code));
  if (*argument != '\0') {
    append(error.text, ": ");
    append(error.text, error.argument.data());
  }
  append(error.text, ": ");
  append(error.text, error.message.data());
  return code;
}

}  // namespace abacist::api::c

const char* abacist_last_error() noexcept { return abacist::api::c::last_error.text.data(); }
const char* abacist_last_error_argument() noexcept {
  return abacist::api::c::last_error.argument.data();
}
const char* abacist_last_error_message() noexcept {
  return abacist::api::c::last_error.message.data();
}
