// Tensors with their memory: from files, made of random numbers, or to be filled by a run.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "abacist/problem.hpp"
#include "io/tensor_file.hpp"
#include "options.hpp"

namespace abacist::cli {

/// How the axes of a file stand for [b, s, h, d].
struct AxisOrder {
  bool heads_first = false;  ///< bhsd instead of bshd
  int rank = 4;              ///< 4, 3 (no b) or 2 (neither b nor h)
};

/// A tensor and whatever keeps its bytes alive. Outputs are written through `data`.
struct Operand {
  TensorSpec spec{};
  void* data = nullptr;
  std::shared_ptr<const void> owner{};
  std::vector<std::int64_t> file_shape{};  ///< outputs: the axes of the file, row-major

  Tensor out() const { return spec.present() ? Tensor{data, spec} : Tensor{}; }
  ConstTensor in() const { return spec.present() ? ConstTensor{data, spec} : ConstTensor{}; }
  std::int64_t count() const;
  std::int64_t bytes() const { return count() * size_of(spec.dtype); }
};

/// A contiguous tensor of these extents; its memory is not initialised.
Operand make_operand(DType dtype, std::initializer_list<std::int64_t> shape);

/// Standard normal numbers.
Operand make_random(DType dtype, std::initializer_list<std::int64_t> shape, std::uint64_t seed,
                    std::uint64_t stream);

/// Whether a file's array holds numbers that Q, K and V can be.
bool is_float(const io::Array& array);

/// The bytes of a loaded array, in place if its elements are aligned. `spec` has as many elements.
std::pair<void*, std::shared_ptr<const void>> aligned_bytes(const io::LoadedArray& loaded,
                                                            const TensorSpec& spec);

/// A contiguous copy in another type.
Operand convert(const ConstTensor& from, DType dtype);

struct Inputs;

/// What goes into a backward pass beside the inputs, and what comes out.
struct Gradients {
  Operand d_o, d_lse, dq, dk, dv, d_sinks, d_bias;

  /// Memory for the results: dQ, dK and dV of one type, and of another the gradients of sinks and
  /// bias, if there are such.
  void make(const Inputs& inputs, DType dtype, DType sums);
};

/// Q, K, V, and beside them what add_features() was asked for.
struct Inputs {
  Operand q, k, v, slopes, sinks, bias, visible, key_lengths, block_table;
  /// Of varlen inputs, whose q (and k, v without pages) are [1, total, h, d] here.
  Operand cu_seqlens_q, cu_seqlens_k;
  AxisOrder order{};
  std::vector<std::string> paths{};  ///< files that must not be overwritten

  /// UserError if `path` is one of `paths`, however it is spelt or linked.
  void refuse_to_overwrite(const std::string& path) const;
  bool varlen() const { return cu_seqlens_q.spec.present() || cu_seqlens_k.spec.present(); }
  std::int64_t sequences() const {
    return cu_seqlens_q.spec.present() ? cu_seqlens_q.spec.shape[0] - 1 : q.spec.shape[0];
  }
  /// Zeros where a run writes nothing: rows past the last sequence of varlen outputs.
  void clear_gaps(const Operand& output) const;
  ForwardTensors forward(const Tensor& o, const Tensor& lse) const;
  /// Of inputs without a block table.
  BackwardTensors backward(const Operand& o, const Operand& lse, const Gradients& gradients) const;
};

/// From files. Throws UserError or FileError.
Inputs load_inputs(const FileArguments& files);

/// Random numbers.
Inputs random_inputs(const SizeArguments& sizes);

/// O and LSE for these inputs, laid out as a file of the inputs' axis order is.
Operand make_o(const Inputs& inputs, DType dtype);
Operand make_lse(const Inputs& inputs);

}  // namespace abacist::cli
