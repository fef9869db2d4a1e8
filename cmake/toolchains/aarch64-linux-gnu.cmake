# Cross build for aarch64 on Debian, run under qemu-user. The libraries of the target lie unpacked in
# ABACIST_ARM64_ROOT (`scripts/setup arm64` puts them there); libc comes with the cross compiler.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)

if(NOT ABACIST_ARM64_ROOT)
  cmake_path(GET CMAKE_CURRENT_LIST_DIR PARENT_PATH abacist_cmake)
  cmake_path(GET abacist_cmake PARENT_PATH abacist_top)
  set(ABACIST_ARM64_ROOT ${abacist_top}/build/arm64-root)
endif()
set(ABACIST_ARM64_ROOT ${ABACIST_ARM64_ROOT} CACHE PATH "Unpacked arm64 libraries")
if(NOT EXISTS ${ABACIST_ARM64_ROOT}/usr/lib/aarch64-linux-gnu)
  message(FATAL_ERROR "${ABACIST_ARM64_ROOT} holds no arm64 libraries: run scripts/setup arm64.")
endif()
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES ABACIST_ARM64_ROOT)

set(CMAKE_FIND_ROOT_PATH ${ABACIST_ARM64_ROOT}/usr ${ABACIST_ARM64_ROOT})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)

set(CMAKE_CROSSCOMPILING_EMULATOR
    qemu-aarch64;-cpu;cortex-a72;-L;/usr/aarch64-linux-gnu;-E;LD_LIBRARY_PATH=${ABACIST_ARM64_ROOT}/usr/lib/aarch64-linux-gnu)
