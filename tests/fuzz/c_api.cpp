// Calls of the C API with arguments that nobody would make: it answers, or refuses with an error
// that says something and leaves the outputs alone. Every tensor lies in memory of exactly its
// size, so that AddressSanitizer sees an access beside it.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "abacist/abacist.h"

namespace {

constexpr std::int64_t kMostBytes = 1 << 16;     // of a tensor that may be computed with
constexpr std::int64_t kMostElements = 1 << 11;  // so that a call takes no time

void require(bool condition) {
  if (!condition) std::abort();
}

/// A tensor's memory.
struct Region {
  std::vector<std::uint8_t> before;  // what it held
  std::unique_ptr<std::uint8_t[]> bytes;
};

class Caller {
 public:
  explicit Caller(FuzzedDataProvider& in) : in_(in) {
    for (std::int64_t& extent : sizes_) extent = in_.ConsumeIntegralInRange<std::int64_t>(0, 6);
    sizes_[3] = std::max<std::int64_t>(sizes_[3], 1);  // h_k
    sizes_[2] *= sizes_[3];                            // h_q
  }

  void call() {
    make_tensors();
    make_options();
    switch (in_.ConsumeIntegralInRange(0, 6)) {
      case 0:
        judge_run(abacist_forward(&tensors_, &options_, &plan_options_, nullptr));
        break;
      case 1:
        judge(abacist_backward(&tensors_, &options_, &plan_options_, nullptr));
        break;
      case 2:
        merge();
        break;
      case 3:
        judge(abacist_validate(in_.ConsumeIntegral<std::int32_t>() % 3, &tensors_, &options_));
        break;
      case 4:
        append();
        break;
      case 5: {
        const abacist_tensor positions = tensor({kB}, ABACIST_I32);
        const abacist_rotary r = rotary();
        const abacist_tensor& out = in_.ConsumeBool() ? tensors_.dq : tensors_.q;
        judge(abacist_rotate(&tensors_.q, &positions, &r, &out));
        break;
      }
      default:
        plan();
    }
  }

 private:
  enum { kB, kSq, kHq, kHk, kSk, kDqk, kDv, kB1 };

  /// Extents of an operand: b, s_q or s_k, heads, d_qk or d_v; mostly as they should be.
  abacist_tensor tensor(std::initializer_list<int> axes, std::int32_t dtype) {
    abacist_tensor t{};
    std::int64_t shape[ABACIST_MAX_RANK] = {};
    int rank = 0;
    for (const int axis : axes)
      shape[rank++] = axis < 0 ? 1 : sizes_[static_cast<std::size_t>(axis)];
    t = abacist_contiguous(nullptr, dtype, rank, shape);
    while (in_.ConsumeIntegralInRange(0, 15) == 15) spoil(t);
    place(t);
    return t;
  }

  /// Changes one field.
  void spoil(abacist_tensor& t) {
    const auto axis = in_.ConsumeIntegralInRange(0, ABACIST_MAX_RANK - 1);
    const auto small = in_.ConsumeIntegralInRange<std::int64_t>(-8, 64);
    const auto any = in_.ConsumeBool() ? in_.ConsumeIntegral<std::int64_t>() : small;
    switch (in_.ConsumeIntegralInRange(0, 6)) {
      case 0:
        t.dtype = static_cast<std::int32_t>(any);
        break;
      case 1:
        t.rank = static_cast<std::int32_t>(any);
        break;
      case 2:
        t.shape[axis] = any;
        break;
      case 3:
        t.stride[axis] = any;
        break;
      case 4:
        std::swap(t.stride[axis], t.stride[0]);
        break;
      case 5:
        t.device_index = static_cast<std::int32_t>(small);
        break;
      default:
        t = {};
    }
  }

  /// Gives a tensor memory that its strides stay inside of; none if it is large or makes no sense.
  void place(abacist_tensor& t) {
    if (t.rank < 1 || t.rank > ABACIST_MAX_RANK) return;
    const auto size = static_cast<__int128>(std::max<std::size_t>(abacist_dtype_size(t.dtype), 1));
    __int128 low = 0, high = 0, elements = 1;
    for (int axis = 0; axis < t.rank; ++axis) {
      if (t.shape[axis] < 0 || t.shape[axis] > kMostElements) return;
      elements *= t.shape[axis];
      if (t.shape[axis] == 0) continue;
      const __int128 reach = __int128{t.shape[axis] - 1} * t.stride[axis];
      (reach < 0 ? low : high) += reach;
    }
    const __int128 bytes = (high - low + 1) * size;
    if (elements > kMostElements || bytes > kMostBytes || bytes < 0) return;
    const auto count = static_cast<std::size_t>(bytes);
    Region region;
    region.bytes = std::make_unique<std::uint8_t[]>(count);
    const auto fill = in_.ConsumeIntegral<std::uint8_t>();
    for (std::size_t i = 0; i < count; ++i) {
      region.bytes[i] = static_cast<std::uint8_t>(fill + i / 4 * (fill & 3));
    }
    if (t.dtype == ABACIST_I32) fill_lengths(region.bytes.get(), count);
    region.before.assign(region.bytes.get(), region.bytes.get() + count);
    t.data = region.bytes.get() + static_cast<std::int64_t>(-low * size);
    regions_.push_back(std::move(region));
  }

