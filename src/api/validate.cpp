// Rules that need no data: presence, ranks, shapes, dtypes, strides, mask and score.
#include "api/validate.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "api/caught.hpp"
#include "api/overlap.hpp"
#include "core/operands.hpp"
#include "core/text.hpp"

namespace abacist::api {
namespace {

// Lengths and strides below these keep every offset in bytes inside 63 bits.
constexpr std::int64_t kMaxExtent = std::int64_t{1} << 40;
constexpr std::int64_t kMaxBytes = std::int64_t{1} << 60;

/// The largest |offset| in bytes that the spec can address fits; shape and strides are sane.
Status check_extents(const char* name, const TensorSpec& spec) {
  if (spec.rank < 0 || spec.rank > kMaxRank) {
    return invalid(name, "rank is " + std::to_string(spec.rank) + ", must be in [0, 4]");
  }
  if (spec.dtype > DType::u8) {
    return invalid(name, "dtype is " + std::to_string(static_cast<int>(spec.dtype)) +
                             ", must be one of DType");
  }
  const std::int64_t size = size_of(spec.dtype);
  std::int64_t elements = 1;
  std::int64_t reach = size;
  for (int axis = 0; axis < spec.rank; ++axis) {
    const std::int64_t extent = spec.shape[static_cast<std::size_t>(axis)];
    const std::int64_t stride = spec.stride[static_cast<std::size_t>(axis)];
    const auto where = std::string("shape") + core::to_text(spec.shape, spec.rank);
    if (extent < 0 || extent > kMaxExtent) {
      return invalid(name, where + " has an extent outside [0, 2^40]");
    }
    if (extent > 0 && elements > kMaxBytes / size / extent) {
      return invalid(name, where + " overflows: its size must be below 2^60 bytes");
    }
    elements *= extent;
    const std::int64_t steps = extent > 1 ? extent - 1 : 0;
    const bool absurd = stride == std::numeric_limits<std::int64_t>::min() ||
                        (steps > 0 && std::abs(stride) > (kMaxBytes - reach) / size / steps);
    if (absurd) {
      return invalid(name, "strides" + core::to_text(spec.stride, spec.rank) + " with " + where +
                               " overflow: offsets must be below 2^60 bytes");
    }
    reach += std::abs(stride) * steps * size;
  }
  return {};
}

Status check_device(const char* name, Device device) {
  if (device.type != DeviceType::cpu && device.type != DeviceType::cuda) {
    return invalid(name, "device type is " + std::to_string(static_cast<int>(device.type)) +
                             ", must be cpu or cuda");
  }
  if (device.index >= 0) return {};
  return invalid(name, "device index is " + std::to_string(device.index) + ", must be at least 0");
}

Status check_float(const char* name, const TensorSpec& spec) {
  if (spec.dtype != DType::i32 && spec.dtype != DType::u8) return {};
  return invalid(
      name, std::string("dtype is ") + to_string(spec.dtype) + ", must be a floating-point type");
}

Status check_shape(const char* name, const TensorSpec& spec, const TensorSpec& expected,
                   const char* letters) {
  if (spec.rank == expected.rank) {
    bool same = true;
    for (std::size_t axis = 0; axis < static_cast<std::size_t>(spec.rank); ++axis) {
      same = same && spec.shape[axis] == expected.shape[axis];
    }
    if (same) return {};
  }
  return invalid(name, "shape is " + core::to_text(spec.shape, spec.rank) + ", must be " + letters +
                           " = " + core::to_text(expected.shape, expected.rank));
}

Status check_lengths(const char* name, const TensorSpec& spec, const char* wanted) {
  if (spec.rank == 1 && spec.dtype == DType::i32 && (spec.shape[0] <= 1 || spec.stride[0] == 1)) {
    return {};
  }
  return invalid(name, "is " + core::to_text(spec) + ", must be contiguous " + wanted);
}

TensorSpec shaped(std::initializer_list<std::int64_t> shape) {
  return contiguous(DType::f32, shape);
}

class Validator {
 public:
  explicit Validator(const Problem& problem) : p_(problem), x_(problem.operands) {}

