// One long sequence over several workers: each holds a block of the keys, attends to it alone and
// sends (O, LSE), nothing else; merging gives the attention over all keys. Causal: a worker's block
// starts at key `first`, which a query sees from row `first` on. Blocks need not be equal.
#include <abacist/abacist.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

namespace {

constexpr std::int64_t kLength = 1500, kHeads = 4, kDim = 64;
using Values = std::vector<float>;

abacist::TensorSpec spec(std::int64_t length) {
  return abacist::contiguous(abacist::DType::f32, {1, length, kHeads, kDim});
}
abacist::TensorSpec lse_spec() {
  return abacist::contiguous(abacist::DType::f32, {1, kHeads, kLength});
}

struct Worker {
  std::int64_t first = 0, last = 0;  // its keys
  Values o, lse;
  abacist::Status status{};

  /// Attention of all queries over keys [first, last) of a causal problem.
  void attend(const Values& q, const Values& k, const Values& v) {
    o.assign(kLength * kHeads * kDim, 0.0f);
    lse.assign(kHeads * kLength, 0.0f);
    const auto offset = static_cast<std::size_t>(first * kHeads * kDim);
    // Top-left: query 0 stands at key 0 of what is given. Of this block it stands `first` keys
    // earlier, so the rows from `first` on are given, whose first one stands at the block's key 0.
    // Rows before see none of these keys: (0, -inf), the neutral element.
    std::fill(lse.begin(), lse.end(), -HUGE_VALF);
    const std::int64_t rows = kLength - first;
    auto rows_of_lse = abacist::contiguous(abacist::DType::f32, {1, kHeads, rows});
    rows_of_lse.stride = lse_spec().stride;
    status = abacist::forward({.q = {q.data() + offset, spec(rows)},
                               .k = {k.data() + offset, spec(last - first)},
                               .v = {v.data() + offset, spec(last - first)},
                               .o = {o.data() + offset, spec(rows)},
                               .lse = {lse.data() + first, rows_of_lse}},
                              {.mask = {.causal = true, .align = abacist::Align::top_left}});
  }
};

}  // namespace

int main() {
  std::mt19937 bits(3);
  std::normal_distribution<float> normal;
  Values q(kLength * kHeads * kDim), k(q.size()), v(q.size()), whole(q.size()), merged(q.size());
  for (Values* values : {&q, &k, &v}) {
    for (float& value : *values) value = normal(bits);
  }
  Worker workers[] = {
      {0, 400, {}, {}}, {400, 401, {}, {}}, {401, 1100, {}, {}}, {1100, 1500, {}, {}}};
  std::vector<std::thread> threads;
  for (Worker& worker : workers) threads.emplace_back([&] { worker.attend(q, k, v); });
  for (std::thread& thread : threads) thread.join();

  std::vector<abacist::Partial> parts;
  for (Worker& worker : workers) {
    if (!worker.status) return std::puts(to_string(worker.status.error()).c_str());
    parts.push_back({{worker.o.data(), spec(kLength)}, {worker.lse.data(), lse_spec()}});
  }
  if (auto status = abacist::merge(parts, {merged.data(), spec(kLength)}); !status) return 1;

  const auto status = abacist::forward({.q = {q.data(), spec(kLength)},
                                        .k = {k.data(), spec(kLength)},
                                        .v = {v.data(), spec(kLength)},
                                        .o = {whole.data(), spec(kLength)}},
                                       {.mask = {.causal = true}});
  if (!status) return 1;
  float difference = 0.0f;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    difference = std::max(difference, std::abs(whole[i] - merged[i]));
  }
  std::printf("4 workers, largest difference to one: %.1e\n", static_cast<double>(difference));
  return difference < 2e-6f ? 0 : 1;
}
