// A decoder: two sequences of different lengths grow token by token over one cache of keys and
// values. Each step appends a key and a value, then attends with one query per sequence;
// key_lengths says how far each cache is filled, and what lies beyond is never read.
//
// In place of a trained model, an induction head written by hand: the key of a position describes
// the letters before it, its value the letter itself, so that a query that describes the last
// letters finds what followed them earlier. The loop must therefore go on repeating its prompt.
#include <abacist/abacist.hpp>

#include <cstdio>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr std::int64_t kBatch = 2, kCapacity = 160, kDim = 128;
constexpr int kContext = 5;  // letters that a key describes
constexpr int kLetters = 128;
using Values = std::vector<float>;

struct Model {
  Values embedding;  // [letters, d], random signs: nearly orthogonal

  Model() {
    std::mt19937 bits(5);
    for (int i = 0; i < kLetters * kDim; ++i) embedding.push_back(bits() % 2 == 0 ? 1.0f : -1.0f);
  }
  float of(char letter, std::int64_t c) const {
    return embedding[static_cast<std::size_t>((letter & 127) * kDim + c % kDim)];
  }
  /// The letters before `end`: each one's vector, turned by its distance.
  float describe(const std::string& text, std::size_t end, std::int64_t c) const {
    float sum = 0.0f;
    for (std::size_t back = 1; back <= kContext && back <= end; ++back) {
      sum += of(text[end - back], c + 17 * static_cast<std::int64_t>(back));
    }
    return sum;
  }
  /// The letter whose vector is nearest to an output of attention.
  char nearest(const float* o) const {
    int best = 0;
    float most = -std::numeric_limits<float>::infinity();
    for (int letter = 32; letter < kLetters; ++letter) {
      float product = 0.0f;
      for (std::int64_t c = 0; c < kDim; ++c) product += o[c] * of(static_cast<char>(letter), c);
      if (product > most) most = product, best = letter;
    }
    return static_cast<char>(best);
  }
};

/// Keys and values, dense: [b, capacity, 1, d].
struct Cache {
  Values k, v;
  std::int32_t lengths[kBatch] = {};

  Cache() : k(kBatch * kCapacity * kDim, std::numeric_limits<float>::quiet_NaN()), v(k) {}

  void append(const Model& model, std::int64_t sequence, const std::string& text, std::size_t at) {
    const std::int64_t row = (sequence * kCapacity + lengths[sequence]++) * kDim;
    for (std::int64_t c = 0; c < kDim; ++c) {
      k[static_cast<std::size_t>(row + c)] = model.describe(text, at, c);
      v[static_cast<std::size_t>(row + c)] = model.of(text[at], c);
    }
  }
};

}  // namespace

int main() {
  const std::string verses[] = {"exact attention, ", "no score matrix is ever written; "};
  std::string texts[kBatch];
  const Model model;
  Cache cache;
  for (std::size_t n = 0; n < kBatch; ++n) {
    texts[n] = verses[n] + verses[n].substr(0, kContext);  // the prompt
    for (std::size_t at = 0; at < texts[n].size(); ++at) {
      cache.append(model, static_cast<std::int64_t>(n), texts[n], at);
    }
  }
  Values q(kBatch * kDim), o(kBatch * kDim);
  const auto one = abacist::contiguous(abacist::DType::f32, {kBatch, 1, 1, kDim});
  const auto cached = abacist::contiguous(abacist::DType::f32, {kBatch, kCapacity, 1, kDim});
  const abacist::ForwardTensors tensors{
      .q = {q.data(), one},
      .k = {cache.k.data(), cached},
      .v = {cache.v.data(), cached},
      .o = {o.data(), one},
      .key_lengths = {cache.lengths, abacist::contiguous(abacist::DType::i32, {kBatch})}};
  const auto plan = abacist::plan(make_problem(tensors));  // serves every step: lengths are data
  if (!plan) return std::puts(to_string(plan.error()).c_str());
  const std::size_t bytes = (plan->info().workspace_bytes + 255) / 256 * 256;
  void* const workspace = ::operator new(bytes, std::align_val_t(abacist::kWorkspaceAlignment));

  abacist::Status status;
  for (int step = 0; step < 60 && status; ++step) {
    for (std::size_t n = 0; n < kBatch; ++n) {
      for (std::size_t c = 0; c < kDim; ++c) {
        q[n * kDim + c] = model.describe(texts[n], texts[n].size(), static_cast<std::int64_t>(c));
      }
    }
    status = plan->run(tensors, {.workspace = {workspace, bytes}});
    for (std::size_t n = 0; n < kBatch && status; ++n) {
      texts[n] += model.nearest(o.data() + n * kDim);
      cache.append(model, static_cast<std::int64_t>(n), texts[n], texts[n].size() - 1);
    }
  }
  ::operator delete(workspace, std::align_val_t(abacist::kWorkspaceAlignment));
  if (!status) return std::puts(to_string(status.error()).c_str());
  int wrong = 0;
  for (std::size_t n = 0; n < kBatch; ++n) {
    std::puts(texts[n].c_str());
    for (std::size_t at = 0; at < texts[n].size(); ++at) {
      wrong += texts[n][at] != verses[n][at % verses[n].size()];
    }
  }
  return wrong == 0 ? 0 : 1;
}
