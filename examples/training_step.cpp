// Training an attention layer: x -> q, k, v by three matrices, O, a squared loss; the gradients of
// the matrices from dQ, dK, dV; steps of gradient descent. The layer learns to copy the token two
// places back (position is part of the input), so the loss must fall.
#include <abacist/abacist.hpp>

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr std::int64_t kLength = 32, kDim = 16;  // one sequence, one head
using Matrix = std::vector<float>;

/// c += a b, or with a or b transposed; all row-major, a is [m, k] and b is [k, n] as used.
void add_product(Matrix& c, const Matrix& a, const Matrix& b, std::int64_t m, std::int64_t k,
                 std::int64_t n, bool transpose_a = false, bool transpose_b = false) {
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      float sum = 0.0f;
      for (std::int64_t l = 0; l < k; ++l) {
        sum += a[static_cast<std::size_t>(transpose_a ? l * m + i : i * k + l)] *
               b[static_cast<std::size_t>(transpose_b ? j * k + l : l * n + j)];
      }
      c[static_cast<std::size_t>(i * n + j)] += sum;
    }
  }
}

Matrix zeros(std::int64_t rows, std::int64_t columns) {
  return Matrix(static_cast<std::size_t>(rows * columns), 0.0f);
}

/// Half of the columns is a token's random vector, half a wave of its position.
Matrix make_input() {
  std::mt19937 bits(7);
  std::normal_distribution<float> normal;
  Matrix x = zeros(kLength, kDim);
  for (std::int64_t i = 0; i < kLength; ++i) {
    for (std::int64_t c = 0; c < kDim; ++c) {
      const float angle = 0.2f * static_cast<float>(i * (1 + c / 2 % 4));
      x[static_cast<std::size_t>(i * kDim + c)] =
          c < kDim / 2 ? normal(bits) : 2.0f * (c % 2 == 0 ? std::sin(angle) : std::cos(angle));
    }
  }
  return x;
}

struct Layer {
  Matrix weights[3];  // of q, k, v: [d, d]
  Matrix gradients[3];
};

/// Loss of one forward pass, and the gradients of the weights; false after an error.
bool step(Layer& layer, const Matrix& x, const Matrix& target, double& loss) {
  Matrix qkv[3], d_qkv[3];
  for (int i = 0; i < 3; ++i) {
    qkv[i] = d_qkv[i] = zeros(kLength, kDim);
    add_product(qkv[i], x, layer.weights[i], kLength, kDim, kDim);
  }
  Matrix o = zeros(kLength, kDim), d_o = o, lse = zeros(kLength, 1);
  const auto spec = abacist::contiguous(abacist::DType::f32, {1, kLength, 1, kDim});
  const auto lse_spec = abacist::contiguous(abacist::DType::f32, {1, 1, kLength});
  const abacist::Options options{.mask = {.causal = true}};
  abacist::Status status = abacist::forward({.q = {qkv[0].data(), spec},
                                             .k = {qkv[1].data(), spec},
                                             .v = {qkv[2].data(), spec},
                                             .o = {o.data(), spec},
                                             .lse = {lse.data(), lse_spec}},
                                            options);
  loss = 0.0;
  for (std::size_t i = 0; i < o.size(); ++i) {
    const float error = o[i] - target[i];
    loss += 0.5 * static_cast<double>(error * error) / kLength;
    d_o[i] = error / kLength;
  }
  if (status) {
    status = abacist::backward({.q = {qkv[0].data(), spec},
                                .k = {qkv[1].data(), spec},
                                .v = {qkv[2].data(), spec},
                                .o = {o.data(), spec},
                                .lse = {lse.data(), lse_spec},
                                .d_o = {d_o.data(), spec},
                                .dq = {d_qkv[0].data(), spec},
                                .dk = {d_qkv[1].data(), spec},
                                .dv = {d_qkv[2].data(), spec}},
                               options);
  }
  if (!status) {
    std::fprintf(stderr, "%s\n", abacist::to_string(status.error()).c_str());
    return false;
  }
  for (int i = 0; i < 3; ++i) {
    layer.gradients[i] = zeros(kDim, kDim);
    add_product(layer.gradients[i], x, d_qkv[i], kDim, kLength, kDim, true);
  }
  return true;
}

}  // namespace

int main() {
  const Matrix x = make_input();
  Matrix target = zeros(kLength, kDim);
  for (std::int64_t i = 2; i < kLength; ++i) {
    for (std::int64_t c = 0; c < kDim / 2; ++c) {
      target[static_cast<std::size_t>(i * kDim + c)] =
          x[static_cast<std::size_t>((i - 2) * kDim + c)];
    }
  }
  std::mt19937 bits(1);
  std::normal_distribution<float> normal(0.0f, 0.3f);
  Layer layer;
  for (Matrix& weights : layer.weights) {
    weights = zeros(kDim, kDim);
    for (float& weight : weights) weight = normal(bits);
  }
  double first = 0.0, loss = 0.0;
  for (int round = 0; round <= 400; ++round) {
    if (!step(layer, x, target, loss)) return 1;
    if (round == 0) first = loss;
    if (round % 100 == 0) std::printf("step %3d  loss %.4f\n", round, loss);
    for (int i = 0; i < 3; ++i) {
      for (std::size_t at = 0; at < layer.weights[i].size(); ++at) {
        layer.weights[i][at] -= 0.1f * layer.gradients[i][at];
      }
    }
  }
  return loss < 0.25 * first ? 0 : 1;
}
