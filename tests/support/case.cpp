#include "support/case.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <sstream>

namespace abacist::testing {
namespace {

std::int64_t sum(const std::vector<std::int64_t>& lens) {
  return std::accumulate(lens.begin(), lens.end(), std::int64_t{0});
}

std::int64_t longest(const std::vector<std::int64_t>& lens) {
  return *std::max_element(lens.begin(), lens.end());
}

std::vector<std::int64_t> row_shape(const Case& c, bool of_keys, std::int64_t d) {
  const std::int64_t h = of_keys ? c.h_k : c.h_q();
  if (c.varlen()) return {of_keys ? c.total_k() : c.total_q(), h, d};
  return {c.b, of_keys ? c.s_k : c.s_q, h, d};
}

std::vector<std::int64_t> lse_shape(const Case& c) {
  if (c.varlen()) return {c.h_q(), c.total_q()};
  return {c.b, c.h_q(), c.s_q};
}

std::vector<std::int64_t> pair_shape(const Case& c, const Case::Pairs& x) {
  const std::int64_t s_q = c.varlen() ? longest(c.lens_q) : c.s_q;
  std::int64_t s_k = c.varlen() ? longest(c.lens_k) : c.s_k;
  if (c.page_size > 0) s_k = (s_k + c.page_size - 1) / c.page_size * c.page_size;
  return {x.b ? c.sequences() : 1, x.h ? c.h_q() : 1, x.s ? s_q : 1, s_k};
}

std::string text_of(const char* name, const Case::Pairs& x) {
  if (!x.present) return "";
  return std::string(" ") + name + " [" + (x.b ? "b, " : "1, ") + (x.h ? "h, " : "1, ") +
         (x.s ? "s, s]" : "1, s]");
}

Buffer cumulative(const std::vector<std::int64_t>& lens) {
  Buffer cu(DType::i32, {static_cast<std::int64_t>(lens.size()) + 1});
  double total = 0.0;
  std::size_t i = 0;
  cu.fill([&] {
    if (i > 0) total += static_cast<double>(lens[i - 1]);
    ++i;
    return total;
  });
  return cu;
}

std::string join(const std::vector<std::int64_t>& values) {
  std::string text;
  for (const std::int64_t value : values) text += (text.empty() ? "" : "+") + std::to_string(value);
  return text;
}

Buffer integers(const std::vector<std::int64_t>& values) {
  Buffer buffer(DType::i32, {static_cast<std::int64_t>(values.size())});
  buffer.fill(std::vector<double>(values.begin(), values.end()));
  return buffer;
}

/// Rows past a sequence's length hold NaN: no result may depend on them.
void poison_padding(Buffer& buffer, const std::vector<std::int64_t>& lengths) {
  const TensorSpec& spec = buffer.spec();
  // With one row, or one sequence, standing for all there is no padding of its own.
  if (spec.stride[1] == 0 || spec.stride[0] == 0) return;
  buffer.for_each([&](const auto& i, std::int64_t) {
    if (i[1] >= lengths[static_cast<std::size_t>(i[0])]) {
      buffer.set(i, std::numeric_limits<double>::quiet_NaN());
    }
  });
  buffer.freeze();
}

/// Rows past cu[b] hold NaN: no result may depend on them.
void poison_slack(Buffer& buffer, std::int64_t first_row) {
  if (buffer.spec().stride[0] == 0) return;  // one row stands for all
  const auto& shape = buffer.spec().shape;
  for (std::int64_t row = first_row; row < shape[0]; ++row) {
    for (std::int64_t head = 0; head < shape[1]; ++head) {
      for (std::int64_t e = 0; e < shape[2]; ++e) {
        buffer.set({row, head, e}, std::numeric_limits<double>::quiet_NaN());
      }
    }
  }
  buffer.freeze();
}

std::string side(std::int64_t bound) { return bound == kUnbounded ? "inf" : std::to_string(bound); }

void expect_intact(const char* name, const Buffer& buffer, bool elements_may_change) {
  if (!buffer.present()) return;
  const std::string damage = buffer.damage(elements_may_change);
  EXPECT_EQ(damage, "") << "around " << name;
}

constexpr std::size_t kGuardBytes = 4096;

}  // namespace

std::int64_t Case::total_q() const { return varlen() ? sum(lens_q) + slack_q : b * s_q; }
std::int64_t Case::total_k() const { return varlen() ? sum(lens_k) + slack_k : b * s_k; }

std::int64_t Case::sequences() const {
  return varlen() ? static_cast<std::int64_t>(lens_q.size()) : b;
}
std::int64_t Case::len_q(std::int64_t sequence) const {
  return varlen() ? lens_q[static_cast<std::size_t>(sequence)] : s_q;
}
std::int64_t Case::len_k(std::int64_t sequence) const {
  const auto n = static_cast<std::size_t>(sequence);
  if (varlen()) return lens_k[n];
  return key_lengths.empty() ? s_k : key_lengths[n];
}

std::string Case::text() const {
  std::ostringstream text;
  text << to_string(dtype) << " -> o " << to_string(o_dtype) << ", grads " << to_string(grad_dtype);
  if (varlen()) {
    text << " varlen q " << join(lens_q) << " k " << join(lens_k) << " slack " << slack_q << "/"
         << slack_k;
  } else {
    text << " b " << b << " s " << s_q << "x" << s_k;
  }
  const Mask& mask = options.mask;
  text << " h " << h_q() << "/" << h_k << " d " << d_qk << "/" << d_v
       << (mask.causal ? " causal" : "") << " window " << side(mask.window.left) << "/"
       << side(mask.window.right) << (mask.align == Align::top_left ? " top_left" : "");
  if (options.score.scale) text << " scale " << *options.score.scale;
  if (options.score.softcap > 0) text << " softcap " << options.score.softcap;
  if (alibi_rank > 0) text << " alibi rank " << alibi_rank;
  if (options.dropout != Dropout{}) {
    text << " dropout " << options.dropout.p << " seed " << options.dropout.seed;
  }
  text << text_of("bias", bias) << text_of("visible", visible);
  if (sinks) text << " sinks";
  if (page_size > 0) text << " pages of " << page_size;
  if (!key_lengths.empty()) text << " key lengths " << join(key_lengths);
  text << (d_lse ? " d_lse" : "") << (layout.random ? " random layout" : "") << " std "
       << data.query_key_std << " v " << data.v_mean << "+-" << data.v_std << " stream " << stream;
  return text.str();
}

Instance::Instance(const Case& problem) : c(problem) {
  Random random(c.stream);
  const auto normal = [&](double mean, double deviation) {
    return [&random, mean, deviation] { return mean + deviation * random.normal(); };
  };
  Layout in = c.layout;
  in.broadcast = in.random;
  const std::uint64_t s = c.stream * 16;
  q = Buffer(c.dtype, row_shape(c, false, c.d_qk), in, s + 1);
  k = Buffer(c.dtype, row_shape(c, true, c.d_qk), in, s + 2);
  v = Buffer(c.dtype, row_shape(c, true, c.d_v), in, s + 3);
  d_o = Buffer(c.dtype, row_shape(c, false, c.d_v), in, s + 4);
  q.fill(normal(0.0, c.data.query_key_std));
  k.fill(normal(0.0, c.data.query_key_std));
  v.fill(normal(c.data.v_mean, c.data.v_std));
  d_o.fill(normal(0.0, 1.0));
  if (c.d_lse) {
    d_lse = Buffer(DType::f32, lse_shape(c), in, s + 5);
    d_lse.fill(normal(0.0, 1.0));
  }
  if (c.alibi_rank > 0) {
    slopes = c.alibi_rank == 1 ? Buffer(DType::f32, {c.h_q()}, in, s + 6)
                               : Buffer(DType::f32, {c.sequences(), c.h_q()}, in, s + 6);
    slopes.fill([&] { return std::exp2(-8.0 * random.uniform()); });
  }
  if (c.bias.present) {
    bias = Buffer(c.dtype, pair_shape(c, c.bias), in, s + 14);
    bias.fill([&] {
      if (random.chance(c.data.hidden / 2)) return -std::numeric_limits<double>::infinity();
      return c.data.bias_std * random.normal();
    });
  }
  if (c.visible.present) {
    visible = Buffer(DType::u8, pair_shape(c, c.visible), in, s + 15);
    visible.fill([&] {
      return random.chance(c.data.hidden) ? 0.0 : random.pick({1.0, 2.0, 255.0});
    });
  }
  if (c.sinks) {
    sinks = Buffer(c.dtype == DType::f64 ? c.dtype : DType::f32, {c.h_q()}, in, s + 12);
    // Some below, some above the scores.
    sinks.fill(normal(0.0, 2.0 + c.data.query_key_std * c.data.query_key_std));
  }
  if (!c.key_lengths.empty()) {
    key_lengths = integers(c.key_lengths);
    poison_padding(k, c.key_lengths);
    poison_padding(v, c.key_lengths);
  }
  if (c.page_size > 0) make_pages();
  if (c.varlen()) {
    poison_slack(q, sum(c.lens_q));
    poison_slack(d_o, sum(c.lens_q));
    poison_slack(k, sum(c.lens_k));
    poison_slack(v, sum(c.lens_k));
    cu_q = cumulative(c.lens_q);
    cu_k = cumulative(c.lens_k);
    c.options.max_lengths = {longest(c.lens_q), longest(c.lens_k)};
  }
}

void Instance::make_pages() {
  Random random(c.stream ^ 0x7061676573u);
  const std::int64_t per_sequence = (c.s_k + c.page_size - 1) / c.page_size;
  const std::int64_t pages = c.b * per_sequence + 3;
  Layout layout = c.layout;
  layout.broadcast = false;
  k_pages = Buffer(c.dtype, {pages, c.page_size, c.h_k, c.d_qk}, layout, c.stream * 16 + 21);
  v_pages = Buffer(c.dtype, {pages, c.page_size, c.h_k, c.d_v}, layout, c.stream * 16 + 22);
  for (Buffer* pool : {&k_pages, &v_pages}) pool->fill(std::numeric_limits<double>::quiet_NaN());
  block_table = Buffer(DType::i32, {c.b, per_sequence});
  block_table.fill(1e9);  // far outside, if it were read
  std::vector<std::int64_t> order(static_cast<std::size_t>(pages));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  for (std::size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1],
              order[static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(i) - 1))]);
  }
  for (std::int64_t n = 0; n < c.b; ++n) {
    for (std::int64_t j = 0; j < c.len_k(n); ++j) {
      const std::int64_t page = order[static_cast<std::size_t>(n * per_sequence + j / c.page_size)];
      block_table.set({n, j / c.page_size}, static_cast<double>(page));
      for (std::int64_t h = 0; h < c.h_k; ++h) {
        for (std::int64_t e = 0; e < c.d_qk; ++e) {
          k_pages.set({page, j % c.page_size, h, e}, k.at({n, j, h, e}));
        }
        for (std::int64_t e = 0; e < c.d_v; ++e) {
          v_pages.set({page, j % c.page_size, h, e}, v.at({n, j, h, e}));
        }
      }
    }
  }
  for (Buffer* buffer : {&k_pages, &v_pages, &block_table}) buffer->freeze();
}

