// What every C++ header needs first: C++20, and ABACIST_API.
#pragma once

#if __cplusplus < 202002L
#error "Abacist's C++ headers need C++20 (-std=c++20); C and older C++ can use abacist/abacist.h."
#include <stop: Abacist needs C++20>  // ends the compilation, which would list errors by the hundred
#endif

#include "abacist/export.h"
