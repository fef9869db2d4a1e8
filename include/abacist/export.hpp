// Symbol visibility: everything is hidden except what carries ABACIST_API.
#pragma once

#if defined(ABACIST_SHARED)
#define ABACIST_API __attribute__((visibility("default")))
#else
#define ABACIST_API
#endif
