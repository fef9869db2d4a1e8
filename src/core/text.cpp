#include "core/text.hpp"

#include <charconv>
#include <limits>
#include <new>

#include "abacist/plan.hpp"
#include "abacist/version.hpp"

namespace abacist::core {

std::string to_text(const Extents& extents, int rank) {
  std::string text = "[";
  for (int axis = 0; axis < rank && axis < kMaxRank; ++axis) {
    if (axis > 0) text += ", ";
    text += std::to_string(extents[static_cast<std::size_t>(axis)]);
  }
  return text + "]";
}

std::string to_text(const TensorSpec& spec) {
  return to_string(spec.dtype) + to_text(spec.shape, spec.rank);
}

std::string to_text(Device device) {
  return device.type == DeviceType::cpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

std::string to_text(double value) {
  std::array<char, 32> buffer;
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr;
  return {buffer.data(), end};
}

}  // namespace abacist::core

namespace abacist {

const char* to_string(DType dtype) noexcept {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::f64:
      return "f64";
    case DType::i32:
      return "i32";
    case DType::u8:
      return "u8";
  }
  return "unknown";
}

const char* to_string(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::invalid_argument:
      return "invalid argument";
    case ErrorCode::unsupported:
      return "unsupported";
    case ErrorCode::out_of_memory:
      return "out of memory";
    case ErrorCode::device_error:
      return "device error";
  }
  return "unknown error";
}

const char* to_string(Backend backend) noexcept {
  switch (backend) {
    case Backend::automatic:
      return "automatic";
    case Backend::cpu:
      return "cpu";
    case Backend::reference:
      return "reference";
    case Backend::cuda:
      return "cuda";
  }
  return "unknown";
}

std::string to_string(const Error& error) try {
  std::string text = to_string(error.code);
  if (!error.argument.empty()) text += ": " + error.argument;
  return text + ": " + error.message;
} catch (const std::bad_alloc&) {
  return {};
}

const char* version() noexcept { return "0.1.0"; }

TensorSpec contiguous(DType dtype, std::initializer_list<std::int64_t> shape,
                      Device device) noexcept {
  TensorSpec spec;
  spec.dtype = dtype;
  spec.device = device;
  spec.rank = static_cast<int>(shape.size());
  std::size_t axis = 0;
  for (const std::int64_t extent : shape) {
    if (axis < kMaxRank) spec.shape[axis++] = extent;
  }
  std::int64_t stride = 1;
  while (axis-- > 0) {
    spec.stride[axis] = stride;
    if (__builtin_mul_overflow(stride, spec.shape[axis], &stride)) {
      stride = std::numeric_limits<std::int64_t>::min();
    }
  }
  return spec;
}

}  // namespace abacist
