// Edge cases of paged caches; numbers are rows of tests/edge_cases.md.
#include <gtest/gtest.h>

#include <limits>

#include "support/bounds.hpp"
#include "support/case.hpp"
#include "support/environment.hpp"

namespace abacist::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Case paged_case(std::int64_t page_size) {
  Case c;
  c.b = 3;
  c.h_k = 2;
  c.group = 2;
  c.s_q = 5;
  c.s_k = 300;
  c.key_lengths = {300, 1, 131};
  c.page_size = page_size;
  return c;
}

// Partial pages read past the table, page sizes above 128 were wrong.
TEST(Edge, Row31_PageSizes) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const std::int64_t size : {1, 16, 48, 256, 1000}) {
      Case c = paged_case(size);
      c.dtype = c.o_dtype = dtype;
      c.key_lengths = {std::min<std::int64_t>(size + 1, 300), 0, 131};
      check_on_every_target(Instance(c));
      c.options.mask.causal = true;
      c.sinks = true;
      check_on_every_target(Instance(c));
    }
  }
}

TEST(Edge, Row31_InvalidPagesAreSkippedAndReported) {
  for (const double bad : {-1.0, 99.0, 2147483647.0, -2147483648.0}) {
    for (const bool masked : {false, true}) {
      Case c = paged_case(16);
      c.visible = {.present = masked, .h = false};
      Instance paged(c);
      paged.block_table.set({0, 3}, bad);  // keys 48 to 63
      paged.block_table.set({1, 0}, bad);  // all that sequence 1 has
      paged.block_table.freeze();
      // The same as a dense problem that hides these keys.
      Case hidden = c;
      hidden.page_size = 0;
      hidden.s_k = 304;
      hidden.visible = {.present = true, .h = false};
      Instance dense(hidden);
      for (auto [to, from] : {std::pair{&dense.k, &paged.k}, {&dense.v, &paged.v}}) {
        from->for_each(
            [&, out = to, in = from](const auto& i, std::int64_t) { out->set(i, in->at(i)); });
        to->freeze();
      }
      dense.q.fill(paged.q.values());
      dense.visible.for_each([&](const auto& i, std::int64_t) {
        const bool out = (i[0] == 0 && i[3] / 16 == 3) || (i[0] == 1 && i[3] < 16);
        const bool seen = !masked || paged.visible.at(i) != 0.0;
        dense.visible.set(i, seen && !out ? 1.0 : 0.0);
      });
      dense.visible.freeze();
      const Expected expected(dense, false);
      const auto check = [&](const PlanOptions& options, const std::string& who) {
        Results r = paged.make_results(DType::f32);
        const auto p = plan(make_problem(paged.tensors(r), paged.c.options), options);
        ASSERT_TRUE(p.ok()) << to_string(p.error());
        const std::size_t bytes = p->info().workspace_bytes;
        std::vector<std::byte> memory(bytes + kWorkspaceAlignment, std::byte{0xff});
        void* data = memory.data();
        std::size_t space = memory.size();
        std::align(kWorkspaceAlignment, bytes, data, space);
        const RunOptions run{.workspace = {data, bytes}};
        ASSERT_TRUE(p->run(paged.tensors(r), run).ok());
        const Status status = p->device_status(run);
        ASSERT_FALSE(status.ok()) << who;
        EXPECT_EQ(status.error().argument, "block_table");
        check_forward(dense, r, expected, who);
        EXPECT_EQ(r.lse.at({1, 2, 3}), -kInfinity) << who;
        EXPECT_EQ(r.o.at({1, 3, 2, 4}), 0.0) << who;
      };
      for_each_target([&](const std::string& target) { check({.backend = Backend::cpu}, target); });
      check({.backend = Backend::reference}, "reference");
    }
  }
}

// The one-line call said ok, and its workspace, which knew better, was gone.
TEST(Edge, Row31_OneLineCallsReturnWhatTheRunFound) {
  Instance x(paged_case(16));
  for (const Backend backend : {Backend::cpu, Backend::reference}) {
    Results good = x.make_results(DType::f32);
    EXPECT_TRUE(forward(x.tensors(good), x.c.options, {.backend = backend}).ok());
    x.block_table.set({1, 0}, 1000.0);  // all that sequence 1 has
    Results r = x.make_results(DType::f32);
    std::vector<std::byte> memory(std::size_t{1} << 24);
    void* data = memory.data();
    std::size_t space = memory.size();
    std::align(kWorkspaceAlignment, 1, data, space);
    for (const Workspace& workspace : {Workspace{}, Workspace{data, space}}) {
      const Status status =
          forward(x.tensors(r), x.c.options, {.backend = backend}, {.workspace = workspace});
      ASSERT_FALSE(status.ok());
      EXPECT_EQ(status.error().code, ErrorCode::invalid_argument);
      EXPECT_EQ(status.error().argument, "block_table");
      EXPECT_NE(status.error().message.find("[0, pages = "), std::string::npos);
      EXPECT_EQ(r.o.at({0, 4, 3, 2}), good.o.at({0, 4, 3, 2}));  // written all the same
      EXPECT_EQ(r.lse.at({1, 2, 3}), -kInfinity);
    }
    x.block_table.set({1, 0}, 0.0);
  }
}

