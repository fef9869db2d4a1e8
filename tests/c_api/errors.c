/* What callers get wrong: each error names the argument, and nothing is written after one. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include <stdlib.h>
#include <string.h>

#include "checks.h"

static problem p;
static const abacist_status kInvalid = ABACIST_INVALID_ARGUMENT;

static abacist_status forward(void) { return abacist_forward(&p.forward, NULL, NULL, NULL); }
static abacist_status with(const abacist_options* options) {
  return abacist_validate(ABACIST_FORWARD, &p.forward, options);
}

static void null_arguments(void) {
  make_problem(&p);
  abacist_plan* plan = NULL;
  abacist_plan_info info = {.struct_size = sizeof info};
  abacist_tensors into = {.struct_size = sizeof into, .o = p.forward.o};
  EXPECT_ERROR(abacist_forward(NULL, NULL, NULL, NULL), kInvalid, "tensors", "is null");
  EXPECT_ERROR(abacist_backward(NULL, NULL, NULL, NULL), kInvalid, "tensors", "is null");
  EXPECT_ERROR(abacist_validate(ABACIST_FORWARD, NULL, NULL), kInvalid, "tensors", "is null");
  EXPECT_ERROR(abacist_plan_create(ABACIST_FORWARD, &p.forward, NULL, NULL, NULL), kInvalid, "plan",
               "is null");
  EXPECT_ERROR(abacist_plan_run(NULL, &p.forward, NULL), kInvalid, "plan", "is null");
  EXPECT_ERROR(abacist_plan_run_pointers(NULL, NULL, NULL), kInvalid, "plan", "is null");
  EXPECT_ERROR(abacist_plan_get_info(NULL, &info), kInvalid, "plan", "is null");
  EXPECT_ERROR(abacist_plan_get_problem(NULL, NULL, NULL, NULL), kInvalid, "plan", "is null");
  EXPECT_ERROR(abacist_plan_explain(NULL, NULL, 0, NULL), kInvalid, "plan", "is null");
  EXPECT_ERROR(abacist_plan_device_status(NULL, NULL), kInvalid, "plan", "is null");
  EXPECT_ERROR(abacist_merge(NULL, 1, &into), kInvalid, "parts", "is null");
  EXPECT_ERROR(abacist_merge(NULL, 0, NULL), kInvalid, "into", "is null");
  EXPECT_OK(abacist_plan_create(ABACIST_FORWARD, &p.forward, NULL, NULL, &plan));
  EXPECT_ERROR(abacist_plan_get_info(plan, NULL), kInvalid, "plan_info", "is null");
  EXPECT_ERROR(abacist_plan_explain(plan, NULL, 5, NULL), kInvalid, "text", "is null");
  EXPECT_ERROR(abacist_plan_run(plan, NULL, NULL), kInvalid, "tensors", "is null");
  EXPECT_ERROR(abacist_plan_run_pointers(plan, NULL, NULL), kInvalid, "pointers", "is null");
  abacist_plan_destroy(plan);
}

static void the_error_reads_well(void) {
  make_problem(&p);
  p.forward.k.shape[2] = p.forward.v.shape[2] = 3;
  EXPECT(forward() == kInvalid);
  EXPECT(strcmp(abacist_last_error(), "invalid argument: k: h_k is 3, must divide h_q = 4") == 0);
  EXPECT(strcmp(abacist_last_error_argument(), "k") == 0);
  EXPECT(strcmp(abacist_last_error_message(), "h_k is 3, must divide h_q = 4") == 0);
  make_problem(&p);
  EXPECT_OK(forward());
  EXPECT(strcmp(abacist_last_error_argument(), "k") == 0); /* stays */
}