  Result<core::Resolved> run() {
    for (auto step :
         {&Validator::presence, &Validator::inputs, &Validator::sequences,
          &Validator::derived_shapes, &Validator::key_lengths, &Validator::sinks,
          &Validator::pair_operands, &Validator::mask, &Validator::score, &Validator::dropout}) {
      if (Status status = (this->*step)(); !status) return status.error();
    }
    core::Resolved resolved;
    resolved.problem = p_;
    resolved.geometry = g_;
    resolved.scale = p_.options.score.scale.value_or(1.0 / std::sqrt(static_cast<double>(g_.d_qk)));
    return resolved;
  }

 private:
  Status presence() {
    if (p_.pass != Pass::forward && p_.pass != Pass::backward) {
      return invalid("pass", "is " + std::to_string(static_cast<int>(p_.pass)) +
                                 ", must be forward or backward");
    }
    for (const core::OperandRule& rule : core::kOperands) {
      const core::Use use = rule.in(p_.pass);
      const TensorSpec& spec = x_.*rule.spec;
      if (spec.rank == 0) {
        if (is_required(use)) return invalid(rule.name, "is absent, but this pass needs it");
        continue;
      }
      if (Status s = check_view(rule.name, spec, is_output(use)); !s) return s;
      if (Status s = check_device(rule.name, spec.device); !s) return s;
      if (spec.device != x_.q.device) {
        return invalid(rule.name, "is on " + core::to_text(spec.device) + ", but q is on " +
                                      core::to_text(x_.q.device));
      }
    }
    return {};
  }

  Status inputs() {
    g_.paged = x_.block_table.present();
    g_.varlen = x_.cu_seqlens_q.present() || (x_.cu_seqlens_k.present() && !g_.paged);
    for (auto [name, spec] : {std::pair{"q", &x_.q}, {"k", &x_.k}, {"v", &x_.v}}) {
      const bool pool = g_.paged && spec != &x_.q;
      if (spec->rank != (g_.varlen && !pool ? 3 : 4)) {
        const char* letters = pool        ? "[pages, page_size, h_k, d] (a block_table is given)"
                              : g_.varlen ? "[total, h, d] (cu_seqlens are given)"
                                          : "[b, s, h, d] (or [total, h, d] with cu_seqlens)";
        return invalid(
            name, "shape is " + core::to_text(spec->shape, spec->rank) + ", must be " + letters);
      }
      if (Status s = check_float(name, *spec); !s) return s;
    }
    const auto axis = [](const TensorSpec& spec, int from_the_end) {
      return spec.shape[static_cast<std::size_t>(spec.rank - from_the_end)];
    };
    g_.h_q = axis(x_.q, 2);
    g_.h_k = axis(x_.k, 2);
    g_.d_qk = axis(x_.q, 1);
    g_.d_v = axis(x_.v, 1);
    if (g_.d_qk < 1) return invalid("q", "head dimension is 0, must be at least 1");
    if (g_.d_v < 1) return invalid("v", "head dimension is 0, must be at least 1");
    if (g_.h_q > 0 && (g_.h_k == 0 || g_.h_q % g_.h_k != 0)) {
      return invalid("k", "h_k is " + std::to_string(g_.h_k) +
                              ", must divide h_q = " + std::to_string(g_.h_q));
    }
    g_.group = g_.h_k > 0 ? g_.h_q / g_.h_k : 1;
    return {};
  }

  Status check_max_lengths() const {
    const MaxLengths& max = p_.options.max_lengths;
    for (auto [name, value] :
         {std::pair{"max_lengths.s_q", max.s_q}, {"max_lengths.s_k", max.s_k}}) {
      if (value < 0 || value > kMaxExtent) {
        return invalid(name, "is " + std::to_string(value) + ", must be in [0, 2^40]");
      }
    }
    return {};
  }

