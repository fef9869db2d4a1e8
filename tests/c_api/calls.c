/* Every function of abacist.h, used as it is meant to be. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checks.h"

static problem p;
static const plain_rule kPlain = {false, 0.35355339059327379, 0.0, 0.0, 1000, 1000, NULL, 1};

static float kSinks[HQ] = {0.5f, -1.0f, 2.0f, 0.0f};
static abacist_tensor sinks_tensor(void) {
  const int64_t shape[] = {HQ};
  return abacist_contiguous(kSinks, ABACIST_F32, 1, shape);
}

static void names_and_numbers(void) {
  char version[32];
  snprintf(version, sizeof version, "%d.%d.%d", ABACIST_VERSION_MAJOR, ABACIST_VERSION_MINOR,
           ABACIST_VERSION_PATCH);
  EXPECT(strcmp(abacist_version(), version) == 0);
  const char* const targets = abacist_cpu_targets(); /* NEON is what every aarch64 has */
  EXPECT(strstr(targets, "portable") != NULL || strstr(targets, "neon") != NULL);
  EXPECT(strcmp(abacist_dtype_name(ABACIST_BF16), "bf16") == 0);
  EXPECT(strcmp(abacist_dtype_name(99), "unknown") == 0);
  EXPECT(strcmp(abacist_dtype_name(-1), "unknown") == 0);
  EXPECT(abacist_dtype_size(ABACIST_U8) == 1 && abacist_dtype_size(ABACIST_F16) == 2 &&
         abacist_dtype_size(ABACIST_F64) == 8);
  EXPECT(abacist_dtype_size(ABACIST_F32) == 4 && abacist_dtype_size(77) == 0);
  EXPECT(strcmp(abacist_backend_name(ABACIST_BACKEND_REFERENCE), "reference") == 0);
  EXPECT(strcmp(abacist_backend_name(99), "unknown") == 0);
  EXPECT(strcmp(abacist_status_name(ABACIST_OK), "ok") == 0);
  EXPECT(strcmp(abacist_status_name(ABACIST_INVALID_ARGUMENT), "invalid argument") == 0);
  EXPECT(strcmp(abacist_status_name(ABACIST_INTERNAL_ERROR), "internal error") == 0);
  EXPECT(strcmp(abacist_status_name(77), "unknown") == 0);
  EXPECT(abacist_has_backend(ABACIST_BACKEND_CPU) == 1);
  EXPECT(abacist_has_backend(ABACIST_BACKEND_REFERENCE) == 1);
  EXPECT(abacist_has_backend(99) == 0 && abacist_has_backend(ABACIST_BACKEND_AUTOMATIC) == 0);
}

static void contiguous_tensors(void) {
  const int64_t shape[] = {2, 3, 5, 7};
  float one;
  const abacist_tensor t = abacist_contiguous(&one, ABACIST_BF16, 4, shape);
  EXPECT(t.data == &one && t.dtype == ABACIST_BF16 && t.rank == 4);
  EXPECT(t.device_type == ABACIST_CPU && t.device_index == 0);
  EXPECT(t.stride[0] == 105 && t.stride[1] == 35 && t.stride[2] == 7 && t.stride[3] == 1);
  EXPECT(memcmp(t.shape, shape, sizeof shape) == 0);
  EXPECT(abacist_contiguous(NULL, ABACIST_F32, 0, NULL).rank == 0);
}

static void forward_in_one_line(void) {
  make_problem(&p);
  EXPECT_OK(abacist_forward(&p.forward, NULL, NULL, NULL));
  EXPECT(error_of(&p, kPlain) < 1e-6);
}

