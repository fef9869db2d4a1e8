// Sizes that forward_harness.cu is too thorough for: a million tokens, more than 65,535 heads and
// sequences, element offsets beyond 2^31. Sampled rows against float64.
//
//   forward_extremes [name]
//
// Bound per element of O: 2^-7 (bf16) times sum p |v|, and |ref|: each p and the result are rounded
// once. LSE: 16 eps32 (1 + S), S the largest |score| of the row.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "../../src/cuda/sm90/forward/arguments.hpp"

using namespace abacist::cuda::sm90;
using Element = __nv_bfloat16;

#define CHECK(call)                                                                  \
  do {                                                                               \
    cudaError_t e = (call);                                                          \
    if (e != cudaSuccess) {                                                          \
      std::printf("%s at line %d\n", cudaGetErrorString(e), __LINE__), std::exit(2); \
    }                                                                                \
  } while (0)

struct Extreme {
  const char* name;
  int64_t b, h, s, d;
  int64_t left, right;
  bool varlen;
};

__global__ void fill(Element* x, int64_t count, uint32_t seed) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    uint32_t r = uint32_t(i) * 0x9E3779B9u ^ uint32_t(i >> 32) * 0x85EBCA6Bu ^ seed;
    float sum = 0;  // four uniforms: near enough to a normal
    for (int n = 0; n < 4; ++n) {
      r ^= r << 13, r ^= r >> 17, r ^= r << 5;
      sum += float(r >> 8) * 0x1p-24f - 0.5f;
    }
    x[i] = Element(sum * 1.7f);
  }
}

struct Sample {
  int64_t batch, head, row;
};
struct Verdict {
  float o, lse;  // largest error over its bound
};

// One block of 256 threads per sample.
__global__ void check_rows(Extreme c, const Element* q, const Element* k, const Element* v,
                           const Element* o, const float* lse, const Sample* samples,
                           Verdict* verdicts) {
  __shared__ double reduce[256], weights[256];
  const Sample at = samples[blockIdx.x];
  const int tid = threadIdx.x;
  const int64_t token0 = at.batch * c.s, stride = c.h * c.d;
  const Element* row = q + (token0 + at.row) * stride + at.head * c.d;
  const int64_t first = c.left == kUnbounded || at.row < c.left ? 0 : at.row - c.left;
  const int64_t end =
      c.right == kUnbounded || at.row + c.right + 1 > c.s ? c.s : at.row + c.right + 1;
  const double scale = 1 / sqrt(double(c.d));
  auto score = [&](int64_t j) {
    const Element* key = k + (token0 + j) * stride + at.head * c.d;
    double sum = 0;
    for (int64_t e = 0; e < c.d; ++e) sum += double(float(row[e])) * double(float(key[e]));
    return sum * scale;
  };
  auto over_all = [&](double x, auto combine) {
    __syncthreads();
    reduce[tid] = x;
    __syncthreads();
    double y = reduce[0];
    for (int t = 1; t < 256; ++t) y = combine(y, reduce[t]);
    return y;
  };
  double top = -1e300, largest = 0;
  for (int64_t j = first + tid; j < end; j += 256) {
    const double x = score(j);
    top = fmax(top, x), largest = fmax(largest, fabs(x));
  }
  const auto maximum = [](double a, double b) { return fmax(a, b); };
  top = over_all(top, maximum), largest = over_all(largest, maximum);
  double sum = 0, result = 0, magnitude = 0;
  for (int64_t j0 = first; j0 < end; j0 += 256) {
    __syncthreads();
    weights[tid] = j0 + tid < end ? exp(score(j0 + tid) - top) : 0;
    sum += weights[tid];
    __syncthreads();
    if (tid < c.d)
      for (int64_t j = j0; j < end && j < j0 + 256; ++j) {
        const double value = double(float(v[(token0 + j) * stride + at.head * c.d + tid]));
        result += weights[j - j0] * value, magnitude += weights[j - j0] * fabs(value);
      }
  }
  sum = over_all(sum, [](double a, double b) { return a + b; });
  double worst = 0;
  if (tid < c.d) {
    const double expected = result / sum;
    const double got = double(float(o[(token0 + at.row) * stride + at.head * c.d + tid]));
    worst = fabs(got - expected) / (0x1p-7 * (magnitude / sum + fabs(expected)));
    if (!isfinite(got)) worst = 1e30;
  }
  worst = over_all(worst, maximum);
  if (tid == 0) {
    const double got = c.varlen ? lse[at.head * c.b * c.s + token0 + at.row]
                                : lse[(at.batch * c.h + at.head) * c.s + at.row];
    const double error = fabs(got - (top + log(sum))) / (16 * 0x1p-23 * (1 + largest));
    verdicts[blockIdx.x] = {float(worst), isfinite(got) ? float(error) : 1e30f};
  }
}

