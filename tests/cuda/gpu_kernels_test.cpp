// Rules that hold for every kernel alike: tiles of one head, tiles that the heads of a group share,
// sequences read by a warp each. What serves is what the plan says, so each test asks.
#include <cmath>
#include <limits>

#include "cuda/support/each_kernel.hpp"

namespace abacist::testing {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST_P(GpuKernels, Row49_NeighboursNeverInfluenceASequence) {
  for (const bool causal : {false, true}) {
    Case c = varlen();
    c.options.mask.causal = causal;
    c.sinks = causal;
    Instance x(c);
    const Results alone = run(x);
    for (Buffer* buffer : {&x.q, &x.k, &x.v}) {
      const auto& lens = buffer == &x.q ? c.lens_q : c.lens_k;
      std::int64_t n = 0;
      buffer->for_each([&](const auto& index, std::int64_t) {
        const bool middle = index[0] >= lens[0] && index[0] < lens[0] + lens[1];
        if (middle) buffer->set(index, std::array{kNan, -kInfinity, 3e38}[++n % 3]);
      });
      buffer->freeze();
    }
    const Results poisoned = run(x);
    poisoned.o.for_each([&](const auto& index, std::int64_t) {
      if (index[0] >= c.lens_q[0] && index[0] < c.lens_q[0] + c.lens_q[1]) return;
      ASSERT_EQ(poisoned.o.at(index), alone.o.at(index)) << index[0];
      const auto row = lse_index(c, index);
      ASSERT_EQ(poisoned.lse.at(row), alone.lse.at(row)) << index[0];
    });
  }
}

/// NaN in one head of a group, one key/value head, one sequence stays there.
TEST_P(GpuKernels, Row49_NanStaysInItsHead) {
  Instance x(base());
  const Results alone = run(x);
  for (Buffer* buffer : {&x.k, &x.v}) {
    buffer->for_each([&](const auto& index, std::int64_t) {
      if (index[0] == 1 && index[2] == 1) buffer->set(index, kNan);
    });
    buffer->freeze();
  }
  const std::int64_t row = x.c.s_q / 2;
  x.q.set({0, row, 0, 3}, kNan);
  x.q.freeze();
  const Results poisoned = run(x);
  poisoned.o.for_each([&](const auto& index, std::int64_t) {
    const bool of_keys = index[0] == 1 && index[2] / x.c.group == 1;
    const bool of_query = index[0] == 0 && index[2] == 0 && index[1] == row;
    const double is = poisoned.o.at(index);
    ASSERT_EQ(std::isnan(is), of_keys || of_query)
        << index[0] << " " << index[1] << " " << index[2];
    if (!std::isnan(is)) {
      ASSERT_EQ(is, alone.o.at(index));
    }
  });
}

/// A row that NaN in V reaches keeps the bits of its other columns, whatever lies behind the
/// sequence: queries there share a tile, and their scores rise far above those of the first keys.
TEST_P(GpuKernels, Row49_NeighboursOfARowThatHoldsNan) {
  Instance x(varlen());
  const std::int64_t len_q = x.c.lens_q[0];
  x.v.for_each([&](const auto& index, std::int64_t) {
    if (index[0] == x.c.lens_k[0] / 2 && index[2] == 3) x.v.set(index, kNan);
  });
  x.v.freeze();
  const Results alone = run(x);
  x.q.for_each([&](const auto& index, std::int64_t) {
    if (index[0] >= len_q) x.q.set(index, 100.0 * x.q.at(index));
  });
  x.q.freeze();
  const Results beside = run(x);
  alone.o.for_each([&](const auto& index, std::int64_t) {
    if (index[0] >= len_q) return;
    ASSERT_EQ(std::isnan(alone.o.at(index)), index[2] == 3);
    if (index[2] == 3) return;
    ASSERT_EQ(beside.o.at(index), alone.o.at(index)) << index[0];
  });
}

/// Under a negative scale a score of -inf is one of +inf, under 0 NaN, and not a masked one: the
/// row is NaN.
TEST_P(GpuKernels, ScoresOfMinusInfinityUnderScalesOfZeroAndBelow) {
  for (const auto& [causal, scale] :
       {std::pair{false, -0.05}, {true, -0.05}, {false, 0.0}, {true, 0.0}}) {
    Case c = base();
    c.options.mask.causal = causal;
    c.options.score.scale = scale;
    Instance x(c);
    x.q.fill(1.0);
    const std::int64_t key = c.s_k - (c.s_q + 1) / 2;
    x.k.for_each([&](const auto& index, std::int64_t) {
      if (index[0] == 1 && index[1] == key) x.k.set(index, -kInfinity);
    });
    x.q.freeze();
    x.k.freeze();
    const Results results = run(x);
    results.o.for_each([&](const auto& index, std::int64_t) {
      const bool sees_it = !c.options.mask.causal || index[1] + c.s_k - c.s_q >= key;
      ASSERT_EQ(std::isnan(results.o.at(index)), index[0] == 1 && sees_it) << index[1];
    });
  }
}

TEST_P(GpuKernels, EmptyRowsAreEmptyWhateverTheDataHold) {
  for (const bool sinks : {false, true}) {
    Case c = base();
    c.sinks = sinks;
    c.options.mask.causal = true;
    c.key_lengths = {c.s_k, (c.s_q + 1) / 2};  // the first half of the second sequence's rows
    Instance x(c);
    for (Buffer* buffer : {&x.k, &x.v}) {
      buffer->for_each([&](const auto& index, std::int64_t) {
        if (index[0] == 1) buffer->set(index, kNan);
      });
      buffer->freeze();
    }
    const Results results = run(x);
    for (std::int64_t i = 0; i < c.s_q; ++i) {
      const bool empty = i < c.s_q / 2;
      for (std::int64_t h = 0; h < c.h_q(); ++h) {
        const double o = results.o.at({1, i, h, 5});
        const double lse = results.lse.at({1, h, i});
        ASSERT_EQ(std::isnan(o), !empty) << i;
        if (!empty) continue;
        ASSERT_EQ(o, 0.0) << i;
        if (sinks) {
          ASSERT_NEAR(lse, x.sinks.at({h}), 1e-6) << i;
        } else {
          ASSERT_EQ(lse, -kInfinity) << i;
        }
      }
    }
  }
}

TEST_P(GpuKernels, Row12_OneVisibleKeyHasProbabilityExactlyOne) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const double largest = dtype == DType::f16 ? 100.0 : 1e17;
    // 100 to 250: scores on either side of where products are rounded first (kHugeScore).
    for (const double size : {1e-3, 1.0, 30.0, 100.0, 150.0, 250.0, largest}) {
      Case c = base(dtype);
      // A window of one key is not split, one key of many that there might be is.
      const bool split = std::string(GetParam().ending).ends_with(".split");
      if (split) {
        c.key_lengths = {1, 1};
      } else {
        c.options.mask.window = {0, 0};
      }
      c.data.query_key_std = size;
      const Instance x(c);
      const Results results = run(x);
      results.o.for_each([&](const auto& index, std::int64_t) {
        const std::int64_t key = split ? 0 : index[1] + c.s_k - c.s_q;
        ASSERT_EQ(results.o.at(index), x.v.at({index[0], key, index[2] / c.group, index[3]}))
            << to_string(dtype) << " size " << size << " row " << index[1];
      });
    }
  }
}