static void options_mean_what_they_say(void) {
  make_problem(&p);
  float slopes[HQ] = {0.5f, 0.5f, 0.5f, 0.5f};
  const int64_t heads[] = {HQ};
  abacist_options options = {.struct_size = sizeof options, .causal = 1};
  plain_rule rule = kPlain;
  rule.causal = true;
  EXPECT_OK(abacist_forward(&p.forward, &options, NULL, NULL));
  EXPECT(error_of(&p, rule) < 1e-6);

  options = (abacist_options){.struct_size = sizeof options,
                              .has_window = 1,
                              .window_left = 2,
                              .window_right = ABACIST_UNBOUNDED,
                              .has_scale = 1,
                              .scale = -1.5,
                              .softcap = 2.0};
  rule = (plain_rule){false, -1.5, 2.0, 0.5, 2, 1000, NULL, 1};
  p.forward.alibi_slopes = abacist_contiguous(slopes, ABACIST_F32, 1, heads);
  EXPECT_OK(abacist_forward(&p.forward, &options, NULL, NULL));
  EXPECT(error_of(&p, rule) < 1e-6);

  options = (abacist_options){
      .struct_size = sizeof options, .has_window = 1, .has_scale = 1, .align = ABACIST_TOP_LEFT};
  p.forward.alibi_slopes = (abacist_tensor){0};
  EXPECT_OK(abacist_forward(&p.forward, &options, NULL, NULL));
  for (int row = 0; row < B * SQ * HQ; ++row) { /* query i sees key i alone: O is its V */
    const int b = row / (SQ * HQ), i = row / HQ % SQ, h = row % HQ;
    const float* v = p.v + ((b * SK + i) * HK + h / (HQ / HK)) * DV;
    EXPECT(memcmp(p.o + row * DV, v, DV * sizeof *v) == 0);
    EXPECT(p.lse[(b * HQ + h) * SQ + i] == 0.0f); /* scale 0 */
  }
}

static void backends_agree(void) {
  make_problem(&p);
  float o[B * SQ * HQ * DV], dq[B * SQ * HQ * DQ], dk[B * SK * HK * DQ], dv[B * SK * HK * DV];
  abacist_options options = {.struct_size = sizeof options, .causal = 1, .softcap = 5.0};
  abacist_plan_options which = {.struct_size = sizeof which, .backend = ABACIST_BACKEND_REFERENCE};
  EXPECT_OK(abacist_forward(&p.forward, &options, &which, NULL));
  EXPECT_OK(abacist_backward(&p.backward, &options, &which, NULL));
  memcpy(o, p.o, sizeof o);
  memcpy(dq, p.dq, sizeof dq);
  memcpy(dk, p.dk, sizeof dk);
  memcpy(dv, p.dv, sizeof dv);
  memset(p.dq, 0, sizeof p.dq);
  memset(p.dk, 0, sizeof p.dk);
  memset(p.dv, 0, sizeof p.dv);
  which.backend = ABACIST_BACKEND_CPU;
  which.threads = 2;
  EXPECT_OK(abacist_forward(&p.forward, &options, &which, NULL));
  EXPECT_OK(abacist_backward(&p.backward, &options, &which, NULL));
  EXPECT(largest_difference(o, p.o, sizeof o / sizeof *o) < 1e-6);
  EXPECT(largest_difference(dq, p.dq, sizeof dq / sizeof *dq) < 1e-5);
  EXPECT(largest_difference(dk, p.dk, sizeof dk / sizeof *dk) < 1e-5);
  EXPECT(largest_difference(dv, p.dv, sizeof dv / sizeof *dv) < 1e-5);
  EXPECT(dq[0] != 0.0f && dk[0] != 0.0f && dv[0] != 0.0f);
}

/* loss = sum d_o o + sum d_lse lse, by whose gradient dq is checked. */
static double loss(const float* d_lse) {
  EXPECT_OK(abacist_forward(&p.forward, NULL, NULL, NULL));
  double sum = 0.0;
  for (int i = 0; i < B * SQ * HQ * DV; ++i) sum += (double)p.d_o[i] * (double)p.o[i];
  for (int i = 0; i < B * HQ * SQ; ++i) sum += (double)d_lse[i] * (double)p.lse[i];
  return sum;
}

