// Structs that begin with struct_size, as callers of older and newer versions make them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

#include "abacist/abacist.h"
#include "api/validate.hpp"

namespace abacist::api::c {

/// Sizes of the structs in the version that introduced them; a shorter one is an error. (Fields are
/// only ever appended, so these numbers never change.)
template <class Struct>
inline constexpr std::size_t kFirstSize = 0;
template <>
inline constexpr std::size_t kFirstSize<abacist_tensors> = 1152;
template <>
inline constexpr std::size_t kFirstSize<abacist_pointers> = 112;
template <>
inline constexpr std::size_t kFirstSize<abacist_options> = 72;
template <>
inline constexpr std::size_t kFirstSize<abacist_plan_options> = 16;
template <>
inline constexpr std::size_t kFirstSize<abacist_run_options> = 48;
template <>
inline constexpr std::size_t kFirstSize<abacist_plan_info> = 136;
template <>
inline constexpr std::size_t kFirstSize<abacist_rotary> = 192;
template <>
inline constexpr std::size_t kFirstSize<abacist_append_tensors> = 536;

/// No struct is near this; a larger struct_size is garbage.
inline constexpr std::size_t kMaxSize = 1 << 16;

template <class Struct>
Status check_size(const char* name, std::size_t size) {
  static_assert(kFirstSize<Struct> > 0 && kFirstSize<Struct> <= sizeof(Struct));
  if (size >= kFirstSize<Struct> && size <= kMaxSize) return {};
  return invalid(name, "struct_size is " + std::to_string(size) + ", must be sizeof(" +
                           std::string("abacist_") + name + ")");
}

/// Reads a caller's struct: fields that it lacks are zero, fields that this library lacks must be.
template <class Struct>
Status read(const char* name, const Struct* from, Struct& to) {
  if (from == nullptr) return invalid(name, "is null");
  std::size_t size = 0;
  std::memcpy(&size, from, sizeof size);
  if (Status s = check_size<Struct>(name, size); !s) return s;
  to = Struct{};
  std::memcpy(&to, from, std::min(size, sizeof(Struct)));
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  if (size > sizeof(Struct) && std::any_of(bytes + sizeof(Struct), bytes + size,
                                           [](unsigned char byte) { return byte != 0; })) {
    return invalid(name, "has fields that version " + std::string(abacist_version()) +
                             " of the library does not know, and they are set");
  }
  to.struct_size = sizeof(Struct);
  return {};
}

/// Fills a caller's struct as far as it reaches; fields that this library lacks become zero.
template <class Struct>
Status write(const char* name, const Struct& from, Struct* to) {
  if (to == nullptr) return invalid(name, "is null");
  const std::size_t size = to->struct_size;
  if (Status s = check_size<Struct>(name, size); !s) return s;
  std::memcpy(to, &from, std::min(size, sizeof(Struct)));
  if (size > sizeof(Struct)) {
    std::memset(reinterpret_cast<unsigned char*>(to) + sizeof(Struct), 0, size - sizeof(Struct));
  }
  to->struct_size = size;
  return {};
}

}  // namespace abacist::api::c
