#include "api/c/convert.hpp"

#include <cstddef>
#include <iterator>
#include <string>

#include "api/c/sized.hpp"
#include "core/operands.hpp"
#include "core/text.hpp"

namespace abacist::api::c {
namespace {

/// Where a pass keeps an operand: as an input, as an output, or not at all.
template <class Tensors>
struct Slot {
  ConstTensor Tensors::*input = nullptr;
  Tensor Tensors::*output = nullptr;

  bool used() const { return input != nullptr || output != nullptr; }
};

/// One operand in each of its forms.
struct Row {
  const char* name;
  abacist_tensor abacist_tensors::*tensor;
  void* abacist_pointers::*pointer;
  TensorSpec Operands::*spec;
  Slot<ForwardTensors> forward{};
  Slot<BackwardTensors> backward{};
};

using Tc = abacist_tensors;
using Pc = abacist_pointers;
using Fw = ForwardTensors;
using Bw = BackwardTensors;

// A new operand is one row here and a field at the end of the two structs.
constexpr Row kRows[] = {
    {"q", &Tc::q, &Pc::q, &Operands::q, {.input = &Fw::q}, {.input = &Bw::q}},
    {"k", &Tc::k, &Pc::k, &Operands::k, {.input = &Fw::k}, {.input = &Bw::k}},
    {"v", &Tc::v, &Pc::v, &Operands::v, {.input = &Fw::v}, {.input = &Bw::v}},
    {"o", &Tc::o, &Pc::o, &Operands::o, {.output = &Fw::o}, {.input = &Bw::o}},
    {"lse", &Tc::lse, &Pc::lse, &Operands::lse, {.output = &Fw::lse}, {.input = &Bw::lse}},
    {"d_o", &Tc::d_o, &Pc::d_o, &Operands::d_o, {}, {.input = &Bw::d_o}},
    {"d_lse", &Tc::d_lse, &Pc::d_lse, &Operands::d_lse, {}, {.input = &Bw::d_lse}},
    {"dq", &Tc::dq, &Pc::dq, &Operands::dq, {}, {.output = &Bw::dq}},
    {"dk", &Tc::dk, &Pc::dk, &Operands::dk, {}, {.output = &Bw::dk}},
    {"dv", &Tc::dv, &Pc::dv, &Operands::dv, {}, {.output = &Bw::dv}},
    {"alibi_slopes",
     &Tc::alibi_slopes,
     &Pc::alibi_slopes,
     &Operands::alibi_slopes,
     {.input = &Fw::alibi_slopes},
     {.input = &Bw::alibi_slopes}},
    {"cu_seqlens_q",
     &Tc::cu_seqlens_q,
     &Pc::cu_seqlens_q,
     &Operands::cu_seqlens_q,
     {.input = &Fw::cu_seqlens_q},
     {.input = &Bw::cu_seqlens_q}},
    {"cu_seqlens_k",
     &Tc::cu_seqlens_k,
     &Pc::cu_seqlens_k,
     &Operands::cu_seqlens_k,
     {.input = &Fw::cu_seqlens_k},
     {.input = &Bw::cu_seqlens_k}},
    {"sinks",
     &Tc::sinks,
     &Pc::sinks,
     &Operands::sinks,
     {.input = &Fw::sinks},
     {.input = &Bw::sinks}},
    {"d_sinks", &Tc::d_sinks, &Pc::d_sinks, &Operands::d_sinks, {}, {.output = &Bw::d_sinks}},
    {"key_lengths",
     &Tc::key_lengths,
     &Pc::key_lengths,
     &Operands::key_lengths,
     {.input = &Fw::key_lengths},
     {.input = &Bw::key_lengths}},
    {"bias", &Tc::bias, &Pc::bias, &Operands::bias, {.input = &Fw::bias}, {.input = &Bw::bias}},
    {"d_bias", &Tc::d_bias, &Pc::d_bias, &Operands::d_bias, {}, {.output = &Bw::d_bias}},
    {"visible",
     &Tc::visible,
     &Pc::visible,
     &Operands::visible,
     {.input = &Fw::visible},
     {.input = &Bw::visible}},
    {"block_table",
     &Tc::block_table,
     &Pc::block_table,
     &Operands::block_table,
     {.input = &Fw::block_table},
     {}},
};
static_assert(
    std::size(kRows) == std::size(core::kOperands),
    "a new operand: append it to abacist_tensors, abacist_pointers and kRows, then update "
    "tests/package/abi.txt (CONTRIBUTING.md)");
static_assert(sizeof(abacist_pointers) == sizeof(std::size_t) + std::size(kRows) * sizeof(void*));

// The numbers of the enumerations are those of C++.
template <class Enum>
constexpr int32_t number(Enum value) {
  return static_cast<int32_t>(value);
}
static_assert(number(DType::f32) == ABACIST_F32 && number(DType::bf16) == ABACIST_BF16 &&
              number(DType::f16) == ABACIST_F16 && number(DType::f64) == ABACIST_F64 &&
              number(DType::i32) == ABACIST_I32 && number(DType::u8) == ABACIST_U8);
static_assert(number(DeviceType::cpu) == ABACIST_CPU && number(DeviceType::cuda) == ABACIST_CUDA);
static_assert(number(Pass::forward) == ABACIST_FORWARD &&
              number(Pass::backward) == ABACIST_BACKWARD);
static_assert(number(Align::bottom_right) == ABACIST_BOTTOM_RIGHT &&
              number(Align::top_left) == ABACIST_TOP_LEFT);
static_assert(number(Backend::automatic) == ABACIST_BACKEND_AUTOMATIC &&
              number(Backend::cpu) == ABACIST_BACKEND_CPU &&
              number(Backend::reference) == ABACIST_BACKEND_REFERENCE &&
              number(Backend::cuda) == ABACIST_BACKEND_CUDA);
static_assert(DeviceFault::cu_seqlens_q == ABACIST_FAULT_CU_SEQLENS_Q &&
              DeviceFault::cu_seqlens_k == ABACIST_FAULT_CU_SEQLENS_K &&
              DeviceFault::key_lengths == ABACIST_FAULT_KEY_LENGTHS &&
              DeviceFault::block_table == ABACIST_FAULT_BLOCK_TABLE);

bool used(const Row& row, Pass pass) {
  return pass == Pass::forward ? row.forward.used() : row.backward.used();
}

const char* name_of(Pass pass) { return pass == Pass::forward ? "forward" : "backward"; }

/// A field that holds the number of an enumeration, whose last is `last`.
template <class Enum>
Status read_number(const char* name, const std::string& what, int32_t from, Enum last,
                   const char* must, Enum& to) {
  if (from < 0 || from > number(last)) {
    return invalid(name, what + "is " + std::to_string(from) + ", must be " + must);
  }
  to = static_cast<Enum>(from);
  return {};
}

Status read_flag(const char* name, int32_t from, bool& to) {
  if (from != 0 && from != 1) {
    return invalid(name, "is " + std::to_string(from) + ", must be 0 or 1");
  }
  to = from == 1;
  return {};
}

template <class Tensors>
Tensors tensors_of(const Bound& bound, Slot<Tensors> Row::*slot) {
  Tensors tensors{};
  for (const Row& row : kRows) {
    const TensorSpec& spec = bound.specs.*row.spec;
    if (spec.rank == 0) continue;
    const Slot<Tensors>& place = row.*slot;
    if (place.input != nullptr) tensors.*place.input = {bound.pointers.*row.pointer, spec};
    if (place.output != nullptr) tensors.*place.output = {bound.pointers.*row.pointer, spec};
  }
  return tensors;
}

}  // namespace

Result<Pass> pass_of(int32_t pass) {
  Pass result{};
  if (Status s = read_number("pass", "", pass, Pass::backward,
                             "ABACIST_FORWARD or ABACIST_BACKWARD", result);
      !s) {
    return s.error();
  }
  return result;
}

Result<Tensor> tensor_of(const char* name, const abacist_tensor& from) {
  Tensor to;
  to.data = from.data;
  if (Status s =
          read_number(name, "dtype ", from.dtype, DType::u8, "one of enum abacist_dtype", to.dtype);
      !s) {
    return s.error();
  }
  if (Status s = read_number(name, "device_type ", from.device_type, DeviceType::cuda,
                             "ABACIST_CPU or ABACIST_CUDA", to.device.type);
      !s) {
    return s.error();
  }
  to.device.index = from.device_index;
  to.rank = from.rank;
  static_assert(kMaxRank == ABACIST_MAX_RANK);
  std::copy(std::begin(from.shape), std::end(from.shape), to.shape.begin());
  std::copy(std::begin(from.stride), std::end(from.stride), to.stride.begin());
  return to;
}

abacist_tensor to_c(const TensorSpec& from) noexcept {
  abacist_tensor to{};
  to.dtype = number(from.dtype);
  to.rank = from.rank;
  to.device_type = number(from.device.type);
  to.device_index = from.device.index;
  std::copy(from.shape.begin(), from.shape.end(), to.shape);
  std::copy(from.stride.begin(), from.stride.end(), to.stride);
  return to;
}

Result<Bound> bind(Pass pass, const abacist_tensors* tensors) {
  abacist_tensors all;
  if (Status s = read("tensors", tensors, all); !s) return s.error();
  Bound bound;
  for (const Row& row : kRows) {
    const abacist_tensor& tensor = all.*row.tensor;
    if (tensor.rank == 0) {
      if (tensor.data == nullptr) continue;
      return invalid(row.name, "has data, but rank 0");
    }
    if (!used(row, pass)) {
      return invalid(row.name, std::string("is given, but the ") + name_of(pass) +
                                   " pass has no such operand");
    }
    const auto converted = tensor_of(row.name, tensor);
    if (!converted) return converted.error();
    bound.specs.*row.spec = converted->spec();
    bound.pointers.*row.pointer = tensor.data;
  }
  return bound;
}

Result<Bound> bind(const Problem& planned, const abacist_pointers* pointers) {
  Bound bound{planned.operands, {}};
  if (Status s = read("pointers", pointers, bound.pointers); !s) return s.error();
  for (const Row& row : kRows) {
    if (!(bound.specs.*row.spec).present() && bound.pointers.*row.pointer != nullptr) {
      return invalid(row.name, "is given, but the plan has no such operand");
    }
  }
  return bound;
}

Result<Options> options_of(const abacist_options* from) {
  Options to;
  if (from == nullptr) return to;
  abacist_options o;
  bool has_window = false;
  bool has_scale = false;
  if (Status s = read("options", from, o); !s) return s.error();
  if (Status s = read_flag("causal", o.causal, to.mask.causal); !s) return s.error();
  if (Status s = read_number("align", "", o.align, Align::top_left,
                             "ABACIST_BOTTOM_RIGHT or ABACIST_TOP_LEFT", to.mask.align);
      !s) {
    return s.error();
  }
  if (Status s = read_flag("has_window", o.has_window, has_window); !s) return s.error();
  if (Status s = read_flag("has_scale", o.has_scale, has_scale); !s) return s.error();
  static_assert(ABACIST_UNBOUNDED == kUnbounded);
  if (has_window) {
    to.mask.window = {o.window_left, o.window_right};
  } else if (o.window_left != 0 || o.window_right != 0) {
    return invalid("has_window", "is 0, but window_left or window_right is set; must be 1 then");
  }
  if (has_scale) {
    to.score.scale = o.scale;
  } else if (o.scale != 0.0) {
    return invalid("has_scale",
                   "is 0, but scale is " + core::to_text(o.scale) + "; must be 1 then");
  }
  to.score.softcap = o.softcap;
  to.max_lengths = {o.max_s_q, o.max_s_k};
  to.dropout = {o.dropout_p, o.dropout_seed};
  return to;
}

Result<PlanOptions> plan_options_of(const abacist_plan_options* from) {
  PlanOptions to;
  if (from == nullptr) return to;
  abacist_plan_options o;
  if (Status s = read("plan_options", from, o); !s) return s.error();
  if (Status s = read_number("backend", "", o.backend, Backend::cuda, "one of enum abacist_backend",
                             to.backend);
      !s) {
    return s.error();
  }
  to.threads = o.threads;
  if (Status s = read_flag("batch_invariant", o.batch_invariant, to.batch_invariant); !s) {
    return s.error();
  }
  if (o.reserved != 0) return invalid("reserved", "is not 0 in plan_options");
  return to;
}

Result<RunOptions> run_options_of(const abacist_run_options* from) {
  RunOptions to;
  if (from == nullptr) return to;
  abacist_run_options o;
  if (Status s = read("run_options", from, o); !s) return s.error();
  if (o.workspace == nullptr && o.workspace_bytes != 0) {
    return invalid("workspace",
                   "is null, but workspace_bytes is " + std::to_string(o.workspace_bytes));
  }
  to.workspace = {o.workspace, o.workspace_bytes};
  to.stream = static_cast<Stream>(o.stream);
  to.progress = o.progress;
  to.progress_context = o.progress_context;
  return to;
}

Result<MergeTargets> merge_targets_of(const abacist_tensors* into) {
  abacist_tensors all;
  if (Status s = read("into", into, all); !s) return s.error();
  MergeTargets targets;
  for (const Row& row : kRows) {
    const abacist_tensor& tensor = all.*row.tensor;
    if (tensor.rank == 0 && tensor.data == nullptr) continue;
    const auto converted = tensor_of(row.name, tensor);
    if (!converted) return converted.error();
    if (row.tensor == &Tc::o) {
      targets.o = *converted;
    } else if (row.tensor == &Tc::lse) {
      targets.lse = *converted;
    } else if (row.tensor == &Tc::sinks) {
      targets.sinks = *converted;
    } else {
      return invalid(row.name, "is given, but merging has no such operand");
    }
  }
  return targets;
}

ForwardTensors forward_tensors(const Bound& bound) { return tensors_of(bound, &Row::forward); }
BackwardTensors backward_tensors(const Bound& bound) { return tensors_of(bound, &Row::backward); }

Status write(const PlanInfo& from, abacist_plan_info* out) {
  abacist_plan_info to{};
  to.kernel = from.kernel.c_str();
  to.rows = from.rows;
  to.keys = from.keys;
  to.splits = from.splits;
  to.work_items = from.work_items;
  to.threads = from.threads;
  to.grid = from.grid;
  to.workspace_bytes = from.workspace_bytes;
  to.scratch_bytes_per_thread = from.scratch_bytes_per_thread;
  const auto figure = [](const Figure& from_figure, int64_t& value, int32_t& exact) {
    value = from_figure.value;
    exact = from_figure.exact ? 1 : 0;
  };
  figure(from.visible_pairs, to.visible_pairs, to.visible_pairs_exact);
  figure(from.flops, to.flops, to.flops_exact);
  figure(from.slow_memory_bytes, to.slow_memory_bytes, to.slow_memory_bytes_exact);
  figure(from.operand_bytes, to.operand_bytes, to.operand_bytes_exact);
  figure(from.standard_memory_bytes, to.standard_memory_bytes, to.standard_memory_bytes_exact);
  to.deterministic = from.deterministic ? 1 : 0;
  to.declined = from.declined.size();
  to.batch_invariant = from.batch_invariant ? 1 : 0;
  return write("plan_info", to, out);
}

Status write(const Operands& from, abacist_tensors* out) {
  abacist_tensors to{};
  for (const Row& row : kRows) {
    if ((from.*row.spec).present()) to.*row.tensor = to_c(from.*row.spec);
  }
  return write("tensors", to, out);
}

Status write(const Options& from, abacist_options* out) {
  abacist_options to{};
  to.causal = from.mask.causal ? 1 : 0;
  to.align = number(from.mask.align);
  if (from.mask.window != Window{}) {
    to.has_window = 1;
    to.window_left = from.mask.window.left;
    to.window_right = from.mask.window.right;
  }
  if (from.score.scale) {
    to.has_scale = 1;
    to.scale = *from.score.scale;
  }
  to.softcap = from.score.softcap;
  to.max_s_q = from.max_lengths.s_q;
  to.max_s_k = from.max_lengths.s_k;
  to.dropout_p = from.dropout.p;
  to.dropout_seed = from.dropout.seed;
  return write("options", to, out);
}

}  // namespace abacist::api::c
