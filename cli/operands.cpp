#include "operands.hpp"

#include <fmt/format.h>

#include <cstring>
#include <tuple>

#include "core/numeric.hpp"
#include "memory.hpp"
#include "random.hpp"
#include "text.hpp"
#include "user_error.hpp"

namespace abacist::cli {
namespace {

// Axes [b, s, h, d] in a file, by rank; absent ones have extent 1.
constexpr int kAbsent = -1;
using AxisMap = std::array<int, kMaxRank>;

AxisMap axis_map(const AxisOrder& order) {
  const int s = order.heads_first ? 1 : 0;
  const int h = order.heads_first ? 0 : 1;
  switch (order.rank) {
    case 4:
      return {0, 1 + s, 1 + h, 3};
    case 3:
      return {kAbsent, s, h, 2};
    default:
      return {kAbsent, 0, kAbsent, 1};
  }
}

/// Bytes of a shape; throws UserError if they overflow.
std::int64_t checked_bytes(DType dtype, const TensorSpec& spec) {
  std::int64_t bytes = size_of(dtype);
  for (int axis = 0; axis < spec.rank; ++axis) {
    if (__builtin_mul_overflow(bytes, spec.shape[static_cast<std::size_t>(axis)], &bytes)) {
      throw UserError("a tensor of shape " + shape_text(spec) + " is too large");
    }
  }
  return bytes;
}

/// A file's array as [b, s, h, d].
Operand as_bshd(const io::LoadedArray& loaded, const AxisOrder& order, const std::string& what) {
  const io::Array& array = loaded.array;
  if (!is_float(array)) {
    throw UserError(
        fmt::format("{} holds {}, must be f16, bf16, f32 or f64", what, array.type_name));
  }
  if (array.shape.size() != static_cast<std::size_t>(order.rank)) {
    throw UserError(fmt::format("{} has shape {}, must have rank {} as Q has", what,
                                io::shape_text(array.shape), order.rank));
  }
  Operand operand;
  operand.spec.dtype = *array.dtype;
  operand.spec.rank = kMaxRank;
  const AxisMap map = axis_map(order);
  for (std::size_t axis = 0; axis < kMaxRank; ++axis) {
    const bool absent = map[axis] == kAbsent;
    const auto from = static_cast<std::size_t>(absent ? 0 : map[axis]);
    operand.spec.shape[axis] = absent ? 1 : array.shape[from];
    operand.spec.stride[axis] = absent ? 0 : array.stride[from];
  }
  std::tie(operand.data, operand.owner) = aligned_bytes(loaded, operand.spec);
  return operand;
}

io::Location location_of(const std::string& given, const std::string& all, const char* name) {
  if (given.empty() && all.empty()) {
    throw UserError(
        fmt::format("--{} is missing (or give one .safetensors file with q, k and v)", name));
  }
  if (!given.empty()) return io::Location::parse(given);
  io::Location location = io::Location::parse(all);
  if (location.format == io::Format::npy || !location.name.empty()) {
    throw UserError(all + " holds one tensor; name it with --q, --k or --v");
  }
  return location;
}

}  // namespace

std::int64_t Operand::count() const {
  std::int64_t count = spec.present() ? 1 : 0;
  for (int axis = 0; axis < spec.rank; ++axis) count *= spec.shape[static_cast<std::size_t>(axis)];
  return count;
}

bool is_float(const io::Array& array) {
  return array.dtype && *array.dtype != DType::i32 && *array.dtype != DType::u8;
}

std::pair<void*, std::shared_ptr<const void>> aligned_bytes(const io::LoadedArray& loaded,
                                                            const TensorSpec& spec) {
  const std::int64_t bytes = checked_bytes(spec.dtype, spec);
  const auto address = reinterpret_cast<std::uintptr_t>(loaded.array.data);
  if (address % static_cast<std::uintptr_t>(size_of(spec.dtype)) == 0) {
    // Inputs are only read; the mapping enforces it.
    return {const_cast<std::byte*>(loaded.array.data), loaded.file};
  }
  auto memory = allocate(bytes);
  std::memcpy(memory.get(), loaded.array.data, static_cast<std::size_t>(bytes));
  return {memory.get(), memory};
}

Operand make_operand(DType dtype, std::initializer_list<std::int64_t> shape) {
  Operand operand;
  operand.spec = contiguous(dtype, shape);
  const auto memory = allocate(checked_bytes(dtype, operand.spec));
  operand.data = memory.get();
  operand.owner = memory;
  operand.file_shape = shape;
  return operand;
}

Operand make_random(DType dtype, std::initializer_list<std::int64_t> shape, std::uint64_t seed,
                    std::uint64_t stream) {
  Operand operand = make_operand(dtype, shape);
  fill_normal(operand.data, dtype, operand.count(), seed, stream);
  return operand;
}

Operand convert(const ConstTensor& from, DType dtype) {
  const Extents& n = from.shape;
  Operand to = make_operand(dtype, {n[0], n[1], n[2], n[3]});
  std::int64_t next = 0;
  for (std::int64_t x = 0; x < n[0]; ++x) {
    for (std::int64_t y = 0; y < n[1]; ++y) {
      for (std::int64_t z = 0; z < n[2]; ++z) {
        const std::int64_t row = x * from.stride[0] + y * from.stride[1] + z * from.stride[2];
        for (std::int64_t w = 0; w < n[3]; ++w) {
          const double value = core::load_element(from.data, from.dtype, row + w * from.stride[3]);
          core::store_element(to.data, dtype, next++, value);
        }
      }
    }
  }
  return to;
}

Inputs load_inputs(const FileArguments& files) {
  Inputs inputs;
  inputs.order.heads_first = files.layout == "bhsd";
  const struct {
    const char* name;
    const std::string& given;
    Operand& operand;
  } all[] = {{"q", files.q, inputs.q}, {"k", files.k, inputs.k}, {"v", files.v, inputs.v}};
  for (const auto& [name, given, operand] : all) {
    const io::Location location = location_of(given, files.all, name);
    const io::LoadedArray loaded = io::load(location, name);
    const std::string what = location.path + " (" + name + ")";
    if (&operand == &inputs.q) {
      const std::size_t rank = loaded.array.shape.size();
      if (rank < 2 || rank > 4) {
        throw UserError(fmt::format("{} has shape {}, must have rank 2, 3 or 4", what,
                                    io::shape_text(loaded.array.shape)));
      }
      inputs.order.rank = static_cast<int>(rank);
    }
    operand = as_bshd(loaded, inputs.order, what);
    if (!files.dtype.empty()) operand = convert(operand.in(), parse_dtype(files.dtype));
    inputs.paths.push_back(location.path);
  }
  return inputs;
}

void Inputs::refuse_to_overwrite(const std::string& path) const {
  for (const std::string& input : paths) {
    if (io::same_file(path, input)) {
      throw UserError(path + " is an input, it will not be overwritten");
    }
  }
}

Inputs random_inputs(const SizeArguments& sizes) {
  const SizeArguments s = sizes.resolved();
  const DType dtype = parse_dtype(s.dtype);
  Inputs inputs;
  inputs.q = make_random(dtype, {s.b, s.s_q, s.h_q, s.d_qk}, s.seed, 1);
  inputs.k = make_random(dtype, {s.b, s.s_k, s.h_k, s.d_qk}, s.seed, 2);
  inputs.v = make_random(dtype, {s.b, s.s_k, s.h_k, s.d_v}, s.seed, 3);
  return inputs;
}

namespace {

/// Without the first axis, if the tensor is one of a varlen problem: there it is 1 long.
template <class Any>
Any packed(Any tensor, bool varlen) {
  if (!varlen || !tensor.present()) return tensor;
  for (std::size_t axis = 1; axis < kMaxRank; ++axis) {
    tensor.shape[axis - 1] = tensor.shape[axis];
    tensor.stride[axis - 1] = tensor.stride[axis];
  }
  --tensor.rank;
  tensor.shape[static_cast<std::size_t>(tensor.rank)] = 0;
  tensor.stride[static_cast<std::size_t>(tensor.rank)] = 0;
  return tensor;
}

}  // namespace

ForwardTensors Inputs::forward(const Tensor& o, const Tensor& lse) const {
  const bool pool = block_table.spec.present();
  return {.q = packed(q.in(), varlen()),
          .k = packed(k.in(), varlen() && !pool),
          .v = packed(v.in(), varlen() && !pool),
          .o = packed(o, varlen()),
          .lse = packed(lse, varlen()),
          .alibi_slopes = slopes.in(),
          .cu_seqlens_q = cu_seqlens_q.in(),
          .cu_seqlens_k = cu_seqlens_k.in(),
          .sinks = sinks.in(),
          .key_lengths = key_lengths.in(),
          .bias = bias.in(),
          .visible = visible.in(),
          .block_table = block_table.in()};
}

BackwardTensors Inputs::backward(const Operand& o, const Operand& lse,
                                 const Gradients& gradients) const {
  return {.q = packed(q.in(), varlen()),
          .k = packed(k.in(), varlen()),
          .v = packed(v.in(), varlen()),
          .o = packed(o.in(), varlen()),
          .lse = packed(lse.in(), varlen()),
          .d_o = packed(gradients.d_o.in(), varlen()),
          .dq = packed(gradients.dq.out(), varlen()),
          .dk = packed(gradients.dk.out(), varlen()),
          .dv = packed(gradients.dv.out(), varlen()),
          .d_lse = packed(gradients.d_lse.in(), varlen()),
          .alibi_slopes = slopes.in(),
          .cu_seqlens_q = cu_seqlens_q.in(),
          .cu_seqlens_k = cu_seqlens_k.in(),
          .sinks = sinks.in(),
          .key_lengths = key_lengths.in(),
          .d_sinks = gradients.d_sinks.out(),
          .bias = bias.in(),
          .visible = visible.in(),
          .d_bias = gradients.d_bias.out()};
}

void Gradients::make(const Inputs& inputs, DType dtype, DType sums) {
  const Extents& q = inputs.q.spec.shape;
  const Extents& k = inputs.k.spec.shape;
  dq = make_operand(dtype, {q[0], q[1], q[2], q[3]});
  dk = make_operand(dtype, {k[0], k[1], k[2], k[3]});
  dv = make_operand(dtype, {k[0], k[1], k[2], inputs.v.spec.shape[3]});
  if (inputs.sinks.spec.present()) d_sinks = make_operand(sums, {q[2]});
  if (inputs.bias.spec.present()) {
    const Extents& n = inputs.bias.spec.shape;
    d_bias = make_operand(sums, {n[0], n[1], n[2], n[3]});
  }
  for (const Operand* rows : {&dq, &dk, &dv}) inputs.clear_gaps(*rows);
}

void Inputs::clear_gaps(const Operand& output) const {
  if (varlen()) std::memset(output.data, 0, static_cast<std::size_t>(output.bytes()));
}

Operand make_o(const Inputs& inputs, DType dtype) {
  const Extents extents = {inputs.q.spec.shape[0], inputs.q.spec.shape[1], inputs.q.spec.shape[2],
                           inputs.v.spec.shape[3]};
  const AxisMap map = axis_map(inputs.order);
  Operand o = make_operand(dtype, {extents[0], extents[1], extents[2], extents[3]});
  o.file_shape.assign(static_cast<std::size_t>(inputs.order.rank), 1);
  for (std::size_t axis = 0; axis < kMaxRank; ++axis) {
    if (map[axis] != kAbsent) o.file_shape[static_cast<std::size_t>(map[axis])] = extents[axis];
  }
  // Row-major in the file's order of axes.
  const std::int64_t d = extents[3];
  const std::int64_t batch = d * extents[1] * extents[2];
  const std::int64_t s = inputs.order.heads_first ? d : d * extents[2];
  const std::int64_t h = inputs.order.heads_first ? d * extents[1] : d;
  o.spec.stride = {batch, s, h, 1};
  inputs.clear_gaps(o);
  return o;
}

Operand make_lse(const Inputs& inputs) {
  const Extents& q = inputs.q.spec.shape;
  Operand lse = make_operand(DType::f32, {q[0], q[2], q[1]});
  const auto absent = static_cast<std::ptrdiff_t>(4 - inputs.order.rank);
  lse.file_shape.erase(lse.file_shape.begin(), lse.file_shape.begin() + absent);
  inputs.clear_gaps(lse);
  return lse;
}

}  // namespace abacist::cli