static void bad_tensors(void) {
  make_problem(&p);
  p.forward.q.dtype = 99;
  EXPECT_ERROR(forward(), kInvalid, "q", "dtype is 99");
  p.forward.q.dtype = 256; /* would be f32 in a byte */
  EXPECT_ERROR(forward(), kInvalid, "q", "dtype is 256");
  p.forward.q.dtype = -1;
  EXPECT_ERROR(forward(), kInvalid, "q", "dtype is -1");
  make_problem(&p);
  p.forward.v.rank = 5;
  EXPECT_ERROR(forward(), kInvalid, "v", "rank is 5");
  p.forward.v.rank = INT32_MIN;
  EXPECT_ERROR(forward(), kInvalid, "v", "rank is -2147483648");
  p.forward.v.rank = 0;
  EXPECT_ERROR(forward(), kInvalid, "v", "has data, but rank 0");
  p.forward.v.data = NULL;
  EXPECT_ERROR(forward(), kInvalid, "v", "is absent");
  make_problem(&p);
  p.forward.k.device_type = 2;
  EXPECT_ERROR(forward(), kInvalid, "k", "device_type is 2");
  make_problem(&p);
  p.forward.o.data = NULL;
  EXPECT_ERROR(forward(), kInvalid, "o", "data is null");
  p.forward.o.data = p.q;
  EXPECT_ERROR(forward(), kInvalid, "o", "overlaps q");
  make_problem(&p);
  p.forward.lse.stride[1] = 0;
  EXPECT_ERROR(forward(), kInvalid, "lse", "write an element twice");
  make_problem(&p);
  p.forward.k.shape[1] = INT64_MAX;
  EXPECT_ERROR(forward(), kInvalid, "k", "extent outside");
  make_problem(&p);
  p.forward.d_o = p.backward.d_o;
  EXPECT_ERROR(forward(), kInvalid, "d_o", "the forward pass has no such operand");
  make_problem(&p);
  p.backward.lse = (abacist_tensor){0};
  EXPECT_ERROR(abacist_backward(&p.backward, NULL, NULL, NULL), kInvalid, "lse", "is absent");
  const int64_t huge[] = {INT64_MAX, INT64_MAX};
  abacist_partial part = {abacist_contiguous(p.o, ABACIST_F32, 2, huge), {0}};
  abacist_tensors into = {.struct_size = sizeof into, .o = p.forward.o};
  EXPECT_ERROR(abacist_merge(&part, 1, &into), kInvalid, "parts[0].o", "extent");
  part.o.dtype = 77;
  EXPECT_ERROR(abacist_merge(&part, 1, &into), kInvalid, "parts[0].o", "dtype is 77");
  EXPECT_ERROR(abacist_merge(NULL, 0, &p.backward), kInvalid, "q", "merging has no such operand");
  EXPECT(abacist_contiguous(p.o, ABACIST_F32, 5, huge).rank == -1);
  EXPECT(abacist_contiguous(p.o, ABACIST_F32, -3, huge).rank == -1);
  EXPECT(abacist_contiguous(p.o, ABACIST_F32, 2, NULL).rank == -1);
}

static void bad_options(void) {
  make_problem(&p);
  abacist_options o = {.struct_size = sizeof o, .causal = 2};
  EXPECT_ERROR(with(&o), kInvalid, "causal", "is 2, must be 0 or 1");
  o = (abacist_options){.struct_size = sizeof o, .align = 2};
  EXPECT_ERROR(with(&o), kInvalid, "align", "is 2");
  o = (abacist_options){.struct_size = sizeof o, .has_window = -1};
  EXPECT_ERROR(with(&o), kInvalid, "has_window", "is -1");
  o = (abacist_options){.struct_size = sizeof o, .window_right = 4};
  EXPECT_ERROR(with(&o), kInvalid, "has_window", "is 0, but");
  o = (abacist_options){.struct_size = sizeof o, .has_window = 1, .window_left = -1};
  EXPECT_ERROR(with(&o), kInvalid, "window_left", "is -1");
  o = (abacist_options){.struct_size = sizeof o, .scale = 0.5};
  EXPECT_ERROR(with(&o), kInvalid, "has_scale", "scale is 0.5");
  o = (abacist_options){.struct_size = sizeof o, .has_scale = 1, .scale = 1e300};
  EXPECT_ERROR(with(&o), kInvalid, "scale", "is 1e+300");
  o = (abacist_options){.struct_size = sizeof o, .softcap = -1.0};
  EXPECT_ERROR(with(&o), kInvalid, "softcap", "is -1");
  o = (abacist_options){.struct_size = sizeof o, .dropout_p = 1.5};
  EXPECT_ERROR(with(&o), kInvalid, "dropout_p", "is 1.5");
  o = (abacist_options){.struct_size = sizeof o, .has_scale = 3};
  EXPECT_ERROR(with(&o), kInvalid, "has_scale", "is 3");
  abacist_plan_options which = {.struct_size = sizeof which, .backend = 9};
  EXPECT_ERROR(abacist_forward(&p.forward, NULL, &which, NULL), kInvalid, "backend", "is 9");
  which = (abacist_plan_options){.struct_size = sizeof which, .threads = -1};
  EXPECT_ERROR(abacist_forward(&p.forward, NULL, &which, NULL), kInvalid, "threads", "is -1");
  EXPECT_ERROR(abacist_validate(2, &p.forward, NULL), kInvalid, "pass", "is 2");
  abacist_run_options run = {.struct_size = sizeof run, .workspace_bytes = 4096};
  EXPECT_ERROR(abacist_forward(&p.forward, NULL, NULL, &run), kInvalid, "workspace", "is null");
}

