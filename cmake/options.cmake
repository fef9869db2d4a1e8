# Compile options of every target of the project.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_BUILD_RPATH $ORIGIN)  # a program finds libraries carried along beside it: scripts/carry

add_library(abacist_options INTERFACE)
target_compile_options(abacist_options INTERFACE -Wall -Wextra -Wshadow -Wconversion
                       # GCC 12 warns about std::string operator+ by mistake (GCC bug 105651).
                       $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>
                       $<$<BOOL:${ABACIST_WERROR}>:-Werror>
                       -ffp-contract=off)  # the same bits whatever the optimiser fuses
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # False alarms of GCC 12 inside std::sort of a short array and std::string's operator+ (its bugs
  # 107852 and 105651).
  target_compile_options(abacist_options INTERFACE -Wno-array-bounds -Wno-restrict)
endif()
if(ABACIST_SANITIZE)
  add_compile_options(-fsanitize=${ABACIST_SANITIZE} -fno-omit-frame-pointer
                      -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${ABACIST_SANITIZE})
endif()