static void gradients_are_those_of_the_loss(void) {
  make_problem(&p);
  float d_lse[B * HQ * SQ];
  fill(d_lse, B * HQ * SQ, 5);
  p.backward.d_lse = p.backward.lse;
  p.backward.d_lse.data = d_lse;
  loss(d_lse);
  EXPECT_OK(abacist_backward(&p.backward, NULL, NULL, NULL));
  float* const inputs[] = {p.q, p.k, p.v};
  const float* const gradients[] = {p.dq, p.dk, p.dv};
  for (int which = 0; which < 3; ++which) {
    for (int at = 3; at < 160; at += 50) {
      float* x = inputs[which] + at;
      const float before = *x, step = 1.0f / 64;
      *x = before + step;
      const double above = loss(d_lse);
      *x = before - step;
      const double below = loss(d_lse);
      *x = before;
      const double slope = (above - below) / (2.0 * (double)step);
      EXPECT(fabs(slope - (double)gradients[which][at]) < 1e-3);
    }
  }
}

static void plans_run_twice(void) {
  make_problem(&p);
  abacist_plan* plan = NULL;
  EXPECT_OK(abacist_plan_create(ABACIST_FORWARD, &p.forward, NULL, NULL, &plan));
  abacist_plan_info info = {.struct_size = sizeof info};
  EXPECT_OK(abacist_plan_get_info(plan, &info));
  EXPECT(info.struct_size == sizeof info && strncmp(info.kernel, "cpu.forward.", 12) == 0);
  EXPECT(info.visible_pairs == B * HQ * SQ * SK && info.visible_pairs_exact == 1);
  EXPECT(info.flops == 2 * (DQ + DV) * info.visible_pairs && info.flops_exact == 1);
  EXPECT(info.operand_bytes ==
         (int64_t)(sizeof p.q + sizeof p.k + sizeof p.v + sizeof p.o + sizeof p.lse));
  EXPECT(info.operand_bytes_exact == 1 && info.grid == 0);
  EXPECT(info.rows > 0 && info.keys > 0 && info.splits == 1 && info.threads > 0);
  EXPECT(info.work_items > 0 && info.deterministic == 1 && info.declined == 0);
  EXPECT(info.slow_memory_bytes > 0 && info.standard_memory_bytes > info.slow_memory_bytes);
  EXPECT(info.workspace_bytes >= (size_t)info.threads * info.scratch_bytes_per_thread);
  const size_t bytes = (info.workspace_bytes + 255) / 256 * 256;
  abacist_run_options run = {.struct_size = sizeof run,
                             .workspace = aligned_alloc(ABACIST_WORKSPACE_ALIGNMENT, bytes),
                             .workspace_bytes = bytes};
  EXPECT(run.workspace != NULL);
  EXPECT_OK(abacist_plan_run(plan, &p.forward, &run));
  EXPECT(error_of(&p, kPlain) < 1e-6);
  memset(p.o, 0xff, sizeof p.o);
  memset(p.lse, 0xff, sizeof p.lse);
  abacist_pointers pointers = {
      .struct_size = sizeof pointers, .q = p.q, .k = p.k, .v = p.v, .o = p.o, .lse = p.lse};
  EXPECT_OK(abacist_plan_run_pointers(plan, &pointers, &run));
  EXPECT(error_of(&p, kPlain) < 1e-6);
  free(run.workspace);
  abacist_plan_destroy(plan);
  abacist_plan_destroy(NULL);
}

