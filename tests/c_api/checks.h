/* Checks for plain C: each prints "ok NAME" or "FAIL NAME: FILE:LINE what", main returns failures.
 */
#ifndef CHECKS_H
#define CHECKS_H

#include <stdbool.h>
#include <stddef.h>

#include "abacist/abacist.h"

/* Tables of checks, one for each source file. */
typedef struct check {
  const char* name;
  void (*body)(void);
} check;

extern const check kCallChecks[];
extern const check kCacheChecks[];
extern const check kErrorChecks[];
extern const check kSizeChecks[];

/* A failure is printed and remembered, and the check goes on. */
#define EXPECT(condition) expect(__FILE__, __LINE__, #condition, condition)
#define EXPECT_OK(call) expect_ok(__FILE__, __LINE__, #call, call)
/* The call fails with this status, for this argument, with a message that contains this text. */
#define EXPECT_ERROR(call, code, argument, text) \
  expect_error(__FILE__, __LINE__, #call, call, code, argument, text)

void expect(const char* file, int line, const char* text, bool condition);
void expect_ok(const char* file, int line, const char* call, abacist_status got);
void expect_error(const char* file, int line, const char* call, abacist_status got,
                  abacist_status code, const char* argument, const char* text);

/* Numbers in (-1, 1), the same on every machine. */
void fill(float* values, size_t count, unsigned seed);
double largest_difference(const float* a, const float* b, size_t count);

/* A small problem with memory of its own: b 2, s_q 5, s_k 7, h_q 4, h_k 2, d_qk 8, d_v 6. */
enum { B = 2, SQ = 5, SK = 7, HQ = 4, HK = 2, DQ = 8, DV = 6 };
typedef struct problem {
  float q[B * SQ * HQ * DQ], k[B * SK * HK * DQ], v[B * SK * HK * DV];
  float o[B * SQ * HQ * DV], lse[B * HQ * SQ], d_o[B * SQ * HQ * DV];
  float dq[B * SQ * HQ * DQ], dk[B * SK * HK * DQ], dv[B * SK * HK * DV];
  abacist_tensors forward, backward;
} problem;

void make_problem(problem* p);

/* Attention of row i of sequence b and head h, written down as the formula says, in double. */
typedef struct plain_rule {
  bool causal;
  double scale, softcap, slope;
  long left, right;
  const float* sinks; /* [h_q], or NULL */
  int step;           /* keys 0, step, 2 step, ... are visible */
} plain_rule;
void plain_row(const problem* p, plain_rule rule, int b, int i, int h, double* o, double* lse);

/* The largest difference of p->o and p->lse to plain_row's. */
double error_of(const problem* p, plain_rule rule);

#endif