  /// Small numbers that ascend, unless they do not.
  void fill_lengths(std::uint8_t* bytes, std::size_t count) {
    std::uint32_t value = 0;  // wraps
    for (std::size_t at = 0; at + 4 <= count; at += 4) {
      std::memcpy(bytes + at, &value, sizeof value);
      value += static_cast<std::uint32_t>(in_.ConsumeIntegralInRange(-1, 6));
      if (in_.ConsumeIntegralInRange(0, 31) == 31) value = in_.ConsumeIntegral<std::uint32_t>();
    }
  }

  void make_tensors() {
    sizes_[kB1] = sizes_[kB] + 1;
    const auto dtype = in_.ConsumeIntegralInRange<std::int32_t>(ABACIST_F32, ABACIST_F64);
    const bool varlen = in_.ConsumeIntegralInRange(0, 3) == 0;
    const auto rows = [&](int s, int h, int d) {
      return varlen ? tensor({s, h, d}, dtype) : tensor({kB, s, h, d}, dtype);
    };
    const auto maybe = [&] { return in_.ConsumeIntegralInRange(0, 3) == 0; };
    const bool gradients = in_.ConsumeBool();
    abacist_tensors& t = tensors_;
    t.q = rows(kSq, kHq, kDqk);
    t.k = rows(kSk, kHk, kDqk);
    t.v = rows(kSk, kHk, kDv);
    t.o = rows(kSq, kHq, kDv);
    if (gradients || maybe()) {
      t.lse = varlen ? tensor({kHq, kSq}, ABACIST_F32) : tensor({kB, kHq, kSq}, ABACIST_F32);
    }
    if (gradients) {
      t.d_o = rows(kSq, kHq, kDv);
      t.dq = rows(kSq, kHq, kDqk);
      t.dk = rows(kSk, kHk, kDqk);
      t.dv = rows(kSk, kHk, kDv);
    }
    if (varlen != maybe()) {
      t.cu_seqlens_q = tensor({kB1}, ABACIST_I32);
      t.cu_seqlens_k = tensor({kB1}, ABACIST_I32);
    }
    if (maybe()) t.key_lengths = tensor({kB}, ABACIST_I32);
    if (maybe()) t.block_table = tensor({kB, kB1}, ABACIST_I32);
    if (maybe()) t.sinks = tensor({kHq}, ABACIST_F32);
    if (maybe()) t.d_sinks = tensor({kHq}, ABACIST_F32);
    if (maybe())
      t.alibi_slopes = maybe() ? tensor({kB, kHq}, ABACIST_F32) : tensor({kHq}, ABACIST_F32);
    if (maybe()) t.bias = tensor({maybe() ? kB : -1, kHq, maybe() ? kSq : -1, kSk}, ABACIST_F32);
    if (maybe()) t.d_bias = tensor({-1, kHq, kSq, kSk}, ABACIST_F32);
    if (maybe()) t.visible = tensor({-1, -1, kSq, kSk}, ABACIST_U8);
    t.struct_size = size_of_struct(sizeof t);
  }

  /// Mostly right. A size beyond the struct would have the library read what is not ours.
  std::size_t size_of_struct(std::size_t right) {
    return in_.ConsumeIntegralInRange(0, 63) == 63
               ? in_.ConsumeIntegralInRange<std::size_t>(0, right)
               : right;
  }

  void make_options() {
    abacist_options& o = options_;
    const auto bound = [&] {
      return in_.ConsumeBool() ? in_.ConsumeIntegral<std::int64_t>()
                               : in_.ConsumeIntegralInRange<std::int64_t>(-1, 8);
    };
    o.causal = in_.ConsumeIntegralInRange(-1, 2);
    o.align = in_.ConsumeIntegralInRange(0, 2);
    o.has_window = in_.ConsumeIntegralInRange(0, 1);
    if (o.has_window == 1) o.window_left = bound(), o.window_right = bound();
    o.has_scale = in_.ConsumeIntegralInRange(0, 1);
    if (o.has_scale == 1) o.scale = in_.ConsumeFloatingPoint<double>();
    if (in_.ConsumeBool()) o.softcap = in_.ConsumeFloatingPoint<double>();
    if (in_.ConsumeBool()) o.dropout_p = in_.ConsumeFloatingPointInRange<double>(-0.1, 1.1);
    o.dropout_seed = in_.ConsumeIntegral<std::uint64_t>();
    o.max_s_q = bound();
    o.max_s_k = bound();
    o.struct_size = size_of_struct(sizeof o);
    plan_options_.backend = in_.ConsumeIntegralInRange(-1, 3);
    plan_options_.threads = in_.ConsumeIntegralInRange(-1, 1);
    plan_options_.batch_invariant = in_.ConsumeIntegralInRange(-1, 2);
    plan_options_.struct_size = size_of_struct(sizeof plan_options_);
  }