static void plans_say_what_they_are_for(void) {
  make_problem(&p);
  abacist_plan* plan = NULL;
  abacist_options options = {
      .struct_size = sizeof options, .causal = 1, .has_scale = 1, .has_window = 1};
  options.window_left = 3;
  abacist_plan_options which = {.struct_size = sizeof which, .backend = ABACIST_BACKEND_REFERENCE};
  EXPECT_OK(abacist_plan_create(ABACIST_BACKWARD, &p.backward, &options, &which, &plan));
  int32_t pass = -1;
  abacist_tensors tensors = {.struct_size = sizeof tensors};
  abacist_options back = {.struct_size = sizeof back};
  EXPECT_OK(abacist_plan_get_problem(plan, &pass, &tensors, &back));
  EXPECT(pass == ABACIST_BACKWARD && memcmp(&back, &options, sizeof back) == 0);
  EXPECT(tensors.dk.rank == 4 && tensors.dk.data == NULL && tensors.d_lse.rank == 0);
  tensors.dk.data = p.dk;
  EXPECT(memcmp(&tensors.dk, &p.backward.dk, sizeof tensors.dk) == 0);
  EXPECT_OK(abacist_plan_get_problem(plan, NULL, NULL, NULL));
  abacist_plan_destroy(plan);
}

static void plans_explain_themselves(void) {
  make_problem(&p);
  abacist_plan* plan = NULL;
  EXPECT_OK(abacist_plan_create(ABACIST_FORWARD, &p.forward, NULL, NULL, &plan));
  size_t length = 0;
  char text[4096], start[9] = "........";
  EXPECT_OK(abacist_plan_explain(plan, NULL, 0, &length));
  EXPECT(length > 100 && length < sizeof text);
  EXPECT_OK(abacist_plan_explain(plan, text, sizeof text, NULL));
  EXPECT(strlen(text) == length && strstr(text, "cpu.forward.") != NULL);
  EXPECT(text[length - 1] != '\n');
  EXPECT_OK(abacist_plan_explain(plan, start, sizeof start, &length));
  EXPECT(strlen(start) == 8 && strncmp(start, text, 8) == 0 && length == strlen(text));
  abacist_plan_destroy(plan);
}

/* No problem of the CPU passes one implementation over and is served by a later one. */
static void plans_say_who_declined(void) {
  make_problem(&p);
  abacist_plan* plan = NULL;
  EXPECT_OK(abacist_plan_create(ABACIST_FORWARD, &p.forward, NULL, NULL, &plan));
  EXPECT(abacist_plan_declined(plan, 0) == NULL && abacist_plan_declined(plan, 1000) == NULL);
  EXPECT(abacist_plan_declined(NULL, 0) == NULL);
  abacist_plan_destroy(plan);
}

static void parts_merge_to_the_whole(void) {
  make_problem(&p);
  enum { kCount = B * SQ * HQ * DV, kFirst = 3 };
  float o[2][kCount], lse[2][B * HQ * SQ];
  abacist_partial parts[2];
  for (int part = 0; part < 2; ++part) {
    abacist_tensors t = p.forward;
    const int64_t first = part == 0 ? 0 : kFirst;
    t.k.data = p.k + first * HK * DQ;
    t.v.data = p.v + first * HK * DV;
    t.k.shape[1] = t.v.shape[1] = part == 0 ? kFirst : SK - kFirst;
    t.o.data = o[part];
    t.lse.data = lse[part];
    EXPECT_OK(abacist_forward(&t, NULL, NULL, NULL));
    parts[part] = (abacist_partial){t.o, t.lse};
  }
  abacist_tensors into = {.struct_size = sizeof into, .o = p.forward.o, .lse = p.forward.lse};
  EXPECT_OK(abacist_merge(parts, 2, &into));
  EXPECT(error_of(&p, kPlain) < 1e-6);
  memset(p.o, 0, sizeof p.o);
  into.lse = (abacist_tensor){0};
  EXPECT_OK(abacist_merge(parts, 2, &into));
  EXPECT(error_of(&p, kPlain) < 1e-6);
  into.lse = p.forward.lse;
  EXPECT_OK(abacist_merge(NULL, 0, &into)); /* nothing seen */
  EXPECT(p.o[0] == 0.0f && p.lse[0] == -HUGE_VALF);
  into.sinks = sinks_tensor();
  EXPECT_OK(abacist_merge(parts, 2, &into));
  plain_rule rule = kPlain;
  rule.sinks = kSinks;
  EXPECT(error_of(&p, rule) < 1e-6);
}

