# The two libraries that libabacist links: see docs/decisions/001-dependencies.md.
find_package(hwy 1.0.3 REQUIRED)
set(ABACIST_DEPENDENCIES hwy::hwy)
if(ABACIST_THREADS STREQUAL "tbb")
  find_package(TBB 2021.5 REQUIRED)
  list(APPEND ABACIST_DEPENDENCIES TBB::tbb)
elseif(ABACIST_THREADS STREQUAL "std")
  find_package(Threads REQUIRED)
  list(APPEND ABACIST_DEPENDENCIES Threads::Threads)
else()
  message(FATAL_ERROR "ABACIST_THREADS is \"${ABACIST_THREADS}\", must be tbb or std.")
endif()

if(ABACIST_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR "ABACIST_CUDA is ON, but no CUDA compiler was found: put nvcc on the PATH, "
                        "or set CMAKE_CUDA_COMPILER. The CPU side builds with ABACIST_CUDA=OFF.")
  endif()
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES OFF)  # src/cuda names them itself
  endif()
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
  # The runtime is linked in and finds the driver when it is first used: the library loads, and its
  # CPU backend works, on machines without either.
  find_package(CUDAToolkit 13.0 REQUIRED)
  list(APPEND ABACIST_DEPENDENCIES CUDA::cudart_static)
endif()
