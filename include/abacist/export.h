/* Symbol visibility: everything is hidden except what carries ABACIST_API. */
#ifndef ABACIST_EXPORT_H
#define ABACIST_EXPORT_H

#if defined(ABACIST_SHARED)
#define ABACIST_API __attribute__((visibility("default")))
#else
#define ABACIST_API
#endif

#endif