static void sinks_and_their_gradient(void) {
  make_problem(&p);
  plain_rule rule = kPlain;
  rule.sinks = kSinks;
  p.forward.sinks = p.backward.sinks = sinks_tensor();
  EXPECT_OK(abacist_forward(&p.forward, NULL, NULL, NULL));
  EXPECT(error_of(&p, rule) < 1e-6);
  float d_sinks[HQ] = {0}, want[HQ] = {0};
  p.backward.d_sinks = sinks_tensor();
  p.backward.d_sinks.data = d_sinks;
  EXPECT_OK(abacist_backward(&p.backward, NULL, NULL, NULL));
  for (int row = 0; row < B * SQ * HQ; ++row) { /* -sum exp(sink - lse) rowsum(d_o o) */
    const int b = row / (SQ * HQ), i = row / HQ % SQ, h = row % HQ;
    float d = 0.0f;
    for (int c = 0; c < DV; ++c) d += p.d_o[row * DV + c] * p.o[row * DV + c];
    want[h] -= expf(kSinks[h] - p.lse[(b * HQ + h) * SQ + i]) * d;
  }
  EXPECT(largest_difference(d_sinks, want, HQ) < 1e-5);
}

static void bias_and_visible(void) {
  make_problem(&p);
  const double slope =
      0.25; /* a bias that is ALiBi's, by its gradient of a head; odd keys hidden */
  float bias[SQ * SK], d_bias[SQ * SK];
  uint8_t visible[SK];
  for (int i = 0; i < SQ; ++i) {
    for (int j = 0; j < SK; ++j) bias[i * SK + j] = (float)(-slope * abs(i + (SK - SQ) - j));
  }
  for (int j = 0; j < SK; ++j) visible[j] = j % 2 == 0;
  const int64_t of_bias[] = {1, 1, SQ, SK}, of_visible[] = {1, 1, 1, SK};
  p.forward.bias = abacist_contiguous(bias, ABACIST_F32, 4, of_bias);
  plain_rule rule = kPlain;
  rule.slope = slope;
  EXPECT_OK(abacist_forward(&p.forward, NULL, NULL, NULL));
  EXPECT(error_of(&p, rule) < 1e-6);
  p.backward.bias = p.backward.d_bias = p.forward.bias;
  p.backward.d_bias.data = d_bias;
  EXPECT_OK(abacist_backward(&p.backward, NULL, NULL, NULL));
  for (int i = 0; i < SQ; ++i) { /* dS of a row sums to 0 */
    double sum = 0.0, size = 0.0;
    for (int j = 0; j < SK; ++j)
      sum += (double)d_bias[i * SK + j], size += fabs((double)d_bias[i * SK + j]);
    EXPECT(fabs(sum) < 1e-5 && size > 1e-3);
  }
  p.forward.visible = abacist_contiguous(visible, ABACIST_U8, 4, of_visible);
  EXPECT_OK(abacist_forward(&p.forward, NULL, NULL, NULL));
  rule.step = 2;
  EXPECT(error_of(&p, rule) < 1e-6);
}

/* h_q = 0 with h_k = 2: dK and dV are 0, whatever the biases. */
static void gradients_without_query_heads(void) {
  make_problem(&p);
  abacist_tensors t = p.backward;
  float bias[1];
  abacist_tensor* const per_query_head[] = {&t.q, &t.o, &t.d_o, &t.dq};
  for (int i = 0; i < 4; ++i) per_query_head[i]->shape[2] = 0;
  t.lse.shape[1] = 0;
  const int64_t of_bias[] = {1, 0, SQ, SK};
  t.bias = t.d_bias = abacist_contiguous(bias, ABACIST_F32, 4, of_bias);
  fill(p.dk, sizeof p.dk / sizeof *p.dk, 9);
  EXPECT_OK(abacist_backward(&t, NULL, NULL, NULL));
  for (size_t i = 0; i < sizeof p.dk / sizeof *p.dk; ++i) EXPECT(p.dk[i] == 0.0f);
}

