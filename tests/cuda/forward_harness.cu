// Checks the Hopper forward kernel against a float64 reference with masking code of its own.
//
//   forward_harness [filter [i/n]]      runs every case whose name contains the filter (^x: begins
//                                       with x); of these, each n-th, from the i-th
//
// Per case: K, V beyond every length hold NaN, O, LSE and workspace are poisoned; O, LSE, untouched
// gaps, bitwise repeatability, and that NaN and huge values in three of four query rows leave the
// bits of the others are checked. Bound on O: 2 x the error of a plain same-precision computation
// (float32 scores, P rounded to the input type) + 2 eps max|ref|. LSE: (16 + 8 cap) eps32 (1 + S),
// S the largest |score| of the row (a frozen maximum may be far below the true one).
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../../src/cuda/sm90/forward/arguments.hpp"

using namespace abacist::cuda::sm90;

#define CHECK(call)                                                                  \
  do {                                                                               \
    cudaError_t e = (call);                                                          \
    if (e != cudaSuccess) {                                                          \
      std::printf("%s at line %d\n", cudaGetErrorString(e), __LINE__), std::exit(2); \
    }                                                                                \
  } while (0)

enum class Data { normal, large, rising, spike, huge_v, huger_v, nan_query };

struct Case {
  std::string name;
  ForwardType type = ForwardType::bf16;
  int b = 1, h_q = 1, h_k = 1, s_q = 128, s_k = 128, d_qk = 128, d_v = 128;
  int64_t left = kUnbounded, right = kUnbounded;
  bool top_left = false;
  Data data = Data::normal;
  float scale = 0;  // 0: 1 / sqrt(d_qk)
  bool zero_scale = false, sinks = false, strided = false, online = false, long_shape = false,
       alibi = false;
  float softcap = 0;
  int row_choice = 0, splits = 1;
  std::vector<int> q_lengths, k_lengths;  // varlen if given
  std::vector<int> used_k;                // dense with lengths
};

struct ReferenceArguments {
  const void *q, *k, *v, *o;
  const float* lse;
  ForwardStrides qs, ks, vs, os;
  int h_q, h_k, s_q, s_k, d_qk, d_v, total_q;
  const int *cu_q, *cu_k, *used_k;
  const float *sinks, *slopes;
  double softcap;
  long long left, right;
  int top_left;
  double scale;
};
struct Outcome {
  unsigned long long worst, plain, lse, biggest;  // float bits of the value << 32 | position
  unsigned long long wrong_special;  // NaN or inf where the reference has none, or the reverse
  double bias, absolute;
};

template <class E>
__device__ double as_double(E x) {
  return double(float(x));
}
__device__ void raise(unsigned long long* to, double value, unsigned position) {
  const unsigned long long packed =
      (unsigned long long)(__float_as_uint(float(value))) << 32 | position;
  atomicMax(to, packed);
}

