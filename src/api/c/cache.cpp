// abacist_append and abacist_rotate.
#include "abacist/cache.hpp"

#include "abacist/abacist.h"
#include "api/c/convert.hpp"
#include "api/c/last_error.hpp"
#include "api/c/sized.hpp"

namespace abacist::api::c {
namespace {

Result<Rotary> rotary_of(const abacist_rotary* from) {
  Rotary to;
  if (from == nullptr) return to;
  abacist_rotary r;
  if (Status s = read("rotary", from, r); !s) return s.error();
  if (r.reserved != 0) return invalid("reserved", "must be 0");
  if (r.style != ABACIST_INTERLEAVED && r.style != ABACIST_HALF_SPLIT) {
    return invalid("style", "is " + std::to_string(r.style) +
                                ", must be ABACIST_INTERLEAVED or ABACIST_HALF_SPLIT");
  }
  static_assert(static_cast<int32_t>(RotaryStyle::interleaved) == ABACIST_INTERLEAVED &&
                static_cast<int32_t>(RotaryStyle::half_split) == ABACIST_HALF_SPLIT);
  to.style = static_cast<RotaryStyle>(r.style);
  const auto cos = tensor_of("cos", r.cos);
  if (!cos) return cos.error();
  const auto sin = tensor_of("sin", r.sin);
  if (!sin) return sin.error();
  to.cos = *cos;
  to.sin = *sin;
  return to;
}

Status append_rows(const abacist_append_tensors* from, const abacist_rotary* rotary) {
  abacist_append_tensors a;
  if (Status s = read("append_tensors", from, a); !s) return s;
  const auto r = rotary_of(rotary);
  if (!r) return r.error();
  AppendTensors to;
  const struct {
    const char* name;
    const abacist_tensor& from;
    ConstTensor* input;
    Tensor* output;
  } all[] = {{"k", a.k, &to.k, nullptr},
             {"v", a.v, &to.v, nullptr},
             {"k_cache", a.k_cache, nullptr, &to.k_cache},
             {"v_cache", a.v_cache, nullptr, &to.v_cache},
             {"lengths", a.lengths, &to.lengths, nullptr},
             {"block_table", a.block_table, &to.block_table, nullptr}};
  for (const auto& one : all) {
    const auto tensor = tensor_of(one.name, one.from);
    if (!tensor) return tensor.error();
    if (one.input != nullptr) *one.input = *tensor;
    if (one.output != nullptr) *one.output = *tensor;
  }
  return append(to, *r);
}

Status rotate_rows(const abacist_tensor* x, const abacist_tensor* positions,
                   const abacist_rotary* rotary, const abacist_tensor* out) {
  const auto r = rotary_of(rotary);
  if (!r) return r.error();
  if (x == nullptr) return invalid("x", "is null");
  if (positions == nullptr) return invalid("positions", "is null");
  if (out == nullptr) return invalid("out", "is null");
  const auto to_x = tensor_of("x", *x);
  if (!to_x) return to_x.error();
  const auto to_positions = tensor_of("positions", *positions);
  if (!to_positions) return to_positions.error();
  const auto to_out = tensor_of("out", *out);
  if (!to_out) return to_out.error();
  return rotate(*to_x, *to_positions, *r, *to_out);
}

}  // namespace
}  // namespace abacist::api::c

namespace c = abacist::api::c;

abacist_status abacist_append(const abacist_append_tensors* tensors,
                              const abacist_rotary* rotary) noexcept {
  return c::guarded([&] { return c::append_rows(tensors, rotary); });
}

abacist_status abacist_rotate(const abacist_tensor* x, const abacist_tensor* positions,
                              const abacist_rotary* rotary, const abacist_tensor* out) noexcept {
  return c::guarded([&] { return c::rotate_rows(x, positions, rotary, out); });
}
