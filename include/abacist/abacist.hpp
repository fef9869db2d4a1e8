// Everything of the public C++ API.
#pragma once

#include "abacist/attention.hpp"
#include "abacist/cache.hpp"
#include "abacist/plan.hpp"
#include "abacist/problem.hpp"
#include "abacist/status.hpp"
#include "abacist/tensor.hpp"
#include "abacist/version.hpp"