  /// After an error nothing has been written, and the error says something.
  void judge(abacist_status status) {
    require(status >= ABACIST_OK && status <= ABACIST_OUT_OF_MEMORY);
    if (status == ABACIST_OK) return;
    require(*abacist_last_error_message() != '\0');
    for (const Region& region : regions_) {
      require(std::equal(region.before.begin(), region.before.end(), region.bytes.get()));
    }
  }

  /// Page ids are data: what they make of a run is told after it.
  void judge_run(abacist_status status) {
    const bool told = tensors_.block_table.rank != 0 && status == ABACIST_INVALID_ARGUMENT &&
                      std::strcmp(abacist_last_error_argument(), "block_table") == 0 &&
                      std::strstr(abacist_last_error_message(), "were skipped") != nullptr;
    if (!told) judge(status);
  }

  abacist_rotary rotary() {
    abacist_rotary r{};
    r.struct_size = size_of_struct(sizeof r);
    if (in_.ConsumeBool()) return r;
    r.cos = tensor({kSk, kB}, ABACIST_F32);  // b pairs turn, at s_k positions
    r.sin = tensor({kSk, kB}, ABACIST_F32);
    r.style = in_.ConsumeIntegralInRange(0, 2);
    return r;
  }

  void append() {
    abacist_append_tensors a{};
    a.struct_size = size_of_struct(sizeof a);
    a.k = tensor({kB, kSq, kHk, kDqk}, tensors_.q.dtype);
    a.v = tensor({kB, kSq, kHk, kDv}, tensors_.q.dtype);
    a.k_cache = tensors_.k;
    a.v_cache = tensors_.v;
    a.lengths = tensor({kB}, ABACIST_I32);
    a.block_table = tensors_.block_table;
    const abacist_rotary r = rotary();
    judge(abacist_append(&a, in_.ConsumeBool() ? &r : nullptr));
  }

  void merge() {
    const abacist_partial parts[] = {
        {tensor({0, 1, 2, 6}, ABACIST_F32), tensor({0, 2, 1}, ABACIST_F32)},
        {tensor({0, 1, 2, 6}, ABACIST_F16), tensor({0, 2, 1}, ABACIST_F32)}};
    abacist_tensors into{};
    into.struct_size = sizeof into;
    into.o = tensors_.o;
    into.lse = tensors_.lse;
    into.sinks = tensors_.sinks;
    judge(abacist_merge(parts, in_.ConsumeIntegralInRange<std::size_t>(0, 2), &into));
  }

  void plan() {
    const auto pass = in_.ConsumeIntegralInRange<std::int32_t>(-1, 2);
    abacist_plan* plan = nullptr;
    const auto status = abacist_plan_create(pass, &tensors_, &options_, &plan_options_, &plan);
    judge(status);
    require((status == ABACIST_OK) == (plan != nullptr));
    if (plan == nullptr) return;
    abacist_plan_info info{};
    info.struct_size = sizeof info;
    require(abacist_plan_get_info(plan, &info) == ABACIST_OK && info.kernel != nullptr);
    char text[256];
    require(abacist_plan_explain(plan, text, sizeof text, nullptr) == ABACIST_OK);
    abacist_tensors back{};
    back.struct_size = sizeof back;
    require(abacist_plan_get_problem(plan, nullptr, &back, nullptr) == ABACIST_OK);
    std::unique_ptr<void, void (*)(void*)> memory(nullptr, std::free);
    abacist_run_options run{};
    run.struct_size = sizeof run;
    if (info.workspace_bytes <= std::size_t{1} << 24) {
      run.workspace_bytes = (info.workspace_bytes + 255) / 256 * 256;
      memory.reset(std::aligned_alloc(256, std::max<std::size_t>(run.workspace_bytes, 256)));
      run.workspace = memory.get();
    }
    judge(abacist_plan_run(plan, &tensors_, &run));
    abacist_plan_destroy(plan);
  }

  FuzzedDataProvider& in_;
  std::int64_t sizes_[8] = {};  // b, s_q, h_q, h_k, s_k, d_qk, d_v, b + 1
  std::vector<Region> regions_;
  abacist_tensors tensors_{};
  abacist_options options_{};
  abacist_plan_options plan_options_{};
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider in(data, size);
  Caller(in).call();
  return 0;
}
