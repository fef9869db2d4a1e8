/* Caches of keys and values: paged and dense, appending, rotary embedding, batch invariance. */
#include <math.h>
#include <string.h>

#include "checks.h"

static problem p;
static const plain_rule kPlain = {false, 0.35355339059327379, 0.0, 0.0, 1000, 1000, NULL, 1};

enum { PAGE = 3, PAGES = 8, MAX_PAGES = 3 };
static float k_pool[PAGES * PAGE * HK * DQ], v_pool[PAGES * PAGE * HK * DV];
static int32_t table[B * MAX_PAGES] = {5, 0, 7, 2, 6, 1};
static int32_t lengths[B];

static abacist_tensor ints(int32_t* data, int64_t rows, int64_t columns) {
  const int64_t shape[] = {rows, columns};
  return abacist_contiguous(data, ABACIST_I32, columns > 0 ? 2 : 1, shape);
}

/* Appends what p->k and p->v hold from row `first` on to the pages. */
static abacist_append_tensors appending(int64_t first, int64_t count) {
  const int64_t of_k[] = {PAGES, PAGE, HK, DQ}, of_v[] = {PAGES, PAGE, HK, DV};
  abacist_append_tensors a = {.struct_size = sizeof a, .k = p.forward.k, .v = p.forward.v};
  a.k.data = p.k + first * HK * DQ;
  a.v.data = p.v + first * HK * DV;
  a.k.shape[1] = a.v.shape[1] = count;
  a.k_cache = abacist_contiguous(k_pool, ABACIST_F32, 4, of_k);
  a.v_cache = abacist_contiguous(v_pool, ABACIST_F32, 4, of_v);
  a.lengths = ints(lengths, B, 0);
  a.block_table = ints(table, B, MAX_PAGES);
  return a;
}

/* The problem with its keys in the caches of `a`. */
static abacist_tensors on_pages_of(const abacist_append_tensors* a) {
  abacist_tensors paged = p.forward;
  paged.k = a->k_cache;
  paged.v = a->v_cache;
  paged.block_table = a->block_table;
  paged.key_lengths = a->lengths;
  return paged;
}

static void a_paged_cache_gives_what_a_dense_one_gives(void) {
  make_problem(&p);
  lengths[0] = lengths[1] = 0;
  for (int i = 0; i < PAGES * PAGE * HK * DQ; ++i) k_pool[i] = NAN;
  for (int i = 0; i < PAGES * PAGE * HK * DV; ++i) v_pool[i] = NAN;
  for (int first = 0; first < SK; first += 5) { /* 5 rows, then 2 */
    const int count = first + 5 < SK ? 5 : SK - first;
    const abacist_append_tensors a = appending(first, count);
    EXPECT_OK(abacist_append(&a, NULL));
    for (int n = 0; n < B; ++n) lengths[n] += count;
  }
  const abacist_append_tensors a = appending(0, 5);
  const abacist_tensors paged = on_pages_of(&a);
  EXPECT_OK(abacist_forward(&paged, NULL, NULL, NULL));
  EXPECT(error_of(&p, kPlain) < 1e-6);

  abacist_plan_options same = {.struct_size = sizeof same, .batch_invariant = 1};
  float o[B * SQ * HQ * DV];
  EXPECT_OK(abacist_forward(&paged, NULL, &same, NULL));
  memcpy(o, p.o, sizeof o);
  EXPECT_OK(abacist_forward(&p.forward, NULL, &same, NULL));
  EXPECT(memcmp(o, p.o, sizeof o) == 0);
  abacist_plan* plan = NULL;
  abacist_plan_info info = {.struct_size = sizeof info};
  EXPECT_OK(abacist_plan_create(ABACIST_FORWARD, &paged, NULL, &same, &plan));
  EXPECT_OK(abacist_plan_get_info(plan, &info));
  EXPECT(info.batch_invariant == 1 && info.reserved == 0);
  abacist_plan_destroy(plan);
}

static void pages_outside_the_pool_are_told(void) {
  make_problem(&p);
  const abacist_append_tensors a = appending(0, 5);
  const abacist_tensors paged = on_pages_of(&a);
  memset(k_pool, 0, sizeof k_pool);
  memset(v_pool, 0, sizeof v_pool);
  lengths[0] = lengths[1] = SK;
  EXPECT_OK(abacist_forward(&paged, NULL, NULL, NULL));
  table[1] = PAGES;
  p.o[0] = 5.0f;
  EXPECT_ERROR(abacist_forward(&paged, NULL, NULL, NULL), ABACIST_INVALID_ARGUMENT, "block_table",
               "page ids outside [0, pages = 8)");
  EXPECT(p.o[0] == 0.0f); /* written all the same */
  table[1] = 0;
}

