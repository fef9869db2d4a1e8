/* Plan once, run often, from C: what the plan says, a workspace of one's own, pointers alone for
 * each run. The caller's tensors are [b, h, s, d]: strides describe any order of the axes. */
#include <abacist/abacist.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum {
  kBatch = 2,
  kHeads = 4,
  kLength = 512,
  kDim = 64,
  kCount = kBatch * kHeads * kLength * kDim
};

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, abacist_last_error());
  return 1;
}

/* The API names axes [b, s, h, d]; in memory heads come before positions. */
static abacist_tensor heads_first(void* data) {
  const int64_t in_memory[] = {kBatch, kHeads, kLength, kDim};
  abacist_tensor t = abacist_contiguous(data, ABACIST_F32, 4, in_memory);
  const abacist_tensor order = t;
  t.shape[1] = order.shape[2], t.stride[1] = order.stride[2];
  t.shape[2] = order.shape[1], t.stride[2] = order.stride[1];
  return t;
}

int main(void) {
  float* const memory = malloc(4 * (size_t)kCount * sizeof(float));
  if (memory == NULL) return 1;
  float *q = memory, *k = q + kCount, *v = k + kCount, *o = v + kCount;
  for (int i = 0; i < 3 * kCount; ++i) memory[i] = sinf(0.7f * (float)i);

  abacist_tensors t = {.struct_size = sizeof t};
  t.q = heads_first(q);
  t.k = heads_first(k);
  t.v = heads_first(v);
  t.o = heads_first(o);
  const abacist_options options = {.struct_size = sizeof options, .causal = 1};
  abacist_plan* plan = NULL;
  if (abacist_plan_create(ABACIST_FORWARD, &t, &options, NULL, &plan) != ABACIST_OK) {
    return failed("plan");
  }
  char text[2048];
  if (abacist_plan_explain(plan, text, sizeof text, NULL) != ABACIST_OK) return failed("explain");
  puts(text);

  abacist_plan_info info = {.struct_size = sizeof info};
  if (abacist_plan_get_info(plan, &info) != ABACIST_OK) return failed("info");
  const size_t bytes = (info.workspace_bytes + ABACIST_WORKSPACE_ALIGNMENT - 1) /
                       ABACIST_WORKSPACE_ALIGNMENT * ABACIST_WORKSPACE_ALIGNMENT;
  const abacist_run_options run = {.struct_size = sizeof run,
                                   .workspace = aligned_alloc(ABACIST_WORKSPACE_ALIGNMENT, bytes),
                                   .workspace_bytes = bytes};
  double sum = 0.0;
  for (int step = 0; step < 3; ++step) {
    for (int i = 0; i < kCount; ++i) v[i] = (float)(step + 1); /* rows of P sum to 1 */
    const abacist_pointers pointers = {
        .struct_size = sizeof pointers, .q = q, .k = k, .v = v, .o = o};
    if (abacist_plan_run_pointers(plan, &pointers, &run) != ABACIST_OK) return failed("run");
    sum += (double)o[kCount - 1];
  }
  printf("sum of o over three runs: %.6f\n", sum);

  free(run.workspace);
  abacist_plan_destroy(plan);
  free(memory);
  return fabs(sum - 6.0) < 1e-5 ? 0 : 1;
}
