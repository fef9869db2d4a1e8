// What the C API's handle of a plan points at; the Python package's picture looks inside, too.
#pragma once

#include "abacist/abacist.h"
#include "abacist/plan.hpp"

struct abacist_plan {  // NOLINT(readability-identifier-naming)
  abacist::Plan plan;
};