static void rotations_depend_on_the_distance_alone(void) {
  make_problem(&p);
  float cosines[16 * DQ / 2], sines[16 * DQ / 2], q[B * SQ * HQ * DQ], k[B * SQ * HQ * DQ];
  for (int position = 0; position < 16; ++position) {
    for (int i = 0; i < DQ / 2; ++i) {
      const double angle = position * pow(100.0, -2.0 * i / DQ);
      cosines[position * DQ / 2 + i] = (float)cos(angle);
      sines[position * DQ / 2 + i] = (float)sin(angle);
    }
  }
  const int64_t of_table[] = {16, DQ / 2};
  abacist_rotary rotary = {.struct_size = sizeof rotary,
                           .cos = abacist_contiguous(cosines, ABACIST_F32, 2, of_table),
                           .sin = abacist_contiguous(sines, ABACIST_F32, 2, of_table)};
  for (int style = 0; style < 2; ++style) {
    double first = 0.0;
    for (int shift = 0; shift < 8; shift += 7) {
      int32_t at_q[B] = {4 + shift, 0}, at_k[B] = {1 + shift, 0};
      abacist_tensor x = p.forward.q, to_q = x, to_k = x;
      const abacist_tensor positions_q = ints(at_q, B, 0), positions_k = ints(at_k, B, 0);
      to_q.data = q;
      to_k.data = k;
      rotary.style = style;
      EXPECT_OK(abacist_rotate(&x, &positions_q, &rotary, &to_q));
      EXPECT_OK(abacist_rotate(&x, &positions_k, &rotary, &to_k));
      double product = 0.0;
      for (int c = 0; c < DQ; ++c) product += (double)q[c] * (double)k[c];
      if (shift == 0) first = product;
      EXPECT(fabs(product - first) < 1e-5);
    }
  }
}

static void errors_of_caches(void) {
  make_problem(&p);
  const abacist_status invalid = ABACIST_INVALID_ARGUMENT;
  lengths[0] = lengths[1] = PAGE * MAX_PAGES - 1;
  memset(k_pool, 0, sizeof k_pool);
  abacist_append_tensors a = appending(0, 2);
  EXPECT_ERROR(abacist_append(&a, NULL), invalid, "lengths", "[0] is 8");
  EXPECT_ERROR(abacist_append(NULL, NULL), invalid, "append_tensors", "is null");
  lengths[0] = lengths[1] = 0;
  table[3] = PAGES;
  EXPECT_ERROR(abacist_append(&a, NULL), invalid, "block_table", "");
  table[3] = table[0];
  EXPECT_ERROR(abacist_append(&a, NULL), invalid, "block_table", "[0, 0] and [1, 0] are both 5");
  table[3] = 2;
  for (size_t i = 0; i < sizeof k_pool / sizeof *k_pool; ++i) EXPECT(k_pool[i] == 0.0f);
  a.k.dtype = 44;
  EXPECT_ERROR(abacist_append(&a, NULL), invalid, "k", "dtype is 44");
  a = appending(0, 2);
  abacist_rotary rotary = {.struct_size = sizeof rotary, .style = 2};
  EXPECT_ERROR(abacist_append(&a, &rotary), invalid, "style", "is 2");
  rotary.struct_size = 8;
  EXPECT_ERROR(abacist_append(&a, &rotary), invalid, "rotary", "sizeof(abacist_rotary)");
  rotary = (abacist_rotary){.struct_size = sizeof rotary, .reserved = 1};
  EXPECT_ERROR(abacist_append(&a, &rotary), invalid, "reserved", "");
  rotary.reserved = 0;
  const abacist_tensor at = a.lengths;
  EXPECT_ERROR(abacist_rotate(NULL, &at, &rotary, NULL), invalid, "x", "is null");
  EXPECT_ERROR(abacist_rotate(&p.forward.q, NULL, &rotary, NULL), invalid, "positions", "is null");
  EXPECT_ERROR(abacist_rotate(&p.forward.q, &at, &rotary, NULL), invalid, "out", "is null");
  EXPECT_ERROR(abacist_rotate(&p.forward.q, &at, NULL, &p.forward.q), invalid, "cos", "absent");
  abacist_plan_options options = {.struct_size = sizeof options, .batch_invariant = 2};
  EXPECT_ERROR(abacist_forward(&p.forward, NULL, &options, NULL), invalid, "batch_invariant", "2");
  options = (abacist_plan_options){.struct_size = sizeof options, .reserved = 1};
  EXPECT_ERROR(abacist_forward(&p.forward, NULL, &options, NULL), invalid, "reserved", "not 0");
}

const check kCacheChecks[] = {
    {"a paged cache gives what a dense one gives", a_paged_cache_gives_what_a_dense_one_gives},
    {"pages outside the pool are told", pages_outside_the_pool_are_told},
    {"rotations depend on the distance alone", rotations_depend_on_the_distance_alone},
    {"errors of caches", errors_of_caches},
    {NULL, NULL}};