TEST(Edge, Row31_ValidPagesAreNoFault) {
  const Instance x(paged_case(16));
  for (const Backend backend : {Backend::cpu, Backend::reference}) {
    Results r = x.make_results(DType::f32);
    const auto p = plan(make_problem(x.tensors(r), x.c.options), {.backend = backend});
    ASSERT_TRUE(p.ok());
    const std::size_t bytes = p->info().workspace_bytes;
    std::vector<std::byte> memory(bytes + kWorkspaceAlignment, std::byte{0xff});
    void* data = memory.data();
    std::size_t space = memory.size();
    std::align(kWorkspaceAlignment, bytes, data, space);
    const RunOptions run{.workspace = {data, bytes}};
    ASSERT_TRUE(p->run(x.tensors(r), run).ok());
    EXPECT_TRUE(p->device_status(run).ok());
  }
}

// Pages that have left the window may be gone, their memory NaN or their ids -1.
TEST(Edge, Row32_PagesOutsideTheWindowAreNotTouched) {
  Case c = paged_case(16);
  c.s_k = 1000;
  c.key_lengths = {1000, 500, 700};
  c.options.mask.window = {127, 0};
  Instance x(c);
  for (std::int64_t n = 0; n < c.b; ++n) {
    const std::int64_t first = c.len_k(n) - c.s_q - 127;  // of the first query
    for (std::int64_t p = 0; (p + 1) * 16 <= first; ++p) {
      if (p % 2 == 0) {
        x.block_table.set({n, p}, -1.0);
        continue;
      }
      const auto page = static_cast<std::int64_t>(x.block_table.at({n, p}));
      for (std::int64_t j = 0; j < 16; ++j) {
        for (std::int64_t e = 0; e < c.d_v; ++e) x.v_pages.set({page, j, 1, e}, kNan);
        for (std::int64_t e = 0; e < c.d_qk; ++e) x.k_pages.set({page, j, 1, e}, kNan);
      }
    }
    // The keys of the first page that is needed which lie before the window, too.
    const auto page = static_cast<std::int64_t>(x.block_table.at({n, first / 16}));
    for (std::int64_t j = 0; j < first % 16; ++j) {
      for (std::int64_t e = 0; e < c.d_v; ++e) x.v_pages.set({page, j, 0, e}, kNan);
    }
  }
  for (Buffer* buffer : {&x.block_table, &x.k_pages, &x.v_pages}) buffer->freeze();
  check_on_every_target(x);
  Results r = x.make_results(DType::f32);
  const auto p = plan(make_problem(x.tensors(r), x.c.options), {.backend = Backend::cpu});
  const std::size_t bytes = p->info().workspace_bytes;
  std::vector<std::byte> memory(bytes + kWorkspaceAlignment);
  void* data = memory.data();
  std::size_t space = memory.size();
  std::align(kWorkspaceAlignment, bytes, data, space);
  ASSERT_TRUE(p->run(x.tensors(r), {.workspace = {data, bytes}}).ok());
  EXPECT_TRUE(p->device_status({.workspace = {data, bytes}}).ok());
}

TEST(Edge, PagedDecodeWithSplitKeys) {
  Case c = paged_case(64);
  c.b = 1;
  c.s_q = 1;
  c.s_k = 6000;
  c.key_lengths = {5901};
  check_on_every_target(Instance(c));
  c.options.dropout = {.p = 0.3, .seed = 4};
  c.bias = {.present = true};
  check_on_every_target(Instance(c));
}

TEST(Edge, PackedQueriesOverPages) {
  Case c = paged_case(16);
  c.options.mask.causal = true;
  const Instance x(c);
  Results dense = x.make_results(DType::f32);
  x.forward(dense, {.backend = Backend::reference});
  // The same rows of all sequences behind one another, 5 each.
  Buffer cu(DType::i32, {4});
  cu.fill({0.0, 5.0, 10.0, 15.0});
  Results packed{Buffer(DType::f32, {15, 4, 16}), Buffer(DType::f32, {4, 15})};
  Buffer q(DType::f32, {15, 4, 16});
  q.fill(x.q.values());
  ForwardTensors t = x.tensors(dense);
  t.q = q.in();
  t.o = packed.o.out();
  t.lse = packed.lse.out();
  t.cu_seqlens_q = cu.in();
  Options options = c.options;
  options.max_lengths.s_q = 5;
  for (const Backend backend : {Backend::cpu, Backend::reference}) {
    const Status s = forward(t, options, {.backend = backend});
    ASSERT_TRUE(s.ok()) << to_string(s.error());
    const auto a = packed.o.values();
    const auto b = dense.o.values();
    for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 2e-6);
  }
}

}  // namespace
}  // namespace abacist::testing