Results Instance::make_results(DType o_dtype, DType lse_dtype, Layout layout) const {
  const std::uint64_t s = c.stream * 16;
  return {Buffer(o_dtype, row_shape(c, false, c.d_v), layout, s + 7),
          Buffer(lse_dtype, lse_shape(c), layout, s + 8)};
}

Gradients Instance::make_gradients(DType dtype, Layout layout) const {
  const std::uint64_t s = c.stream * 16;
  return {Buffer(dtype, row_shape(c, false, c.d_qk), layout, s + 9),
          Buffer(dtype, row_shape(c, true, c.d_qk), layout, s + 10),
          Buffer(dtype, row_shape(c, true, c.d_v), layout, s + 11),
          c.sinks ? Buffer(dtype == DType::f64 ? dtype : DType::f32, {c.h_q()}, layout, s + 13)
                  : Buffer(),
          c.bias.present ? Buffer(dtype == DType::f64 ? dtype : DType::f32, pair_shape(c, c.bias),
                                  layout, s + 15)
                         : Buffer()};
}

ForwardTensors Instance::tensors(Results& results) const {
  return {.q = q.in(),
          .k = c.page_size > 0 ? k_pages.in() : k.in(),
          .v = c.page_size > 0 ? v_pages.in() : v.in(),
          .o = results.o.out(),
          .lse = results.lse.out(),
          .alibi_slopes = slopes.in(),
          .cu_seqlens_q = cu_q.in(),
          .cu_seqlens_k = cu_k.in(),
          .sinks = sinks.in(),
          .key_lengths = key_lengths.in(),
          .bias = bias.in(),
          .visible = visible.in(),
          .block_table = block_table.in()};
}