// One block per query row. Two passes in float64, and the plain version beside it.
template <class E>
__global__ void reference(ReferenceArguments a, Outcome* outcome) {
  extern __shared__ double scores[];
  __shared__ double reduce[128];
  const int i = blockIdx.x, head = blockIdx.y, batch = blockIdx.z, tid = threadIdx.x;
  const int kv = head / (a.h_q / a.h_k);
  const int q0 = a.cu_q ? a.cu_q[batch] : 0, k0 = a.cu_k ? a.cu_k[batch] : 0;
  const int len_q = a.cu_q ? a.cu_q[batch + 1] - q0 : a.s_q;
  int len_k = a.cu_k ? a.cu_k[batch + 1] - k0 : a.s_k;
  if (a.used_k) len_k = a.used_k[batch];
  if (i >= len_q) return;
  const long long shift = a.top_left ? 0 : (long long)len_k - len_q;
  const E* q =
      (const E*)a.q + (a.cu_q ? 0 : batch * a.qs.b) + (q0 + (int64_t)i) * a.qs.s + head * a.qs.h;
  const E* k = (const E*)a.k + (a.cu_k ? 0 : batch * a.ks.b) + (int64_t)k0 * a.ks.s + kv * a.ks.h;
  const E* v = (const E*)a.v + (a.cu_k ? 0 : batch * a.vs.b) + (int64_t)k0 * a.vs.s + kv * a.vs.h;
  const E* o =
      (const E*)a.o + (a.cu_q ? 0 : batch * a.os.b) + (q0 + (int64_t)i) * a.os.s + head * a.os.h;
  float* plain = (float*)(scores + a.s_k);
  const double hidden = -1e300;
  double top = hidden, largest = 0;
  for (int j = tid; j < len_k; j += 128) {
    bool visible = true;
    if (a.right < (1ll << 40) && (long long)j > i + shift + a.right) visible = false;
    if (a.left < (1ll << 40) && (long long)j < i + shift - a.left) visible = false;
    double sum = hidden;
    float f = 0;
    if (visible) {
      sum = 0;
      for (int c = 0; c < a.d_qk; ++c) {
        sum += as_double(q[c]) * as_double(k[j * a.ks.s + c]);
        f = fmaf(float(q[c]), float(k[j * a.ks.s + c]), f);
      }
      sum *= a.scale;
      f *= float(a.scale);
      if (a.softcap != 0)
        sum = a.softcap * tanh(sum / a.softcap), f = float(a.softcap) * tanhf(f / float(a.softcap));
      if (a.slopes) {
        const double bias = -double(a.slopes[head]) * fabs(double(i + shift - j));
        sum += bias, f += float(bias);
      }
      largest = fmax(largest, fabs(sum));
      if (isnan(sum))
        top = sum;
      else if (!isnan(top))
        top = fmax(top, sum);
    }
    scores[j] = sum;
    plain[j] = f;
  }
  reduce[tid] = top;
  __syncthreads();
  for (int t = 0; t < 128; ++t) top = isnan(reduce[t]) || isnan(top) ? NAN : fmax(top, reduce[t]);
  const bool empty = top == hidden;
  __syncthreads();
  reduce[tid] = largest;
  __syncthreads();
  for (int t = 0; t < 128; ++t) largest = fmax(largest, reduce[t]);
  const double sink = a.sinks ? a.sinks[head] : -INFINITY;
  const double shift_by = fmax(empty ? -INFINITY : top, sink);
  double l = 0;
  float plain_l = 0;
  for (int j = 0; j < len_k; ++j) {
    if (scores[j] == hidden) continue;
    l += exp(scores[j] - shift_by);
    plain_l += expf(plain[j] - float(shift_by));
  }
  if (sink > -INFINITY) l += exp(sink - shift_by), plain_l += expf(float(sink - shift_by));
  const unsigned position = unsigned((batch * a.h_q + head) * a.s_q + i);
  for (int c = tid; c < a.d_v; c += 128) {
    double sum = 0;
    float f = 0;
    for (int j = 0; j < len_k; ++j) {
      if (scores[j] == hidden) continue;
      sum += exp(scores[j] - shift_by) * as_double(v[j * a.vs.s + c]);
      f = fmaf(float(E(expf(plain[j] - float(shift_by)))), float(v[j * a.vs.s + c]), f);
    }
    const double expected = empty ? 0 : sum / l, got = as_double(o[c]);
    const double rough = empty ? 0 : as_double(E(f / plain_l));
    if (isfinite(expected) != isfinite(got)) atomicAdd(&outcome->wrong_special, 1ull);
    if (isfinite(expected) && isfinite(got)) {
      raise(&outcome->worst, fabs(got - expected), position);
      raise(&outcome->plain, fabs(rough - expected), position);
      raise(&outcome->biggest, fabs(expected), position);
      atomicAdd(&outcome->bias, got - expected);
      atomicAdd(&outcome->absolute, fabs(got - expected));
    }
  }
  if (tid == 0 && a.lse) {
    const double expected = empty && !(sink > -INFINITY) ? -INFINITY : shift_by + log(l);
    const double got = a.cu_q ? a.lse[(int64_t)head * a.total_q + q0 + i]
                              : a.lse[((int64_t)batch * a.h_q + head) * a.s_q + i];
    if (isfinite(expected) != isfinite(got) || (isinf(expected) && got != expected)) {
      atomicAdd(&outcome->wrong_special, 1ull << 32);
    } else if (isfinite(expected)) {
      raise(&outcome->lse, fabs(got - expected) / (1 + fmax(largest, fabs(shift_by))), position);
    }
  }
}

