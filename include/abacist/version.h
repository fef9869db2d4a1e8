/* Version of these headers. */
#ifndef ABACIST_VERSION_H
#define ABACIST_VERSION_H

#define ABACIST_VERSION_MAJOR 0
#define ABACIST_VERSION_MINOR 1
#define ABACIST_VERSION_PATCH 0

#endif