  Status check_cu_seqlens(const char* name, const TensorSpec& spec) const {
    if (!spec.present()) return invalid(name, "is absent, but the other cu_seqlens is given");
    if (Status s = check_lengths(name, spec, "i32[b + 1]"); !s) return s;
    if (spec.shape[0] >= 1) return {};
    return invalid(name, "is " + core::to_text(spec) + ", must be contiguous i32[b + 1]");
  }

  /// K and V are pools of pages; q is dense or varlen.
  Status paged_sequences() {
    const TensorSpec& table = x_.block_table;
    if (x_.cu_seqlens_k.present()) {
      return invalid("cu_seqlens_k", "is given beside block_table; its lengths are key_lengths");
    }
    if (!x_.key_lengths.present()) {
      return invalid("key_lengths", "is absent, but a block_table is given");
    }
    if (table.dtype != DType::i32 || table.rank != 2 ||
        (table.shape[1] > 1 && table.stride[1] != 1)) {
      return invalid("block_table", "is " + core::to_text(table) +
                                        ", must be i32[b, max_pages] with contiguous rows");
    }
    g_.b = x_.q.shape[0];
    if (g_.varlen) {
      if (Status s = check_cu_seqlens("cu_seqlens_q", x_.cu_seqlens_q); !s) return s;
      if (Status s = check_max_lengths(); !s) return s;
      g_.b = x_.cu_seqlens_q.shape[0] - 1;
    }
    g_.total_q = g_.varlen ? x_.q.shape[0] : (core::Count{g_.b} * x_.q.shape[1]).value;
    g_.s_q = g_.varlen ? std::min(p_.options.max_lengths.s_q, g_.total_q) : x_.q.shape[1];
    g_.pages = x_.k.shape[0];
    g_.page_size = x_.k.shape[1];
    g_.max_pages = table.shape[1];
    if (g_.page_size < 1) return invalid("k", "page_size is 0, must be at least 1");
    g_.s_k = (core::Count{g_.max_pages} * g_.page_size).value;
    if (g_.s_k > kMaxExtent) return invalid("block_table", "has room for more than 2^40 keys");
    g_.total_k = (core::Count{g_.b} * g_.s_k).value;
    if (table.shape[0] != g_.b) {
      return invalid("block_table", "has " + std::to_string(table.shape[0]) +
                                        " rows, must have b = " + std::to_string(g_.b));
    }
    if (Status s = check_shape("k", x_.k, shaped({g_.pages, g_.page_size, g_.h_k, g_.d_qk}),
                               "[pages, page_size, h_k, d_qk]");
        !s) {
      return s;
    }
    return check_shape("v", x_.v, shaped({g_.pages, g_.page_size, g_.h_k, g_.d_v}),
                       "[pages, page_size, h_k, d_v]");
  }

  Status sequences() {
    if (g_.paged) return paged_sequences();
    if (!g_.varlen) {
      g_.b = x_.q.shape[0];
      g_.s_q = x_.q.shape[1];
      g_.s_k = x_.k.shape[1];
      if (Status s = check_shape("k", x_.k, shaped({g_.b, g_.s_k, g_.h_k, g_.d_qk}),
                                 "[b, s_k, h_k, d_qk]");
          !s) {
        return s;
      }
      g_.total_q = (core::Count{g_.b} * g_.s_q).value;
      g_.total_k = (core::Count{g_.b} * g_.s_k).value;
      return check_shape("v", x_.v, shaped({g_.b, g_.s_k, g_.h_k, g_.d_v}), "[b, s_k, h_k, d_v]");
    }
    for (auto [name, spec] :
         {std::pair{"cu_seqlens_q", &x_.cu_seqlens_q}, {"cu_seqlens_k", &x_.cu_seqlens_k}}) {
      if (Status s = check_cu_seqlens(name, *spec); !s) return s;
    }
    if (x_.cu_seqlens_q.shape[0] != x_.cu_seqlens_k.shape[0]) {
      return invalid("cu_seqlens_k", "has " + std::to_string(x_.cu_seqlens_k.shape[0]) +
                                         " entries, cu_seqlens_q has " +
                                         std::to_string(x_.cu_seqlens_q.shape[0]));
    }
    if (Status s = check_max_lengths(); !s) return s;
    const MaxLengths& max = p_.options.max_lengths;
    g_.b = x_.cu_seqlens_q.shape[0] - 1;
    g_.total_q = x_.q.shape[0];
    g_.total_k = x_.k.shape[0];
    g_.s_q = std::min(max.s_q, g_.total_q);  // no sequence is longer than them all
    g_.s_k = std::min(max.s_k, g_.total_k);
    if (Status s =
            check_shape("k", x_.k, shaped({g_.total_k, g_.h_k, g_.d_qk}), "[total_k, h_k, d_qk]");
        !s) {
      return s;
    }
    return check_shape("v", x_.v, shaped({g_.total_k, g_.h_k, g_.d_v}), "[total_k, h_k, d_v]");
  }