/// Equal scores up to the end of float's range, on either side of zero: equal weights. In log2
/// units, 5,600 to 45,000 are on either side of where products are rounded first (kHugeScore).
TEST_P(GpuKernels, Row12_HugeFiniteScoresAreNotAMask) {
  for (const double size : {5.6e3, 5.8e3, 1.2e4, 2.25e4, 2.3e4, 4.5e4, 1e5, 1e10, 1.6e38}) {
    for (const double score : {size, -size}) {
      for (const bool causal : {false, true}) {
        Case c = base();
        c.options.score.scale = 1.0;
        c.options.mask.causal = causal;
        Instance x(c);
        x.q.fill(0.0);
        x.k.fill(0.0);
        x.q.for_each([&](const auto& index, std::int64_t) {
          if (index[3] == 0) x.q.set(index, score > 0 ? 0x1p60 : -0x1p60);
        });
        x.k.for_each([&](const auto& index, std::int64_t) {
          if (index[3] == 0) x.k.set(index, size * 0x1p-60);
        });
        x.q.freeze();
        x.k.freeze();
        check(x);
        if (HasFailure()) return;
      }
    }
  }
}

/// Scores that rise by a few nats a key into the range where products are rounded first: what a
/// row's maximum is off by must cancel.
TEST_P(GpuKernels, Row12_RisingScoresReachTheLimit) {
  const double keys = static_cast<double>(GetParam().s_k);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const double top : {5.5e3, 6e3, 1.1e4, 2.2e4, 2.4e4}) {
      Case c = base(dtype);
      c.options.score.scale = 1.0;
      Instance x(c);
      x.q.fill(0.0);
      x.k.fill(0.0);
      // A whole number a key in two parts, each exact in f16 and in bf16.
      x.q.for_each([&](const auto& index, std::int64_t) {
        if (index[3] == 0) x.q.set(index, 128.0);
        if (index[3] == 1) x.q.set(index, 1.0);
      });
      x.k.for_each([&](const auto& index, std::int64_t) {
        const double score = std::floor(top - (keys - 1.0 - double(index[1])) / 2.0);
        const double high = std::floor(score / 128.0);
        if (index[3] == 0) x.k.set(index, high);
        if (index[3] == 1) x.k.set(index, score - 128.0 * high);
      });
      x.q.freeze();
      x.k.freeze();
      check(x);
      if (HasFailure()) return;
    }
  }
}

