// A tensor that owns its memory, laid out as awkwardly as asked, with poisoned surroundings.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "abacist/tensor.hpp"
#include "support/random.hpp"

namespace abacist::testing {

/// How a buffer lies in memory.
struct Layout {
  bool random = false;      ///< permuted axes, padding, inner and negative strides, offset
  bool broadcast = false;   ///< one axis, not the last, may get stride 0 (inputs)
  bool odd_offset = false;  ///< data is aligned to one element only
  bool tma = false;         ///< last axis contiguous, other strides and the offset multiples of 8
};

/// Every byte outside the elements (guard zones, padding, gaps of strides) holds 0xff, a NaN in
/// every float type; damage() says if anything there changed.
class Buffer {
 public:
  Buffer() = default;  ///< absent
  Buffer(DType dtype, std::vector<std::int64_t> shape) : Buffer(dtype, std::move(shape), {}, 0) {}
  Buffer(DType dtype, std::vector<std::int64_t> shape, Layout layout, std::uint64_t stream);

  bool present() const { return spec_.present(); }
  const TensorSpec& spec() const { return spec_; }
  ConstTensor in() const { return present() ? ConstTensor{element(0), spec_} : ConstTensor{}; }
  Tensor out() { return present() ? Tensor{element(0), spec_} : Tensor{}; }

  std::int64_t size() const;  ///< elements
  double at(const std::array<std::int64_t, kMaxRank>& index) const;
  void set(const std::array<std::int64_t, kMaxRank>& index, double value);
  /// All elements in row-major order of the shape.
  std::vector<double> values() const;
  void fill(const std::function<double()>& next);
  void fill(const std::vector<double>& values);
  void fill(double value);
  /// Calls visit(index, element offset) in row-major order.
  void for_each(const std::function<void(const std::array<std::int64_t, kMaxRank>&, std::int64_t)>&
                    visit) const;

  /// The whole memory, guard zones included, and where element 0, ..., 0 lies in it: to be copied
  /// to a device and back.
  std::span<std::byte> memory() { return bytes_; }
  std::span<const std::byte> memory() const { return bytes_; }
  std::int64_t origin_bytes() const { return origin_ * size_of(spec_.dtype); }

  /// Remembers every byte as it is now.
  void freeze() { frozen_ = bytes_; }
  /// Bytes that changed since freeze(): outside the elements, or anywhere. "" if none.
  std::string damage(bool elements_may_change) const;
  /// The bytes of all elements in row-major order, to compare bit for bit.
  std::vector<std::byte> element_bytes() const;

 private:
  std::byte* element(std::int64_t offset) {
    return bytes_.data() + (origin_ + offset) * size_of(spec_.dtype);
  }
  const std::byte* element(std::int64_t offset) const {
    return bytes_.data() + (origin_ + offset) * size_of(spec_.dtype);
  }

  TensorSpec spec_{};
  std::int64_t origin_ = 0;  // element index of position 0, ..., 0
  std::vector<std::byte> bytes_;
  std::vector<std::byte> frozen_;
};

}  // namespace abacist::testing