  Status derived_shapes() {
    const TensorSpec o =
        g_.varlen ? shaped({g_.total_q, g_.h_q, g_.d_v}) : shaped({g_.b, g_.s_q, g_.h_q, g_.d_v});
    const TensorSpec lse =
        g_.varlen ? shaped({g_.h_q, g_.total_q}) : shaped({g_.b, g_.h_q, g_.s_q});
    const char* o_letters = g_.varlen ? "[total_q, h_q, d_v]" : "[b, s_q, h_q, d_v]";
    const char* lse_letters = g_.varlen ? "[h_q, total_q]" : "[b, h_q, s_q]";
    const struct {
      const char* name;
      const TensorSpec& spec;
      const TensorSpec& expected;
      const char* letters;
    } rules[] = {{"o", x_.o, o, o_letters},
                 {"lse", x_.lse, lse, lse_letters},
                 {"d_o", x_.d_o, o, o_letters},
                 {"d_lse", x_.d_lse, lse, lse_letters},
                 {"dq", x_.dq, x_.q, "the shape of q"},
                 {"dk", x_.dk, x_.k, "the shape of k"},
                 {"dv", x_.dv, x_.v, "the shape of v"}};
    for (const auto& rule : rules) {
      if (!rule.spec.present()) continue;
      if (Status s = check_float(rule.name, rule.spec); !s) return s;
      if (Status s = check_shape(rule.name, rule.spec, rule.expected, rule.letters); !s) return s;
    }
    const TensorSpec& slopes = x_.alibi_slopes;
    if (!slopes.present()) return {};
    if (Status s = check_float("alibi_slopes", slopes); !s) return s;
    if (slopes.rank == 1) return check_shape("alibi_slopes", slopes, shaped({g_.h_q}), "[h_q]");
    return check_shape("alibi_slopes", slopes, shaped({g_.b, g_.h_q}), "[h_q] or [b, h_q]");
  }

  Status key_lengths() {
    const TensorSpec& lengths = x_.key_lengths;
    if (!lengths.present()) return {};
    if (g_.varlen && !g_.paged) {
      return invalid("key_lengths",
                     "is given beside cu_seqlens; lengths of a varlen problem are cu_seqlens_k");
    }
    if (Status s = check_lengths("key_lengths", lengths, "i32[b]"); !s) return s;
    g_.key_lengths = true;
    return check_shape("key_lengths", lengths, shaped({g_.b}), "[b]");
  }

  /// `[b|1, h_q|1, s_q|1, s_k]`.
  Status check_pairs(const char* name, const TensorSpec& spec) const {
    const MaxLengths& most = p_.options.max_lengths;
    const Extents whole = {g_.b, g_.h_q, g_.varlen ? most.s_q : g_.s_q,
                           g_.varlen && !g_.paged ? most.s_k : g_.s_k};
    bool fits = spec.rank == kMaxRank && spec.shape[3] == whole[3];
    for (std::size_t axis = 0; axis < 3 && fits; ++axis) {
      fits = spec.shape[axis] == 1 || spec.shape[axis] == whole[axis];
    }
    if (fits) return {};
    return invalid(name, "shape is " + core::to_text(spec.shape, spec.rank) +
                             ", must be [b|1, h_q|1, s_q|1, s_k] of " +
                             core::to_text(whole, kMaxRank));
  }