/// Scores that differ by more than an exponent holds: the largest takes all, nothing is NaN.
TEST_P(GpuKernels, Row44_VanishingWeightsVanish) {
  for (const double size : {1e4, 1e9, 1e17}) {
    Case c = base();
    c.options.mask.causal = true;
    c.data.query_key_std = size;
    const Instance x(c);
    const Results results = run(x);
    double most = 0.0;
    for (const double v : x.v.values()) most = std::max(most, std::fabs(v));
    for (const double o : results.o.values()) ASSERT_LE(std::fabs(o), 1.01 * most) << size;
    for (const double lse : results.lse.values()) ASSERT_TRUE(std::isfinite(lse)) << size;
  }
}

/// Emptiness is a matter of indices: rows all of whose scores are -inf are 0 / 0, and keys of
/// -inf weigh nothing beside others, in whichever tile they are. (Bounds that grow with the scores
/// say nothing here.)
TEST_P(GpuKernels, ScoresOfMinusInfinity) {
  for (const std::int64_t hidden : {std::int64_t{1}, std::int64_t{16}, GetParam().s_k / 2,
                                    GetParam().s_k - 1, GetParam().s_k}) {
    for (const bool sinks : {false, true}) {
      Case c = base();
      c.sinks = sinks;
      Instance x(c);
      x.q.fill(1.0);
      x.k.for_each([&](const auto& index, std::int64_t) {
        if (index[1] < hidden) x.k.set(index, -kInfinity);
      });
      x.q.freeze();
      x.k.freeze();
      const Results results = run(x);
      const Results oracle = x.reference_forward();
      for (const auto& [is, must, bound] :
           {std::tuple{&results.o, &oracle.o, 0.03}, {&results.lse, &oracle.lse, 1e-5}}) {
        const std::string who = std::to_string(hidden) + (sinks ? " hidden, sinks" : " hidden");
        check_within("o or lse", is->spec(), is->values(), must->values(), bound, who);
      }
      const bool nobody = hidden == c.s_k && !sinks;
      EXPECT_EQ(std::isnan(results.o.at({1, 0, 1, 3})), nobody);
      EXPECT_EQ(std::isnan(results.lse.at({1, 1, 0})), nobody);
    }
  }
}

