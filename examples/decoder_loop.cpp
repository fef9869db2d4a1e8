// A decoder: two sequences of different lengths grow token by token over one pool of pages. A
// sequence takes a page when it needs one; its block table says which pages it has, key_lengths how
// many keys. Each step attends with one query per sequence, then appends a key and a value; what
// lies beyond a length is never read.
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

constexpr std::int64_t kBatch = 2, kDim = 128;
constexpr std::int64_t kPageSize = 16, kPages = 24, kMaxPages = 10;  // of a sequence
constexpr int kContext = 5;                                          // letters that a key describes
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

/// A pool of pages that sequences share.
struct Cache {
  Values k, v;  // [pages, page size, 1, d]
  std::int32_t table[kBatch][kMaxPages] = {};
  std::int32_t lengths[kBatch] = {};
  std::int32_t taken = 0;

  Cache() : k(kPages * kPageSize * kDim, std::numeric_limits<float>::quiet_NaN()), v(k) {}

  static abacist::TensorSpec pool() {
    return abacist::contiguous(abacist::DType::f32, {kPages, kPageSize, 1, kDim});
  }

  /// Letters [first, end) of a sequence's text, as keys and values behind those that it has.
  abacist::Status append(const Model& model, std::size_t n, const std::string& text,
                         std::size_t first) {
    const auto count = static_cast<std::int64_t>(text.size() - first);
    Values keys, values;
    for (std::size_t at = first; at < text.size(); ++at) {
      for (std::int64_t c = 0; c < kDim; ++c) {
        keys.push_back(model.describe(text, at, c));
        values.push_back(model.of(text[at], c));
      }
    }
    // Pages 7 apart, so that nothing is right by accident.
    for (std::int64_t page = (lengths[n] + kPageSize - 1) / kPageSize;
         page * kPageSize < lengths[n] + count; ++page) {
      table[n][page] = static_cast<std::int32_t>(7 * taken++ % kPages);
    }
    const auto rows = abacist::contiguous(abacist::DType::f32, {1, count, 1, kDim});
    abacist::Status status = abacist::append(
        {.k = {keys.data(), rows},
         .v = {values.data(), rows},
         .k_cache = {k.data(), pool()},
         .v_cache = {v.data(), pool()},
         .lengths = {&lengths[n], abacist::contiguous(abacist::DType::i32, {1})},
         .block_table = {table[n], abacist::contiguous(abacist::DType::i32, {1, kMaxPages})}});
    if (status) lengths[n] += static_cast<std::int32_t>(count);
    return status;
  }
};

int report(const abacist::Status& status) {
  std::fprintf(stderr, "%s\n", to_string(status.error()).c_str());
  return 1;
}

}  // namespace

int main() {
  const std::string verses[] = {"exact attention, ", "no score matrix is ever written; "};
  std::string texts[kBatch];
  const Model model;
  Cache cache;
  for (std::size_t n = 0; n < kBatch; ++n) {
    texts[n] = verses[n] + verses[n].substr(0, kContext);  // the prompt
    if (auto status = cache.append(model, n, texts[n], 0); !status) return report(status);
  }
  Values q(kBatch * kDim), o(kBatch * kDim);
  const auto one = abacist::contiguous(abacist::DType::f32, {kBatch, 1, 1, kDim});
  const abacist::ForwardTensors tensors{
      .q = {q.data(), one},
      .k = {cache.k.data(), Cache::pool()},
      .v = {cache.v.data(), Cache::pool()},
      .o = {o.data(), one},
      .key_lengths = {cache.lengths, abacist::contiguous(abacist::DType::i32, {kBatch})},
      .block_table = {cache.table, abacist::contiguous(abacist::DType::i32, {kBatch, kMaxPages})}};
  const auto plan = abacist::plan(make_problem(tensors));  // serves every step: lengths are data
  if (!plan) return report(plan.error());
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
      status = cache.append(model, n, texts[n], texts[n].size() - 1);
    }
  }
  ::operator delete(workspace, std::align_val_t(abacist::kWorkspaceAlignment));
  if (!status) return report(status);
  int wrong = 0;
  for (std::size_t n = 0; n < kBatch; ++n) {
    std::puts(texts[n].c_str());
    for (std::size_t at = 0; at < texts[n].size(); ++at) {
      wrong += texts[n][at] != verses[n][at % verses[n].size()];
    }
  }
  return wrong == 0 ? 0 : 1;
}