struct Tensor {
  void* data = nullptr;
  ForwardStrides stride;
  std::vector<uint16_t> host;
  int64_t b, s, h, d;
  int64_t at(int64_t i, int64_t j, int64_t k) const {
    return i * stride.b + j * stride.s + k * stride.h;
  }
};

static uint16_t encode(ForwardType type, float x) {
  if (type == ForwardType::bf16) {
    __nv_bfloat16 y(x);
    uint16_t r;
    return std::memcpy(&r, &y, 2), r;
  }
  __half y(x);
  uint16_t r;
  return std::memcpy(&r, &y, 2), r;
}

// Rows apart by `pad` elements more than needed, heads before or after tokens in memory.
static Tensor make_tensor(int64_t b, int64_t s, int64_t h, int64_t d, bool strided,
                          bool heads_first) {
  Tensor t;
  t.b = b, t.s = s, t.h = h, t.d = d;
  const int64_t row = d + (strided ? 8 : 0);
  if (heads_first) {
    t.stride = {s * h * row, row, s * row};
  } else {
    t.stride = {s * h * row, h * row, row};
  }
  if (strided) t.stride.b += 64;
  t.host.assign(size_t(std::max<int64_t>(1, b) * t.stride.b + 64), 0xFFFF);  // NaN in both types
  CHECK(cudaMalloc(&t.data, t.host.size() * 2));
  return t;
}
static void upload(Tensor& t) {
  CHECK(cudaMemcpy(t.data, t.host.data(), t.host.size() * 2, cudaMemcpyHostToDevice));
}

static float value(unsigned long long packed) {
  const uint32_t bits = uint32_t(packed >> 32);
  float f;
  return std::memcpy(&f, &bits, 4), f;
}

