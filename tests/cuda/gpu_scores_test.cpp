// Modified scores (softcap, ALiBi) on every kernel: how a score is computed depends on where it
// lies.
#include <array>
#include <cmath>
#include <limits>

#include "cuda/support/each_kernel.hpp"

namespace abacist::testing {
namespace {

/// Scores on both sides of where softcap's polynomial ends (0.625 cap), all below it, all far
/// beyond, where tanh is 1.
TEST_P(GpuKernels, SoftcapOfSmallAndLargeScores) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const double deviation : {0.1, 0.6, 2.0, 30.0}) {
      for (const double cap : {0.5, 20.0, 1e4}) {
        Case c = base(dtype);
        c.options.mask.causal = deviation < 1.0;
        c.options.score = {.scale = 1.0, .softcap = cap};
        Instance x(c);
        const double factor = deviation / std::sqrt(static_cast<double>(c.d_qk));
        x.q.for_each([&](const auto& index, std::int64_t) {
          x.q.set(index, factor * std::min(cap, 1e3) * x.q.at(index));
        });
        x.q.freeze();
        check(x);
        if (HasFailure()) return;
      }
    }
  }
}

/// The largest caps, with scores above and below 0.625 of them.
TEST_P(GpuKernels, SoftcapsNearTheEndOfFloat) {
  for (const double cap : {1e30, 1e38, 1.3e38, 1.6e38}) {
    for (const double part : {0.3, 1.0}) {
      for (const bool causal : {false, true}) {
        Case c = base();
        c.options.mask.causal = causal;
        c.options.score = {.scale = 1.0, .softcap = cap};
        Instance x(c);
        x.q.fill(0.0);
        x.k.fill(0.0);
        x.q.for_each([&](const auto& index, std::int64_t) {
          if (index[3] == 0) x.q.set(index, 0x1p60);
        });
        x.k.for_each([&](const auto& index, std::int64_t) {
          if (index[3] == 0) x.k.set(index, cap * part * (index[1] % 3 ? 1.0 : 0.5) * 0x1p-60);
        });
        x.q.freeze();
        x.k.freeze();
        check(x);
        if (HasFailure()) return;
      }
    }
  }
}

/// A row's scores are computed in the same way whatever those of its neighbours are: with softcap,
/// with ALiBi, with both.
TEST_P(GpuKernels, Row49_NeighboursLeaveTheBitsOfModifiedScores) {
  for (const auto& [softcap, alibi] : {std::pair{30.0, 0}, {0.0, 1}, {30.0, 1}}) {
    Case c = base();
    c.options.mask.causal = true;
    c.options.score.softcap = softcap;
    c.alibi_rank = alibi;
    Instance x(c);
    const auto changed = [&](const auto& index) {
      return c.s_q > 16 ? index[1] % 16 == 5 : index[2] == 1;
    };
    const Results alone = run(x);
    x.q.for_each([&](const auto& index, std::int64_t) {
      if (changed(index)) x.q.set(index, 200.0 * x.q.at(index));
    });
    x.q.freeze();
    const Results beside = run(x);
    std::int64_t others = 0;
    beside.o.for_each([&](const auto& index, std::int64_t) {
      if (changed(index)) return;
      ++others;
      ASSERT_EQ(beside.o.at(index), alone.o.at(index)) << index[1];
      const auto row = lse_index(c, index);
      ASSERT_EQ(beside.lse.at(row), alone.lse.at(row)) << index[1];
    });
    ASSERT_GT(others, 0);
  }
}

/// Slopes from none to so large that no key but a row's own counts, and negative ones; a head's
/// slope of NaN is its own affair.
TEST_P(GpuKernels, AlibiSlopesOfEverySize) {
  for (const bool causal : {false, true}) {
    for (const double softcap : {0.0, 5.0}) {
      Case c = base();
      c.options.mask.causal = causal;
      c.options.score.softcap = softcap;
      c.alibi_rank = 1;
      Instance x(c);
      std::int64_t n = 0;
      x.slopes.fill(
          [&] { return std::array{0.0, 1e-3, 0.7, -0.01, 40.0, 1e30, 0x1p110}[++n % 7]; });
      x.slopes.freeze();
      check(x);
      if (HasFailure()) return;
      const Results alone = run(x);
      x.slopes.set({0}, std::numeric_limits<double>::quiet_NaN());
      x.slopes.freeze();
      const Results beside = run(x);
      beside.o.for_each([&](const auto& index, std::int64_t) {
        if (index[2] == 0) return;
        ASSERT_EQ(beside.o.at(index), alone.o.at(index)) << index[1] << " " << index[2];
      });
    }
  }
}

}  // namespace
}  // namespace abacist::testing