TEST_P(GpuKernels, SinksOfEveryKind) {
  Case c = base();
  c.options.mask.causal = true;
  Results without = run(Instance(c));
  c.sinks = true;
  Instance x(c);
  x.sinks.fill(-kInfinity);
  EXPECT_EQ(bits_of(run(x)), bits_of(without));
  for (const double sink : {-200.0, 60.0, 1e4, -1e30, kNan, kInfinity}) {
    x.sinks.fill(-kInfinity);
    x.sinks.set({c.h_q() - 1}, sink);
    x.sinks.freeze();
    const Results results = run(x);
    if (std::isfinite(sink)) {
      check_forward(x, results, Expected(x, false), GetParam().name);
      continue;
    }
    for (std::int64_t h = 0; h < c.h_q(); ++h) {
      EXPECT_EQ(std::isnan(results.o.at({1, 2, h, 7})), h == c.h_q() - 1) << sink;
      EXPECT_EQ(std::isnan(results.lse.at({1, h, 2})), h == c.h_q() - 1) << sink;
    }
  }
}

TEST_P(GpuKernels, ScalesOfZeroAndBelow) {
  for (const double scale : {0.0, -0.2, -3.0, 1e-30}) {
    for (const bool ragged : {false, true}) {
      Case c = ragged ? varlen() : base(DType::f16);
      c.options.mask.causal = true;
      c.options.score.scale = scale;
      c.sinks = ragged;
      check(Instance(c));
    }
  }
}

TEST_P(GpuKernels, Row9_EquivalentWindowsAgreeBitForBit) {
  Case c = base(DType::f16);
  for (const bool causal : {false, true}) {
    c.options.mask = {.causal = causal};
    const std::vector<std::byte> bits = bits_of(run(Instance(c)));
    for (const Window window : {Window{c.s_k, c.s_k}, Window{c.s_k - 1, c.s_q - 1},
                                Window{kUnbounded - 1, kUnbounded - 1}}) {
      c.options.mask.window = window;
      EXPECT_EQ(bits_of(run(Instance(c))), bits) << window.left << " " << window.right;
    }
  }
}

TEST_P(GpuKernels, WithoutLseTheSameO) {
  const Instance x(varlen());
  const Results with = run(x);
  Results results = gpu_results(x);
  const std::vector<std::byte> untouched = results.lse.element_bytes();
  const GpuForward gpu(x, results);
  ForwardTensors tensors = gpu.tensors();
  tensors.lse = {};
  const Status status = forward(tensors, x.c.options);
  ASSERT_TRUE(status.ok()) << to_string(status.error());
  ABACIST_CUDA_OK(cudaDeviceSynchronize());
  gpu.collect(x, results);
  EXPECT_EQ(results.o.element_bytes(), with.o.element_bytes());
  EXPECT_EQ(results.lse.element_bytes(), untouched);
}