static bool run_case(const Case& c, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const bool varlen = !c.q_lengths.empty();
  std::vector<int> cu_q{0}, cu_k{0};
  for (int n : c.q_lengths) cu_q.push_back(cu_q.back() + n);
  for (int n : c.k_lengths) cu_k.push_back(cu_k.back() + n);
  const int64_t rows_q = varlen ? cu_q.back() + 5 : c.s_q,
                rows_k = varlen ? cu_k.back() + 5 : c.s_k;
  const int64_t tb = varlen ? 1 : c.b;
  Tensor q = make_tensor(tb, rows_q, c.h_q, c.d_qk, c.strided, false);
  Tensor k = make_tensor(tb, rows_k, c.h_k, c.d_qk, c.strided, c.strided);
  Tensor v = make_tensor(tb, rows_k, c.h_k, c.d_v, c.strided, false);
  Tensor o = make_tensor(tb, rows_q, c.h_q, c.d_v, c.strided, c.strided);
  // Fill what belongs to a sequence; the rest stays NaN.
  const int sequences = varlen ? int(c.q_lengths.size()) : c.b;
  for (int n = 0; n < sequences; ++n) {
    const int batch = varlen ? 0 : n, q0 = varlen ? cu_q[n] : 0, k0 = varlen ? cu_k[n] : 0;
    const int len_q = varlen ? c.q_lengths[n] : c.s_q;
    const int len_k = varlen ? c.k_lengths[n] : c.used_k.empty() ? c.s_k : c.used_k[n];
    std::vector<float> direction(c.d_qk);
    for (float& x : direction) x = normal(random) > 0 ? 1.0f : -1.0f;
    const bool steered = c.data == Data::rising || c.data == Data::spike ||
                         c.data == Data::huge_v || c.data == Data::huger_v;
    for (int h = 0; h < c.h_q; ++h)
      for (int i = 0; i < len_q; ++i)
        for (int e = 0; e < c.d_qk; ++e) {
          float x = normal(random);
          if (c.data == Data::large) x *= 6;
          if (steered) x = direction[e] * (1 + 0.1f * x);
          if (c.data == Data::nan_query && i % 37 == 5) x = NAN;
          q.host[q.at(batch, q0 + i, h) + e] = encode(c.type, x);
        }
    for (int h = 0; h < c.h_k; ++h)
      for (int j = 0; j < len_k; ++j) {
        float along = 0;  // score = along * d / sqrt(d)
        const float unit = 1.0f / std::sqrt(float(c.d_qk));
        if (c.data == Data::rising) along = 0.35f * j * unit;  // nats per key
        if (c.data == Data::spike) along = (j == len_k * 5 / 8 ? 150.0f : 0.0f) * unit;
        // 2^55 over the first tile: the maximum rises. 2^22: it does not, and O overflows, l not.
        if (c.data == Data::huge_v) along = (j > len_k / 2 ? 38.0f : 0.0f) * unit;
        if (c.data == Data::huger_v) along = (j > len_k / 2 ? 15.0f : 0.0f) * unit;
        for (int e = 0; e < c.d_qk; ++e) {
          float x = normal(random);
          if (c.data == Data::large) x *= 6;
          if (steered) x = x * 0.3f + direction[e] * along;
          k.host[k.at(batch, k0 + j, h) + e] = encode(c.type, x);
        }
        for (int e = 0; e < c.d_v; ++e) {
          float x = normal(random) + (e % 3 == 0 ? 0.5f : 0.0f);
          if (c.data == Data::huge_v) x *= 0x1p90f;
          if (c.data == Data::huger_v) x *= 0x1p106f;
          v.host[v.at(batch, k0 + j, h) + e] = encode(c.type, x);
        }
      }
  }
  upload(q), upload(k), upload(v);
  const size_t lse_count = size_t(varlen ? c.h_q * rows_q : int64_t(c.b) * c.h_q * c.s_q);
  float* lse;
  CHECK(cudaMalloc(&lse, (lse_count + 1) * 4));
  float* sinks = nullptr;
  if (c.sinks) {
    std::vector<float> host(c.h_q);
    for (int h = 0; h < c.h_q; ++h) host[h] = h % 3 == 2 ? -INFINITY : 3 * normal(random);
    CHECK(cudaMalloc(&sinks, c.h_q * 4));
    CHECK(cudaMemcpy(sinks, host.data(), c.h_q * 4, cudaMemcpyHostToDevice));
  }
  float* slopes = nullptr;
  if (c.alibi) {
    std::vector<float> host(c.h_q);
    for (int h = 0; h < c.h_q; ++h) host[h] = std::exp2(-8.0f * (h + 1) / c.h_q);
    CHECK(cudaMalloc(&slopes, c.h_q * 4));
    CHECK(cudaMemcpy(slopes, host.data(), c.h_q * 4, cudaMemcpyHostToDevice));
  }
  auto device_ints = [&](const std::vector<int>& x) {
    int* p;
    CHECK(cudaMalloc(&p, x.size() * 4));
    CHECK(cudaMemcpy(p, x.data(), x.size() * 4, cudaMemcpyHostToDevice));
    return p;
  };
  ForwardArguments a;
  a.operands = {q.data, k.data, v.data, o.data, lse, q.stride, k.stride, v.stride, o.stride};
  a.geometry.type = c.type;
  a.geometry.b = sequences, a.geometry.s_q = c.s_q, a.geometry.s_k = c.s_k;
  a.geometry.h_q = c.h_q, a.geometry.h_k = c.h_k, a.geometry.d_qk = c.d_qk, a.geometry.d_v = c.d_v;
  if (varlen) {
    a.geometry.total_q = rows_q, a.geometry.total_k = rows_k;
    a.geometry.cu_seqlens_q = device_ints(cu_q), a.geometry.cu_seqlens_k = device_ints(cu_k);
  }
  if (!c.used_k.empty()) a.geometry.k_lengths = device_ints(c.used_k);
  a.mask = {c.left, c.right, c.top_left};
  a.score.scale = c.zero_scale ? 0 : c.scale != 0 ? c.scale : 1 / std::sqrt(float(c.d_qk));
  a.score.sinks = sinks;
  a.score.alibi_slopes = slopes;
  a.score.softcap = c.softcap;
  a.disabled_fast_path = c.online;
  a.no_short_shapes = c.long_shape;
  a.row_choice = c.row_choice;
  a.splits = c.splits;
  const size_t workspace_bytes = forward_workspace_bytes(a);
  if (workspace_bytes) CHECK(cudaMalloc(&a.workspace, workspace_bytes));
  auto poison = [&] {
    CHECK(cudaMemset(lse, 0xFF, (lse_count + 1) * 4));
    if (workspace_bytes) CHECK(cudaMemset(a.workspace, 0xFF, workspace_bytes));
  };

  std::vector<uint16_t> first, second(o.host.size());
  std::vector<float> lse_first, lse_second(lse_count);
  for (int run = 0; run < 2; ++run) {
    upload(o);
    poison();
    const ForwardStatus status = launch_forward(a, nullptr);
    if (status.code != ForwardStatus::ok) {
      std::printf("FAIL %-44s refused: %s\n", c.name.c_str(), status.reason);
      return false;
    }
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(second.data(), o.data, second.size() * 2, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(lse_second.data(), lse, lse_count * 4, cudaMemcpyDeviceToHost));
    if (run == 0) first = second, lse_first = lse_second;
  }
  bool repeatable =
      first == second && !std::memcmp(lse_first.data(), lse_second.data(), lse_count * 4);
  // Everything outside the described rows keeps its poison.
  std::vector<uint8_t> owned(o.host.size());
  for (int n = 0; n < sequences; ++n)
    for (int h = 0; h < c.h_q; ++h)
      for (int i = 0; i < (varlen ? c.q_lengths[n] : c.s_q); ++i)
        for (int e = 0; e < c.d_v; ++e)
          owned[o.at(varlen ? 0 : n, (varlen ? cu_q[n] : 0) + i, h) + e] = 1;
  size_t trampled = 0;
  for (size_t e = 0; e < owned.size(); ++e) trampled += !owned[e] && second[e] != 0xFFFF;

  // What is in other rows of a tile is nothing to a row.
  const std::vector<uint16_t> q_host = q.host;
  auto each_row = [&](auto visit) {
    for (int n = 0; n < sequences; ++n)
      for (int h = 0; h < c.h_q; ++h)
        for (int i = 0; i < (varlen ? c.q_lengths[n] : c.s_q); ++i)
          visit(varlen ? 0 : n, h, (varlen ? cu_q[n] : 0) + i, (i + h) % 4);
  };
  each_row([&](int batch, int h, int i, int kind) {
    if (kind == 0) return;
    for (int e = 0; e < c.d_qk; ++e) {
      uint16_t& x = q.host[q.at(batch, i, h) + e];
      x = kind == 1 ? uint16_t(0x7FFF) : kind == 2 ? encode(c.type, e % 2 ? 6e4f : -5e4f) : x;
    }
    if (kind == 3) q.host[q.at(batch, i, h)] = encode(c.type, 300.0f);
  });
  upload(q), upload(o);
  poison();
  launch_forward(a, nullptr);
  CHECK(cudaMemcpy(second.data(), o.data, second.size() * 2, cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(lse_second.data(), lse, lse_count * 4, cudaMemcpyDeviceToHost));
  size_t influenced = 0;
  each_row([&](int batch, int h, int i, int kind) {
    if (kind != 0) return;
    const size_t at = size_t(o.at(batch, i, h));
    influenced += !std::equal(&first[at], &first[at] + c.d_v, &second[at]);
    const size_t lse_at =
        size_t(varlen ? h * rows_q + i : (int64_t(batch) * c.h_q + h) * c.s_q + i);
    influenced += std::memcmp(&lse_first[lse_at], &lse_second[lse_at], 4) != 0;
  });
  q.host = q_host;
  upload(q);
  CHECK(cudaMemcpy(o.data, first.data(), first.size() * 2, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(lse, lse_first.data(), lse_count * 4, cudaMemcpyHostToDevice));

  ReferenceArguments r{q.data,
                       k.data,
                       v.data,
                       o.data,
                       lse,
                       q.stride,
                       k.stride,
                       v.stride,
                       o.stride,
                       c.h_q,
                       c.h_k,
                       c.s_q,
                       c.s_k,
                       c.d_qk,
                       c.d_v,
                       int(rows_q),
                       a.geometry.cu_seqlens_q,
                       a.geometry.cu_seqlens_k,
                       a.geometry.k_lengths,
                       sinks,
                       slopes,
                       c.softcap,
                       c.left == kUnbounded ? 1ll << 50 : c.left,
                       c.right == kUnbounded ? 1ll << 50 : c.right,
                       c.top_left,
                       double(a.score.scale)};
  Outcome* outcome;
  CHECK(cudaMalloc(&outcome, sizeof(Outcome)));
  CHECK(cudaMemset(outcome, 0, sizeof(Outcome)));
  const size_t shared = size_t(c.s_k) * 12 + 64;
  auto kernel = c.type == ForwardType::bf16 ? reference<__nv_bfloat16> : reference<__half>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10));
  if (c.s_q > 0) kernel<<<dim3(c.s_q, c.h_q, sequences), 128, shared>>>(r, outcome);
  CHECK(cudaGetLastError());
  Outcome got;
  CHECK(cudaMemcpy(&got, outcome, sizeof got, cudaMemcpyDeviceToHost));
  const float eps = c.type == ForwardType::bf16 ? 0x1p-8f : 0x1p-11f;
  const float bound = 2 * value(got.plain) + 2 * eps * value(got.biggest);
  const float lse_bound =
      (16 + 8 * c.softcap) * 0x1p-23f;  // tanh by exp: an absolute error of cap eps
  const bool good = repeatable && !trampled && !influenced && !got.wrong_special &&
                    value(got.worst) <= bound && value(got.lse) <= lse_bound;
  std::printf("%s %-44s err %.2e bound %.2e (%.2f) lse %.1e/%.1e bias %.1e of %.1e%s%s%s%s",
              good ? "ok  " : "FAIL", c.name.c_str(), value(got.worst), bound,
              value(got.worst) / bound, value(got.lse), lse_bound, got.bias, got.absolute,
              repeatable ? "" : " NOT REPEATABLE", trampled ? " WROTE OUTSIDE" : "",
              influenced ? " INFLUENCED BY OTHER ROWS" : "",
              got.wrong_special ? " NAN/INF MISMATCH" : "");
  if (got.wrong_special)
    std::printf(" o %llu lse %llu", got.wrong_special & 0xffffffffu, got.wrong_special >> 32);
  if (!good) std::printf(" worst row %u", unsigned(got.worst));
  std::printf("\n");
  for (void* x : {q.data, k.data, v.data, o.data, (void*)lse, (void*)sinks, (void*)slopes,
                  (void*)a.geometry.cu_seqlens_q, (void*)a.geometry.cu_seqlens_k,
                  (void*)a.geometry.k_lengths, (void*)outcome, a.workspace})
    if (x) CHECK(cudaFree(x));
  return good;
}

#include "forward_cases.hpp"

int main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  const unsigned seed = std::getenv("SEED") ? std::atoi(std::getenv("SEED")) : 20261129;
  int shard = 0, shards = 1, matched = 0, ran = 0, failed = 0;
  if (argc > 2 && std::sscanf(argv[2], "%d/%d", &shard, &shards) != 2) return 2;
  for (const Case& c : all_cases()) {
    const bool anchored = !filter.empty() && filter[0] == '^';
    if (anchored ? c.name.rfind(filter.substr(1), 0) != 0
                 : c.name.find(filter) == std::string::npos)
      continue;
    if (matched++ % shards != shard) continue;
    ++ran;
    failed += !run_case(c, seed + matched);
    std::fflush(stdout);
  }
  std::printf("%d cases, %d failed (seed %u)\n", ran, failed, seed);
  return failed || !ran;
}
