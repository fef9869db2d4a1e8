#include "checks.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const char* running;
static bool failed;

static void fail(const char* file, int line, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  printf("FAIL %s: %s:%d ", running, file, line);
  vprintf(format, arguments);
  printf("\n");
  va_end(arguments);
  failed = true;
}

void expect(const char* file, int line, const char* text, bool condition) {
  if (!condition) fail(file, line, "%s", text);
}

void expect_ok(const char* file, int line, const char* call, abacist_status got) {
  if (got != ABACIST_OK) fail(file, line, "%s: %s", call, abacist_last_error());
}

void expect_error(const char* file, int line, const char* call, abacist_status got,
                  abacist_status code, const char* argument, const char* text) {
  if (got != code) {
    fail(file, line, "%s gave %s, must be %s", call, abacist_status_name(got),
         abacist_status_name(code));
    return;
  }
  if (strcmp(abacist_last_error_argument(), argument) != 0 ||
      strstr(abacist_last_error_message(), text) == NULL) {
    fail(file, line, "%s said \"%s\", must be of \"%s\" and contain \"%s\"", call,
         abacist_last_error(), argument, text);
  }
}

void fill(float* values, size_t count, unsigned seed) {
  uint32_t state = seed * 2654435761u + 12345u;
  for (size_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    values[i] = (float)(state >> 8) / 8388608.0f - 1.0f;
  }
}

double largest_difference(const float* a, const float* b, size_t count) {
  double most = 0.0;
  for (size_t i = 0; i < count; ++i) {
    const double difference = fabs((double)a[i] - (double)b[i]);
    if (!(difference <= most)) most = difference; /* NaN, too */
  }
  return most;
}

static abacist_tensor dense(void* data, int64_t s, int64_t h, int64_t d) {
  const int64_t shape[] = {B, s, h, d};
  return abacist_contiguous(data, ABACIST_F32, 4, shape);
}

void make_problem(problem* p) {
  memset(p, 0, sizeof *p);
  fill(p->q, sizeof p->q / sizeof *p->q, 1);
  fill(p->k, sizeof p->k / sizeof *p->k, 2);
  fill(p->v, sizeof p->v / sizeof *p->v, 3);
  fill(p->d_o, sizeof p->d_o / sizeof *p->d_o, 4);
  const int64_t lse_shape[] = {B, HQ, SQ};
  abacist_tensors* t = &p->forward;
  t->struct_size = sizeof *t;
  t->q = dense(p->q, SQ, HQ, DQ);
  t->k = dense(p->k, SK, HK, DQ);
  t->v = dense(p->v, SK, HK, DV);
  t->o = dense(p->o, SQ, HQ, DV);
  t->lse = abacist_contiguous(p->lse, ABACIST_F32, 3, lse_shape);
  p->backward = *t;
  t = &p->backward;
  t->d_o = dense(p->d_o, SQ, HQ, DV);
  t->dq = dense(p->dq, SQ, HQ, DQ);
  t->dk = dense(p->dk, SK, HK, DQ);
  t->dv = dense(p->dv, SK, HK, DV);
}

void plain_row(const problem* p, plain_rule rule, int b, int i, int h, double* o, double* lse) {
  const int head = h / (HQ / HK);
  const long at = i + (SK - SQ);
  const float* q = p->q + ((b * SQ + i) * HQ + h) * DQ;
  double sum = 0.0;
  memset(o, 0, DV * sizeof *o);
  for (int j = 0; j < SK; j += rule.step) {
    if ((rule.causal && j > at) || j < at - rule.left || j > at + rule.right) continue;
    const float* k = p->k + ((b * SK + j) * HK + head) * DQ;
    const float* v = p->v + ((b * SK + j) * HK + head) * DV;
    double score = 0.0;
    for (int c = 0; c < DQ; ++c) score += (double)q[c] * (double)k[c];
    score *= rule.scale;
    if (rule.softcap > 0.0) score = rule.softcap * tanh(score / rule.softcap);
    score -= rule.slope * fabs((double)(at - j));
    const double weight = exp(score);
    sum += weight;
    for (int c = 0; c < DV; ++c) o[c] += weight * (double)v[c];
  }
  if (rule.sinks != NULL) sum += exp((double)rule.sinks[h]);
  for (int c = 0; c < DV && sum > 0.0; ++c) o[c] /= sum;
  *lse = log(sum);
}

double error_of(const problem* p, plain_rule rule) {
  double most = 0.0;
  for (int row = 0; row < B * SQ * HQ; ++row) {
    const int b = row / (SQ * HQ), i = row / HQ % SQ, h = row % HQ;
    double o[DV], lse;
    plain_row(p, rule, b, i, h, o, &lse);
    const double got = (double)p->lse[(b * HQ + h) * SQ + i];
    double error = lse == got ? 0.0 : fabs(lse - got);
    for (int c = 0; c < DV; ++c) {
      const double of_o = fabs((double)p->o[row * DV + c] - o[c]);
      if (!(of_o <= error)) error = of_o;
    }
    if (!(error <= most)) most = error;
  }
  return most;
}

int main(void) {
  const check* tables[] = {kCallChecks, kCacheChecks, kErrorChecks, kSizeChecks};
  int failures = 0;
  for (size_t table = 0; table < sizeof tables / sizeof *tables; ++table) {
    for (const check* one = tables[table]; one->name != NULL; ++one) {
      running = one->name;
      failed = false;
      one->body();
      if (!failed) printf("ok %s\n", running);
      failures += failed;
    }
  }
  return failures != 0;
}