static void unsupported_combinations(void) {
  make_problem(&p);
  abacist_plan_options cpu = {.struct_size = sizeof cpu, .backend = ABACIST_BACKEND_CPU};
  abacist_plan* plan = (abacist_plan*)&p;
  p.forward.q.dtype = ABACIST_F64;
  EXPECT_ERROR(abacist_plan_create(ABACIST_FORWARD, &p.forward, NULL, &cpu, &plan),
               ABACIST_UNSUPPORTED, "", "cpu: q, k, v are f64, f32, f32");
  EXPECT(plan == NULL);
  if (abacist_has_backend(ABACIST_BACKEND_CUDA)) return;
  abacist_plan_options cuda = {.struct_size = sizeof cuda, .backend = ABACIST_BACKEND_CUDA};
  make_problem(&p);
  EXPECT_ERROR(abacist_forward(&p.forward, NULL, &cuda, NULL), ABACIST_UNSUPPORTED, "",
               "no CUDA backend");
}

static void runs_that_do_not_fit_the_plan(void) {
  make_problem(&p);
  abacist_plan* plan = NULL;
  EXPECT_OK(abacist_plan_create(ABACIST_FORWARD, &p.forward, NULL, NULL, &plan));
  abacist_plan_info info = {.struct_size = sizeof info};
  EXPECT_OK(abacist_plan_get_info(plan, &info));
  EXPECT(info.workspace_bytes > 0);
  EXPECT_ERROR(abacist_plan_run(plan, &p.forward, NULL), kInvalid, "workspace", "has 0 bytes");
  const size_t bytes = (info.workspace_bytes / 256 + 2) * 256;
  char* const memory = aligned_alloc(256, bytes);
  abacist_run_options run = {
      .struct_size = sizeof run, .workspace = memory + 1, .workspace_bytes = bytes - 1};
  EXPECT_ERROR(abacist_plan_run(plan, &p.forward, &run), kInvalid, "workspace", "not aligned");
  run.workspace = memory;
  abacist_tensors other = p.forward;
  other.q.stride[0] += 1;
  EXPECT_OK(abacist_plan_device_status(plan, &run)); /* nothing that only a device reads */
  run.stream = memory;
  EXPECT_ERROR(abacist_plan_run(plan, &p.forward, &run), kInvalid, "stream", "on the host");
  run.stream = NULL;
  EXPECT_ERROR(abacist_plan_run(plan, &other, &run), kInvalid, "tensors", "than the plan");
  EXPECT_ERROR(abacist_plan_run(plan, &p.backward, &run), kInvalid, "d_o", "no such operand");
  abacist_pointers pointers = {
      .struct_size = sizeof pointers, .q = p.q, .k = p.k, .v = p.v, .o = p.o};
  EXPECT_ERROR(abacist_plan_run_pointers(plan, &pointers, &run), kInvalid, "lse", "data is null");
  pointers.lse = p.lse;
  pointers.dq = p.dq;
  EXPECT_ERROR(abacist_plan_run_pointers(plan, &pointers, &run), kInvalid, "dq", "no such operand");
  for (size_t i = 0; i < sizeof p.o / sizeof *p.o; ++i) EXPECT(p.o[i] == 0.0f);
  free(memory);
  abacist_plan_destroy(plan);
}

/* A message longer than what is kept is cut between characters. */
static void long_messages_are_cut(void) {
  make_problem(&p);
  for (int shift = 0; shift < 2; ++shift) {
    char name[2001];
    for (int i = 0; i < 1000; ++i) memcpy(name + shift + 2 * i, "\xc3\xa4", i < 999 ? 2 : 0);
    if (shift == 1) name[0] = 'x';
    name[shift + 1998] = '\0';
    setenv("ABACIST_BACKEND", name, 1);
    EXPECT_ERROR(forward(), kInvalid, "ABACIST_BACKEND", "is \"");
    const char* message = abacist_last_error_message();
    const size_t length = strlen(message);
    EXPECT(length >= 1020 && length <= 1023);
    EXPECT((unsigned char)message[length - 1] == 0xa4); /* a whole character */
  }
  unsetenv("ABACIST_BACKEND");
}

const check kErrorChecks[] = {{"null arguments", null_arguments},
                              {"the error reads well", the_error_reads_well},
                              {"bad tensors", bad_tensors},
                              {"bad options", bad_options},
                              {"unsupported combinations", unsupported_combinations},
                              {"runs that do not fit the plan", runs_that_do_not_fit_the_plan},
                              {"long messages are cut", long_messages_are_cut},
                              {NULL, NULL}};
