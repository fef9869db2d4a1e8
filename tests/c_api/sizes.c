/* struct_size: structs of older and newer versions, and garbage. */
#include <string.h>

#include "checks.h"

static problem p;
static const abacist_status kInvalid = ABACIST_INVALID_ARGUMENT;

static void sizes_that_are_garbage(void) {
  make_problem(&p);
  static const size_t kBad[] = {0,       1,       7, 8, offsetof(abacist_options, dropout_p) - 1,
                                1 << 20, SIZE_MAX};
  for (size_t i = 0; i < sizeof kBad / sizeof *kBad; ++i) {
    abacist_options options = {.struct_size = kBad[i]};
    abacist_plan_info info = {.struct_size = kBad[i]};
    abacist_plan* plan = NULL;
    EXPECT_ERROR(abacist_forward(&p.forward, &options, NULL, NULL), kInvalid, "options",
                 "must be sizeof(abacist_options)");
    EXPECT_OK(abacist_plan_create(ABACIST_FORWARD, &p.forward, NULL, NULL, &plan));
    if (kBad[i] < sizeof(abacist_plan_info)) {
      EXPECT_ERROR(abacist_plan_get_info(plan, &info), kInvalid, "plan_info", "struct_size is");
      EXPECT(info.kernel == NULL);
    }
    abacist_plan_destroy(plan);
  }
  p.forward.struct_size = 0;
  EXPECT_ERROR(abacist_forward(&p.forward, NULL, NULL, NULL), kInvalid, "tensors",
               "struct_size is 0, must be sizeof(abacist_tensors)");
}

/* Structs of a version to come. */
typedef struct longer_options {
  abacist_options known;
  int64_t later[3];
} longer_options;
typedef struct longer_info {
  abacist_plan_info known;
  int64_t later[3];
} longer_info;

static void structs_of_a_later_version(void) {
  make_problem(&p);
  longer_options options = {.known = {.struct_size = sizeof options, .causal = 1}};
  EXPECT_OK(abacist_forward(&p.forward, &options.known, NULL, NULL));
  options.later[2] = 1;
  EXPECT_ERROR(abacist_forward(&p.forward, &options.known, NULL, NULL), kInvalid, "options",
               "does not know, and they are set");
  abacist_plan* plan = NULL;
  longer_info info;
  memset(&info, 0xff, sizeof info);
  info.known.struct_size = sizeof info;
  EXPECT_OK(abacist_plan_create(ABACIST_FORWARD, &p.forward, NULL, NULL, &plan));
  EXPECT_OK(abacist_plan_get_info(plan, &info.known));
  EXPECT(info.known.struct_size == sizeof info && info.known.flops > 0);
  EXPECT(info.later[0] == 0 && info.later[2] == 0); /* what this library does not know is zero */
  abacist_plan_destroy(plan);
}

/* abacist_tensors ended after cu_seqlens_k once. */
static void structs_of_an_earlier_version(void) {
  make_problem(&p);
  p.forward.struct_size = offsetof(abacist_tensors, sinks);
  memset(&p.forward.sinks, 0xff, sizeof(abacist_tensors) - offsetof(abacist_tensors, sinks));
  EXPECT_OK(abacist_forward(&p.forward, NULL, NULL, NULL));
  p.forward.struct_size -= 1;
  EXPECT_ERROR(abacist_forward(&p.forward, NULL, NULL, NULL), kInvalid, "tensors", "struct_size");
  abacist_plan* plan = NULL;
  make_problem(&p);
  EXPECT_OK(abacist_plan_create(ABACIST_FORWARD, &p.forward, NULL, NULL, &plan));
  memset(&p.forward, 0xff, sizeof p.forward);
  p.forward.struct_size = offsetof(abacist_tensors, sinks);
  EXPECT_OK(abacist_plan_get_problem(plan, NULL, &p.forward, NULL));
  EXPECT(p.forward.q.rank == 4 && p.forward.cu_seqlens_k.rank == 0 && p.forward.sinks.rank == -1);
  abacist_plan_destroy(plan);
}

const check kSizeChecks[] = {{"sizes that are garbage", sizes_that_are_garbage},
                             {"structs of an earlier version", structs_of_an_earlier_version},
                             {"structs of a later version", structs_of_a_later_version},
                             {NULL, NULL}};
