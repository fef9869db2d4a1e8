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
# -ffp-contract=off: the same bits whatever the optimiser fuses. (nvcc takes none of these.)
target_compile_options(abacist_options INTERFACE $<$<NOT:$<COMPILE_LANGUAGE:CUDA>>:
  -Wall -Wextra -Wshadow -Wconversion $<$<BOOL:${ABACIST_WERROR}>:-Werror> -ffp-contract=off>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # A false alarm of GCC 12 about std::string's operator+ (its bug 105651).
  target_compile_options(abacist_options INTERFACE
                         $<$<NOT:$<COMPILE_LANGUAGE:CUDA>>:-Wno-restrict>)
endif()
if(ABACIST_SANITIZE)
  add_compile_options(-fsanitize=${ABACIST_SANITIZE} -fno-omit-frame-pointer
                      -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${ABACIST_SANITIZE})
endif()

# abacist_compile_quickly(<target>): for code that takes longer to compile with sanitizers than to
# run. Without these checks of pointers, which stay in the library, GCC 12 takes three quarters of the
# time; AddressSanitizer sees what they would have.
function(abacist_compile_quickly target)
  if(ABACIST_SANITIZE)
    target_compile_options(${target} PRIVATE -O0 -fno-sanitize=null,alignment,object-size,vptr)
  endif()
endfunction()