static void dropout_follows_the_seed(void) {
  make_problem(&p);
  float o[B * SQ * HQ * DV], lse[B * HQ * SQ];
  EXPECT_OK(abacist_forward(&p.forward, NULL, NULL, NULL));
  memcpy(lse, p.lse, sizeof lse);
  abacist_options options = {.struct_size = sizeof options, .dropout_p = 0.5, .dropout_seed = 7};
  EXPECT_OK(abacist_forward(&p.forward, &options, NULL, NULL));
  memcpy(o, p.o, sizeof o);
  EXPECT(error_of(&p, kPlain) > 0.1 && memcmp(lse, p.lse, sizeof lse) == 0);
  EXPECT_OK(abacist_forward(&p.forward, &options, NULL, NULL));
  EXPECT(memcmp(o, p.o, sizeof o) == 0);
  options.dropout_seed = 7 + (UINT64_C(1) << 63);
  EXPECT_OK(abacist_forward(&p.forward, &options, NULL, NULL));
  EXPECT(memcmp(o, p.o, sizeof o) != 0);
  options.dropout_p = 1.0;
  EXPECT_OK(abacist_forward(&p.forward, &options, NULL, NULL));
  for (int i = 0; i < B * SQ * HQ * DV; ++i) EXPECT(p.o[i] == 0.0f);
}

static void key_lengths_cut_the_keys(void) {
  make_problem(&p);
  int32_t lengths[B] = {SK, 4};
  const int64_t of_lengths[] = {B};
  p.forward.key_lengths = abacist_contiguous(lengths, ABACIST_I32, 1, of_lengths);
  for (int i = 4 * HK * DQ; i < SK * HK * DQ; ++i) p.k[SK * HK * DQ + i] = NAN;
  EXPECT_OK(abacist_forward(&p.forward, NULL, NULL, NULL));
  float o[B * SQ * HQ * DV];
  memcpy(o, p.o, sizeof o);
  abacist_tensors second = p.forward; /* sequence 1 alone, dense */
  second.key_lengths = (abacist_tensor){0};
  abacist_tensor* const all[] = {&second.q, &second.k, &second.v, &second.o, &second.lse};
  for (int i = 0; i < 5; ++i) {
    all[i]->data = (float*)all[i]->data + all[i]->stride[0];
    all[i]->shape[0] = 1;
  }
  second.k.shape[1] = second.v.shape[1] = 4;
  EXPECT_OK(abacist_forward(&second, NULL, NULL, NULL));
  EXPECT(largest_difference(o, p.o, sizeof o / sizeof *o) < 1e-6);
  lengths[1] = SK + 1;
  EXPECT_ERROR(abacist_forward(&p.forward, NULL, NULL, NULL), ABACIST_INVALID_ARGUMENT,
               "key_lengths", "[1] is 8");
}