  Status pair_operands() {
    if (x_.d_bias.present() && !x_.bias.present()) {
      return invalid("d_bias", "is given without bias");
    }
    if (x_.bias.present()) {
      if (Status s = check_float("bias", x_.bias); !s) return s;
      if (Status s = check_pairs("bias", x_.bias); !s) return s;
    }
    if (x_.d_bias.present()) {
      if (Status s = check_float("d_bias", x_.d_bias); !s) return s;
      if (Status s = check_shape("d_bias", x_.d_bias, x_.bias, "the shape of bias"); !s) return s;
    }
    if (!x_.visible.present()) return {};
    if (x_.visible.dtype != DType::u8) {
      return invalid("visible",
                     std::string("dtype is ") + to_string(x_.visible.dtype) + ", must be u8");
    }
    return check_pairs("visible", x_.visible);
  }

  Status sinks() {
    if (x_.d_sinks.present() && !x_.sinks.present()) {
      return invalid("d_sinks", "is given without sinks");
    }
    for (auto [name, spec] : {std::pair{"sinks", &x_.sinks}, {"d_sinks", &x_.d_sinks}}) {
      if (!spec->present()) continue;
      if (Status s = check_float(name, *spec); !s) return s;
      if (Status s = check_shape(name, *spec, shaped({g_.h_q}), "[h_q]"); !s) return s;
    }
    return {};
  }

  Status mask() {
    const Align align = p_.options.mask.align;
    if (align != Align::bottom_right && align != Align::top_left) {
      return invalid("mask.align", "is " + std::to_string(static_cast<int>(align)) +
                                       ", must be bottom_right or top_left");
    }
    const Window& window = p_.options.mask.window;
    for (auto [name, value] :
         {std::pair{"mask.window.left", window.left}, {"mask.window.right", window.right}}) {
      if (value < 0) {
        return invalid(name, "is " + std::to_string(value) + ", must be at least 0, or kUnbounded");
      }
    }
    return {};
  }

  Status score() {
    const Score& score = p_.options.score;
    constexpr double kMaxFloat = std::numeric_limits<float>::max();
    if (score.scale && !(std::abs(*score.scale) <= kMaxFloat)) {
      return invalid("score.scale", "is " + core::to_text(*score.scale) +
                                        ", must be finite in float (zero and negative are fine)");
    }
    if (!(score.softcap >= 0.0 && score.softcap <= kMaxFloat)) {
      return invalid("score.softcap", "is " + core::to_text(score.softcap) +
                                          ", must be 0 (none) or finite and positive");
    }
    return {};
  }

  Status dropout() {
    const double p = p_.options.dropout.p;
    if (p >= 0.0 && p <= 1.0) return {};
    return invalid("dropout.p", "is " + core::to_text(p) + ", must be in [0, 1]");
  }

  const Problem& p_;
  const Operands& x_;
  core::Geometry g_{};
};

}  // namespace

Error invalid(std::string argument, std::string message) {
  return {ErrorCode::invalid_argument, std::move(argument), std::move(message)};
}

Status check_view(const char* name, const TensorSpec& spec, bool output) {
  if (Status s = check_extents(name, spec); !s) return s;
  if (!output || !may_overlap_itself(spec)) return {};
  return invalid(name, "strides" + core::to_text(spec.stride, spec.rank) + " with shape" +
                           core::to_text(spec.shape, spec.rank) +
                           " write an element twice; every element of an output must be distinct");
}

Result<core::Resolved> resolve(const Problem& problem) { return Validator(problem).run(); }

}  // namespace abacist::api

namespace abacist {

Status validate(const Problem& problem) try {
  auto resolved = api::resolve(problem);
  if (!resolved) return resolved.error();
  return {};
} catch (...) {
  return api::caught();
}

}  // namespace abacist