BackwardTensors Instance::tensors(const Results& results, Gradients& gradients) const {
  return {.q = q.in(),
          .k = k.in(),
          .v = v.in(),
          .o = results.o.in(),
          .lse = results.lse.in(),
          .d_o = d_o.in(),
          .dq = gradients.dq.out(),
          .dk = gradients.dk.out(),
          .dv = gradients.dv.out(),
          .d_lse = d_lse.in(),
          .alibi_slopes = slopes.in(),
          .cu_seqlens_q = cu_q.in(),
          .cu_seqlens_k = cu_k.in(),
          .sinks = sinks.in(),
          .key_lengths = key_lengths.in(),
          .d_sinks = gradients.d_sinks.out(),
          .bias = bias.in(),
          .visible = visible.in(),
          .d_bias = gradients.d_bias.out()};
}

void Instance::forward(Results& results, const PlanOptions& plan_options) const {
  const Status status = run_poisoned(tensors(results), c.options, plan_options);
  ASSERT_TRUE(status.ok()) << to_string(status.error()) << "\n" << c.text();
  expect_intact("o", results.o, true);
  expect_intact("lse", results.lse, true);
  expect_intact("q", q, false);
  expect_intact("k", k, false);
  expect_intact("v", v, false);
}

void Instance::backward(const Results& results, Gradients& gradients,
                        const PlanOptions& plan_options) const {
  const Status status = run_poisoned(tensors(results, gradients), c.options, plan_options);
  ASSERT_TRUE(status.ok()) << to_string(status.error()) << "\n" << c.text();
  expect_intact("dq", gradients.dq, true);
  expect_intact("dk", gradients.dk, true);
  expect_intact("dv", gradients.dv, true);
  expect_intact("d_sinks", gradients.d_sinks, true);
  expect_intact("d_bias", gradients.d_bias, true);
  expect_intact("q", q, false);
  expect_intact("k", k, false);
  expect_intact("v", v, false);
  expect_intact("d_o", d_o, false);
}