static void varlen_is_dense_when_lengths_are_equal(void) {
  make_problem(&p);
  int32_t cu_q[B + 1] = {0, SQ, 2 * SQ}, cu_k[B + 1] = {0, SK, 2 * SK};
  float lse[HQ * B * SQ], o[B * SQ * HQ * DV];
  const int64_t q[] = {B * SQ, HQ, DQ}, k[] = {B * SK, HK, DQ}, v[] = {B * SK, HK, DV};
  const int64_t of_o[] = {B * SQ, HQ, DV}, of_lse[] = {HQ, B * SQ}, of_cu[] = {B + 1};
  abacist_tensors t = {.struct_size = sizeof t};
  t.q = abacist_contiguous(p.q, ABACIST_F32, 3, q);
  t.k = abacist_contiguous(p.k, ABACIST_F32, 3, k);
  t.v = abacist_contiguous(p.v, ABACIST_F32, 3, v);
  t.o = abacist_contiguous(o, ABACIST_F32, 3, of_o);
  t.lse = abacist_contiguous(lse, ABACIST_F32, 2, of_lse);
  t.cu_seqlens_q = abacist_contiguous(cu_q, ABACIST_I32, 1, of_cu);
  t.cu_seqlens_k = abacist_contiguous(cu_k, ABACIST_I32, 1, of_cu);
  abacist_options options = {
      .struct_size = sizeof options, .causal = 1, .max_s_q = SQ, .max_s_k = SK};
  EXPECT_OK(abacist_forward(&t, &options, NULL, NULL));
  EXPECT_OK(abacist_forward(&p.forward, &options, NULL, NULL));
  EXPECT(largest_difference(o, p.o, B * SQ * HQ * DV) < 1e-6);
  EXPECT(fabsf(lse[1 * B * SQ + SQ + 2] - p.lse[(1 * HQ + 1) * SQ + 2]) < 1e-6f);
}

static void note_progress(double done, void* context) {
  double* const most = context;
  if (done > *most) *most = done;
}

static void progress_reaches_the_end(void) {
  make_problem(&p);
  double most = 0.0;
  abacist_plan_options one = {.struct_size = sizeof one, .threads = 1};
  abacist_run_options run = {
      .struct_size = sizeof run, .progress = note_progress, .progress_context = &most};
  EXPECT_OK(abacist_forward(&p.forward, NULL, &one, &run));
  EXPECT(most == 1.0);
}

static const char kFine = 0;

/* Returns &kFine, or null. */
static void* run_alone(void* context) {
  problem* const mine = context;
  for (int round = 0; round < 20; ++round) {
    if (abacist_forward(&mine->forward, NULL, NULL, NULL) != ABACIST_OK) return NULL;
    /* An error of this thread is none of the other's. */
    if (abacist_forward(NULL, NULL, NULL, NULL) != ABACIST_INVALID_ARGUMENT) return NULL;
  }
  return error_of(mine, kPlain) < 1e-6 ? (void*)&kFine : NULL;
}

/* pthread, since ThreadSanitizer does not know C11's threads. */
static void threads_do_not_meet(void) {
  static problem theirs[2];
  pthread_t threads[2];
  abacist_validate(77, NULL, NULL);
  for (int i = 0; i < 2; ++i) {
    make_problem(&theirs[i]);
    EXPECT(pthread_create(&threads[i], NULL, run_alone, &theirs[i]) == 0);
  }
  for (int i = 0; i < 2; ++i) {
    void* result = NULL;
    EXPECT(pthread_join(threads[i], &result) == 0 && result == &kFine);
  }
  EXPECT(strcmp(abacist_last_error_argument(), "pass") == 0);
}

const check kCallChecks[] = {
    {"names and numbers", names_and_numbers},
    {"contiguous tensors", contiguous_tensors},
    {"forward in one line", forward_in_one_line},
    {"options mean what they say", options_mean_what_they_say},
    {"backends agree", backends_agree},
    {"gradients are those of the loss", gradients_are_those_of_the_loss},
    {"plans run twice", plans_run_twice},
    {"plans say what they are for", plans_say_what_they_are_for},
    {"plans explain themselves", plans_explain_themselves},
    {"plans say who declined", plans_say_who_declined},
    {"parts merge to the whole", parts_merge_to_the_whole},
    {"sinks and their gradient", sinks_and_their_gradient},
    {"bias and visible", bias_and_visible},
    {"gradients without query heads", gradients_without_query_heads},
    {"dropout follows the seed", dropout_follows_the_seed},
    {"key lengths cut the keys", key_lengths_cut_the_keys},
    {"varlen is dense when lengths are equal", varlen_is_dense_when_lengths_are_equal},
    {"progress reaches the end", progress_reaches_the_end},
    {"threads do not meet", threads_do_not_meet},
    {NULL, NULL}};