/// Lengths in device memory that break their rules: reported, and nothing else is touched
/// (run_on_gpu looks at everything around the outputs).
TEST_P(GpuKernels, Row28_MalformedLengthsAreReportedAndHarmless) {
  const Instance good(varlen());
  const std::vector<double> q = good.cu_q.values();
  const std::vector<double> k = good.cu_k.values();
  const Results expected = run(good);
  for (const double wrong : {-5.0, -0x1p31, 1e6, 0x1p31 - 1.0}) {
    for (std::size_t at = 0; at < q.size(); ++at) {
      for (const bool of_keys : {false, true}) {
        Instance x(varlen());
        std::vector<double> lengths = of_keys ? k : q;
        lengths[at] = wrong;
        (of_keys ? x.cu_k : x.cu_q).fill(lengths);
        Results results = gpu_results(x);
        const Status status = run_on_gpu(x, results);
        ASSERT_FALSE(status.ok()) << at << " is " << wrong;
        EXPECT_EQ(status.error().argument, of_keys ? "cu_seqlens_k" : "cu_seqlens_q");
        if (of_keys) continue;
        // Sequences whose own entries are right get what they get otherwise. (One that begins
        // before 0 may lie over them.)
        for (std::size_t n = 0; wrong > 0.0 && n + 1 < q.size(); ++n) {
          if (n == at || n + 1 == at) continue;
          results.o.for_each([&](const auto& index, std::int64_t) {
            const auto row = static_cast<double>(index[0]);
            if (row < q[n] || row >= q[n + 1]) return;
            ASSERT_EQ(results.o.at(index), expected.o.at(index)) << index[0] << " of " << wrong;
          });
        }
        if (wrong > 0.0 || at + 1 < q.size()) continue;
        // A last sequence that ends before it begins is empty.
        results.o.for_each([&](const auto& index, std::int64_t) {
          if (static_cast<double>(index[0]) < q[at - 1]) return;
          ASSERT_TRUE(std::isnan(results.o.at(index))) << index[0] << " of " << wrong;
        });
      }
    }
    Case c = base();
    c.key_lengths = {c.s_k, 2};
    Instance x(c);
    x.key_lengths.fill({static_cast<double>(c.s_k), wrong});
    Results results = gpu_results(x);
    const Status status = run_on_gpu(x, results);
    ASSERT_FALSE(status.ok()) << wrong;
    EXPECT_EQ(status.error().argument, "key_lengths");
  }
}

/// Rows beyond the batch's last one belong to nobody, and strides of single elements may be
/// anything.
TEST_P(GpuKernels, Row24And27_OddLayouts) {
  Case c = varlen(DType::f16);
  c.slack_q = 5;
  c.slack_k = 9;
  c.layout = {.random = true, .tma = true};
  check(Instance(c));
  Case one = base();
  one.b = 1;
  const Instance x(one);
  const Results plain = run(x);
  Results results = gpu_results(x);
  const GpuForward gpu(x, results);
  ForwardTensors tensors = gpu.tensors();
  for (ConstTensor* tensor : {&tensors.q, &tensors.k, &tensors.v}) tensor->stride[0] = -7;
  tensors.o.stride[0] = 3;
  const Status status = forward(tensors, one.options);
  ASSERT_TRUE(status.ok()) << to_string(status.error());
  ABACIST_CUDA_OK(cudaDeviceSynchronize());
  gpu.collect(x, results);
  EXPECT_EQ(bits_of(results), bits_of(plain));
}

/// V that overflows with weights of 2^20 to 2^60, which is what a maximum from the first keys
/// gives.
TEST_P(GpuKernels, ValuesNearTheEndOfFloat) {
  Case c = base();
  c.options.mask.causal = true;
  Instance x(c);
  x.q.for_each([&](const auto& index, std::int64_t) {
    x.q.set(index, index[3] == 0 ? 8.0 : 0.1 * static_cast<double>(index[3] % 5));
  });
  x.k.for_each([&](const auto& index, std::int64_t) {
    const double jump = index[1] < c.s_k / 2 ? 0.0 : 2.0 + static_cast<double>(index[1] % 4);
    if (index[3] == 0) x.k.set(index, jump * std::sqrt(static_cast<double>(c.d_qk)));
  });
  x.v.for_each([&](const auto& index, std::int64_t) { x.v.set(index, 0x1p112 * x.v.at(index)); });
  for (Buffer* buffer : {&x.q, &x.k, &x.v}) buffer->freeze();
  check(x);
}

INSTANTIATE_TEST_SUITE_P(Each, GpuKernels, ::testing::ValuesIn(kKernels),
                         [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace abacist::testing
