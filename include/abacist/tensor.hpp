// Tensors as non-owning strided views.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "abacist/export.hpp"

namespace abacist {

/// u8 serves for truth values: 0 is false, anything else true.
enum class DType : std::uint8_t { f32, bf16, f16, f64, i32, u8 };

/// Bytes per element.
constexpr std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::u8:
      return 1;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::f64:
      return 8;
    case DType::f32:
    case DType::i32:
      break;
  }
  return 4;
}

/// "f32", "bf16", ...
ABACIST_API const char* to_string(DType dtype) noexcept;

enum class DeviceType : std::uint8_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

inline constexpr int kMaxRank = 4;
using Extents = std::array<std::int64_t, kMaxRank>;

/// Shape, strides (in elements, any sign) and element type of a tensor, without its data.
/// A default-constructed spec (rank 0) means "absent". Entries past `rank` are ignored.
struct TensorSpec {
  DType dtype = DType::f32;
  Device device{};
  int rank = 0;
  Extents shape{};
  Extents stride{};

  /// Of a negative rank, too: validation then names it.
  bool present() const noexcept { return rank != 0; }

  friend bool operator==(const TensorSpec& a, const TensorSpec& b) noexcept {
    if (a.dtype != b.dtype || a.device != b.device || a.rank != b.rank) return false;
    for (int axis = 0; axis < a.rank && axis < kMaxRank; ++axis) {
      const auto i = static_cast<std::size_t>(axis);
      if (a.shape[i] != b.shape[i] || a.stride[i] != b.stride[i]) return false;
    }
    return true;
  }
};

/// A spec with row-major contiguous strides. A product of the shape that overflows 64 bits gives
/// strides that validation rejects.
///
///     auto spec = contiguous(DType::bf16, {b, s_q, h_q, d_qk});
ABACIST_API TensorSpec contiguous(DType dtype, std::initializer_list<std::int64_t> shape,
                                  Device device = {}) noexcept;

/// A spec with its data. Void is `void` (outputs) or `const void` (inputs).
template <class Void>
struct BasicTensor : TensorSpec {
  Void* data = nullptr;

  BasicTensor() = default;
  BasicTensor(Void* pointer, const TensorSpec& spec) : TensorSpec(spec), data(pointer) {}
  /// Every output is an input, too.
  template <class Other>
  requires(std::is_const_v<Void> && !std::is_const_v<Other>)
      BasicTensor(const BasicTensor<Other>& other)  // NOLINT(google-explicit-constructor)
      : TensorSpec(other), data(other.data) {}

  const TensorSpec& spec() const noexcept { return *this; }
};

using Tensor = BasicTensor<void>;
using ConstTensor = BasicTensor<const void>;

}  // namespace abacist
