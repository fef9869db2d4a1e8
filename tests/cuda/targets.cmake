# Tests of the CUDA backend. Those of refusals and plans need no GPU; the others are skipped, with the
# reason, where there is none.
set(cuda_options $<$<COMPILE_LANGUAGE:CUDA>:-gencode=arch=compute_90a,code=sm_90a
                 --expt-relaxed-constexpr>)
add_executable(tests_cuda
  conformance/table.cpp
  cuda/decline_test.cpp
  cuda/fault.cu
  cuda/gpu_c_api_test.cpp
  cuda/gpu_conformance_test.cpp
  cuda/gpu_kernels_test.cpp
  cuda/gpu_large_test.cpp
  cuda/gpu_mixture_test.cpp
  cuda/gpu_run_test.cpp
  cuda/gpu_scores_test.cpp
  cuda/plan_test.cpp
  cuda/support/gpu.cpp)
target_compile_options(tests_cuda PRIVATE ${cuda_options})
target_link_libraries(tests_cuda PRIVATE abacist_test_support CUDA::cudart_static)
gtest_discover_tests(tests_cuda DISCOVERY_MODE PRE_TEST
  PROPERTIES LABELS cuda TIMEOUT 600 RESOURCE_LOCK gpu)  # one at a time: they look at free memory

# A program of the kernel's own, on the library's objects: no library above it.
function(add_kernel_program name)
  add_executable(${name} cuda/${name}.cu)
  target_compile_options(${name} PRIVATE ${cuda_options})
  target_link_libraries(${name} PRIVATE abacist_objects CUDA::cudart_static)
  add_test(NAME cuda.${name} COMMAND ${name})
  set_tests_properties(cuda.${name} PROPERTIES LABELS cuda TIMEOUT 600 RESOURCE_LOCK gpu
    SKIP_REGULAR_EXPRESSION
    "CUDA driver version is insufficient;no CUDA-capable device")
endfunction()
add_kernel_program(forward_harness)   # every shape, forced paths
# A million tokens, more than 65,535 heads, offsets beyond 2^31: takes 60 GB of device memory.
add_kernel_program(forward_extremes)

if(ABACIST_BUILD_CLI)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  add_test(NAME cuda.library
           COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/cuda/check_library.py
                   $<TARGET_FILE:abacist_cli>)
  set_tests_properties(cuda.library PROPERTIES LABELS cuda TIMEOUT 300)
endif()