Both Instance::run_both(const PlanOptions& plan_options) const {
  Both both{make_results(c.o_dtype, DType::f32, c.layout), make_gradients(c.grad_dtype, c.layout)};
  forward(both.results, plan_options);
  both.results.o.freeze();
  both.results.lse.freeze();
  backward(both.results, both.gradients, plan_options);
  expect_intact("o (an input of the backward pass)", both.results.o, false);
  expect_intact("lse (an input of the backward pass)", both.results.lse, false);
  return both;
}

Results Instance::reference_forward() const {
  Results results = make_results(DType::f64, DType::f64);
  forward(results, {.backend = Backend::reference});
  results.o.freeze();
  results.lse.freeze();
  return results;
}

Gradients Instance::reference_backward(const Results& float64_results) const {
  Gradients gradients = make_gradients(DType::f64);
  backward(float64_results, gradients, {.backend = Backend::reference});
  return gradients;
}

template <class Tensors>
Status run_poisoned(const Tensors& tensors, const Options& options,
                    const PlanOptions& plan_options) {
  const auto planned = plan(make_problem(tensors, options), plan_options);
  if (!planned) return planned.error();
  const std::size_t bytes = planned->info().workspace_bytes;
  std::vector<std::byte> memory(bytes + 2 * kGuardBytes + kWorkspaceAlignment, std::byte{0xff});
  void* data = memory.data() + kGuardBytes;
  std::size_t space = bytes + kGuardBytes + kWorkspaceAlignment;
  std::align(kWorkspaceAlignment, bytes, data, space);
  const Status status = planned->run(tensors, {.workspace = {data, bytes}});
  auto* const first = static_cast<std::byte*>(data);
  const auto poisoned = [](const std::byte* from, const std::byte* to) {
    return std::all_of(from, to, [](std::byte x) { return x == std::byte{0xff}; });
  };
  EXPECT_TRUE(poisoned(memory.data(), first)) << "written before the workspace";
  EXPECT_TRUE(poisoned(first + bytes, memory.data() + memory.size()))
      << "written past the workspace";
  return status;
}

template Status run_poisoned(const ForwardTensors&, const Options&, const PlanOptions&);
template Status run_poisoned(const BackwardTensors&, const Options&, const PlanOptions&);

}  // namespace abacist::testing
