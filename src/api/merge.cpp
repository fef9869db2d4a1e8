// The public merge: checks, then the CPU's row-by-row merging.
#include <algorithm>
#include <string>
#include <vector>

#include "abacist/attention.hpp"
#include "api/caught.hpp"
#include "api/tensors.hpp"
#include "api/validate.hpp"
#include "core/text.hpp"
#include "cpu/merge.hpp"
#include "cpu/parallel.hpp"

namespace abacist {
namespace {

bool same_shape(const TensorSpec& a, const TensorSpec& b) {
  return a.rank == b.rank && std::equal(a.shape.begin(), a.shape.begin() + a.rank, b.shape.begin());
}

Status check_device(const std::string& name, const TensorSpec& spec) {
  if (!spec.present() || spec.device.type == DeviceType::cpu) return {};
  return Error{ErrorCode::unsupported, name,
               "is on " + core::to_text(spec.device) + "; merge works on the host"};
}

Status check_pair(const std::string& prefix, const ConstTensor& o, const ConstTensor& lse,
                  const TensorSpec& expected, bool needs_lse) {
  if (Status s = api::check_view((prefix + "o").c_str(), o, prefix.empty()); !s) return s;
  if (Status s = api::check_view((prefix + "lse").c_str(), lse, prefix.empty()); !s) return s;
  if (Status s = check_device(prefix + "o", o); !s) return s;
  if (Status s = check_device(prefix + "lse", lse); !s) return s;
  if (!same_shape(o, expected)) {
    return api::invalid(prefix + "o", "shape is " + core::to_text(o.shape, o.rank) +
                                          ", must be that of o, " +
                                          core::to_text(expected.shape, expected.rank));
  }
  if (o.dtype != DType::f32 && o.dtype != DType::bf16 && o.dtype != DType::f16) {
    return api::invalid(
        prefix + "o", std::string("dtype is ") + to_string(o.dtype) + ", must be f32, bf16 or f16");
  }
  if (!lse.present() && !needs_lse) return {};
  const auto& s = expected.shape;
  const TensorSpec wanted = expected.rank == 4 ? contiguous(DType::f32, {s[0], s[2], s[1]})
                                               : contiguous(DType::f32, {s[1], s[0]});
  if (lse.dtype != DType::f32 || !same_shape(lse, wanted)) {
    return api::invalid(prefix + "lse",
                        "is " + core::to_text(lse) + ", must be " + core::to_text(wanted));
  }
  return {};
}

Status check_sinks(const ConstTensor& sinks, std::int64_t heads) {
  if (!sinks.present()) return {};
  if (Status s = api::check_view("sinks", sinks, false); !s) return s;
  if (Status s = check_device("sinks", sinks); !s) return s;
  const TensorSpec wanted = contiguous(DType::f32, {heads});
  if (sinks.dtype == DType::f32 && same_shape(sinks, wanted)) return {};
  return api::invalid("sinks", "is " + core::to_text(sinks) + ", must be " + core::to_text(wanted));
}

}  // namespace

Status merge(std::span<const Partial> parts, const Tensor& o, const Tensor& lse,
             const ConstTensor& sinks) try {
  if (o.rank != 3 && o.rank != 4) {
    return api::invalid("o", "rank is " + std::to_string(o.rank) +
                                 ", must be 4 [b, s_q, h_q, d_v] or 3 [total_q, h_q, d_v]");
  }
  std::vector<api::NamedTensor> all{{"o", o, true}, {"lse", lse, true}, {"sinks", sinks}};
  if (Status s = check_pair("", o, lse, o, false); !s) return s;
  const std::int64_t heads = o.shape[o.rank == 4 ? 2 : 1];
  if (Status s = check_sinks(sinks, heads); !s) return s;
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const std::string prefix = "parts[" + std::to_string(p) + "].";
    if (Status s = check_pair(prefix, parts[p].o, parts[p].lse, o, true); !s) return s;
    all.push_back({prefix + "o", parts[p].o, false});
    all.push_back({prefix + "lse", parts[p].lse, false});
  }
  if (Status s = api::check_operands(all); !s) return s;
  const std::int64_t rows = o.rank == 4 ? o.shape[0] * o.shape[1] : o.shape[0];
  if (heads == 0) return {};  // nothing to write in any row
  cpu::merge_rows(parts, o, lse, sinks, rows, cpu::default_threads());
  return {};
} catch (...) {
  return api::caught();
}

}  // namespace abacist
