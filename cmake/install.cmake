# install(): headers, library, CMake package and pkg-config file. Only include/abacist is installed.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(abacist_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/abacist)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/abacist DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.hpp" PATTERN "*.h")
install(TARGETS abacist EXPORT abacist INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT abacist NAMESPACE abacist:: FILE abacist-targets.cmake
        DESTINATION ${abacist_cmake_dir})

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/abacist-config.cmake.in
  ${PROJECT_BINARY_DIR}/abacist-config.cmake INSTALL_DESTINATION ${abacist_cmake_dir})
# 0.x may break in every minor version.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/abacist-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/abacist-config.cmake
              ${PROJECT_BINARY_DIR}/abacist-config-version.cmake
        DESTINATION ${abacist_cmake_dir})

# A static library needs its own libraries at the consumer's link; a shared one brings them itself.
set(ABACIST_PC_REQUIRES "libhwy")
set(ABACIST_PC_LIBS "-labacist")
if(ABACIST_THREADS STREQUAL "tbb")
  string(APPEND ABACIST_PC_REQUIRES " tbb")
endif()
set(ABACIST_PC_CFLAGS "")
if(BUILD_SHARED_LIBS)
  set(ABACIST_PC_REQUIRES_LINE "Requires.private: ${ABACIST_PC_REQUIRES}")
  set(ABACIST_PC_CFLAGS " -DABACIST_SHARED")
else()
  set(ABACIST_PC_REQUIRES_LINE "Requires: ${ABACIST_PC_REQUIRES}")
  string(APPEND ABACIST_PC_LIBS " -lstdc++ -lm -pthread")
  if(ABACIST_CUDA)
    string(APPEND ABACIST_PC_LIBS " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt")
  endif()
endif()
# Relative to where the file lies, so that an installed tree can be moved.
set(abacist_pc_dir ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH ABACIST_PC_PREFIX ${abacist_pc_dir} ${CMAKE_INSTALL_PREFIX})
file(RELATIVE_PATH ABACIST_PC_LIBDIR ${abacist_pc_dir} ${CMAKE_INSTALL_FULL_LIBDIR})
file(RELATIVE_PATH ABACIST_PC_INCLUDEDIR ${abacist_pc_dir} ${CMAKE_INSTALL_FULL_INCLUDEDIR})
configure_file(${PROJECT_SOURCE_DIR}/cmake/abacist.pc.in ${PROJECT_BINARY_DIR}/abacist.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/abacist.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
if(TARGET abacist_cli)
  install(TARGETS abacist_cli RUNTIME)
endif()
# README.md with all that it links to. Headers lie elsewhere in an installed tree; links to what is
# not installed become text.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/README.md)
file(RELATIVE_PATH abacist_headers ${CMAKE_INSTALL_FULL_DOCDIR} ${CMAKE_INSTALL_FULL_INCLUDEDIR})
file(READ ${PROJECT_SOURCE_DIR}/README.md abacist_readme)
string(REPLACE "](include/" "](${abacist_headers}/" abacist_readme "${abacist_readme}")
string(REGEX REPLACE "\\[([^]]*)\\]\\((bench|python)/[^)]*\\)" "`\\1`" abacist_readme "${abacist_readme}")
file(WRITE ${PROJECT_BINARY_DIR}/README.md "${abacist_readme}")
install(FILES ${PROJECT_BINARY_DIR}/README.md ${PROJECT_SOURCE_DIR}/CHANGELOG.md
              ${PROJECT_SOURCE_DIR}/CONTRIBUTING.md
        DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs DESTINATION ${CMAKE_INSTALL_DOCDIR}
        FILES_MATCHING PATTERN "*.md" PATTERN "*.svg" PATTERN "site" EXCLUDE)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/examples DESTINATION ${CMAKE_INSTALL_DOCDIR}
        FILES_MATCHING PATTERN "*.cpp" PATTERN "*.c" PATTERN "CMakeLists.txt" PATTERN "build*" EXCLUDE)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} RENAME copyright)