static bool run(const Extreme& c) {
  const int64_t count = c.b * c.s * c.h * c.d, rows = c.b * c.h * c.s;
  Element* tensors[4];
  for (int i = 0; i < 4; ++i) {
    CHECK(cudaMalloc(&tensors[i], count * sizeof(Element)));
    if (i < 3) fill<<<2048, 256>>>(tensors[i], count, 77u + 1000u * unsigned(i));
  }
  CHECK(cudaMemset(tensors[3], 0xFF, count * sizeof(Element)));
  float* lse;
  CHECK(cudaMalloc(&lse, rows * 4));
  CHECK(cudaMemset(lse, 0xFF, rows * 4));
  ForwardArguments a;
  const ForwardStrides stride{c.s * c.h * c.d, c.h * c.d, c.d};
  a.operands = {tensors[0], tensors[1], tensors[2], tensors[3], lse,
                stride,     stride,     stride,     stride};
  a.geometry.b = c.b, a.geometry.s_q = a.geometry.s_k = c.s;
  a.geometry.h_q = a.geometry.h_k = c.h, a.geometry.d_qk = a.geometry.d_v = c.d;
  int32_t* offsets = nullptr;
  if (c.varlen) {
    std::vector<int32_t> host(size_t(c.b) + 1);
    for (int64_t i = 0; i <= c.b; ++i) host[size_t(i)] = int32_t(i * c.s);
    CHECK(cudaMalloc(&offsets, host.size() * 4));
    CHECK(cudaMemcpy(offsets, host.data(), host.size() * 4, cudaMemcpyHostToDevice));
    a.geometry.cu_seqlens_q = a.geometry.cu_seqlens_k = offsets;
    a.geometry.total_q = a.geometry.total_k = c.b * c.s;
  }
  a.mask = {c.left, c.right, false};
  a.score.scale = 1 / std::sqrt(float(c.d));
  launch_forward(a, nullptr);  // the first launch loads the kernel, which takes memory of its own
  CHECK(cudaMemset(tensors[3], 0xFF, count * sizeof(Element)));
  CHECK(cudaDeviceSynchronize());
  size_t free_before = 0, free_after = 0, total = 0;
  CHECK(cudaMemGetInfo(&free_before, &total));
  cudaEvent_t start, stop;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&stop));
  CHECK(cudaEventRecord(start));
  const ForwardStatus status = launch_forward(a, nullptr);
  CHECK(cudaEventRecord(stop));
  if (status.code != ForwardStatus::ok)
    return std::printf("FAIL %s: %s\n", c.name, status.reason), false;
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemGetInfo(&free_after, &total));
  float ms = 0;
  CHECK(cudaEventElapsedTime(&ms, start, stop));

  std::mt19937_64 random(20261129);
  std::vector<Sample> samples;
  for (int i = 0; i < 64; ++i) {
    auto below = [&](int64_t n) { return int64_t(random() % uint64_t(n)); };
    samples.push_back({below(c.b), below(c.h), below(c.s)});
    if (i < 4) samples.back() = {i % 2 ? c.b - 1 : 0, i % 2 ? c.h - 1 : 0, i < 2 ? 0 : c.s - 1};
  }
  Sample* device_samples;
  Verdict* verdicts;
  CHECK(cudaMalloc(&device_samples, samples.size() * sizeof(Sample)));
  CHECK(cudaMalloc(&verdicts, samples.size() * sizeof(Verdict)));
  CHECK(cudaMemcpy(device_samples, samples.data(), samples.size() * sizeof(Sample),
                   cudaMemcpyHostToDevice));
  check_rows<<<unsigned(samples.size()), 256>>>(c, tensors[0], tensors[1], tensors[2], tensors[3],
                                                lse, device_samples, verdicts);
  std::vector<Verdict> got(samples.size());
  CHECK(cudaMemcpy(got.data(), verdicts, got.size() * sizeof(Verdict), cudaMemcpyDeviceToHost));
  size_t worst = 0;
  float worst_lse = 0;
  bool good = true;
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i].o > got[worst].o) worst = i;
    worst_lse = std::fmax(worst_lse, got[i].lse);
    good = good && got[i].o <= 1 && got[i].lse <= 1;
  }
  good = good && free_before == free_after;
  std::printf(
      "%s %-34s %9.3f ms, tensors of %5.2f GB, O %.2f of its bound (row %lld), LSE %.2f; "
      "memory taken by the call %lld bytes\n",
      good ? "ok  " : "FAIL", c.name, ms, count * 2e-9, got[worst].o, (long long)samples[worst].row,
      worst_lse, (long long)(free_before - free_after));
  for (void* x : {(void*)tensors[0], (void*)tensors[1], (void*)tensors[2], (void*)tensors[3],
                  (void*)lse, (void*)offsets, (void*)device_samples, (void*)verdicts})
    if (x) CHECK(cudaFree(x));
  return good;
}

int main(int argc, char** argv) {
  const Extreme cases[] = {
      {"1,048,576 tokens, full", 1, 1, 1 << 20, 64, kUnbounded, kUnbounded, false},
      {"1,048,576 tokens, causal", 1, 2, 1 << 20, 128, kUnbounded, 0, false},
      {"1,048,576 tokens, window 4096", 1, 8, 1 << 20, 128, 4096, 0, false},
      {"b h = 70,000", 70000, 1, 24, 128, kUnbounded, 0, false},
      {"b h = 131,072, d 64", 1024, 128, 16, 64, kUnbounded, kUnbounded, false},
      {"80,000 sequences of 16", 80000, 2, 16, 128, kUnbounded, 0, true},
      {"offsets to 4.3e9, window 128", 2, 256, 65536, 128, 128, 0, false},
      {"offsets to 4.3e9, varlen", 2, 256, 65536, 128, 128, 0, true},
  };
  int ran = 0, failed = 0;
  for (const Extreme& c : cases) {
    if (argc > 1 && !std::strstr(c.name, argv[1])) continue;
    ++ran;
    failed += !run(c);
    std::fflush(stdout);
  }
  std::printf("%d extremes, %d failed\n", ran, failed);
  return failed || !ran;
}
