# The wheel (pyproject.toml): libabacist.so under one plain name, beside it the libraries that it
# needs, found by $ORIGIN. Wheels hold no symbolic links.
set_property(TARGET abacist PROPERTY VERSION)
set_property(TARGET abacist PROPERTY SOVERSION)
set_target_properties(abacist PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH $ORIGIN)
install(TARGETS abacist LIBRARY DESTINATION . COMPONENT python)
set(ABACIST_BUNDLED hwy::hwy)
if(ABACIST_THREADS STREQUAL "tbb")
  list(APPEND ABACIST_BUNDLED TBB::tbb)
endif()
foreach(library IN LISTS ABACIST_BUNDLED)
  install(FILES $<TARGET_FILE:${library}> RENAME $<TARGET_SONAME_FILE_NAME:${library}>
          DESTINATION . COMPONENT python)
endforeach()

# The picture of a plan that abacist.show() draws, by the sources of the command line tool.
find_package(fmt 9 REQUIRED)
add_library(abacist_picture MODULE
  ${PROJECT_SOURCE_DIR}/cli/picture/picture.cpp
  ${PROJECT_SOURCE_DIR}/cli/picture/svg.cpp
  ${PROJECT_SOURCE_DIR}/cli/picture/tiles.cpp
  ${PROJECT_SOURCE_DIR}/cli/picture/walk_chart.cpp
  ${PROJECT_SOURCE_DIR}/cli/text.cpp
  ${PROJECT_SOURCE_DIR}/python/picture/picture_c.cpp)
target_include_directories(abacist_picture PRIVATE ${PROJECT_SOURCE_DIR}/cli
                                                   ${PROJECT_SOURCE_DIR}/src)
# Header-only: nothing more to carry along.
target_link_libraries(abacist_picture PRIVATE abacist_options abacist fmt::fmt-header-only)
target_link_options(abacist_picture PRIVATE -Wl,--no-undefined)
set_target_properties(abacist_picture PROPERTIES
  BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH $ORIGIN
  LIBRARY_OUTPUT_DIRECTORY $<TARGET_FILE_DIR:abacist>)
install(TARGETS abacist_picture LIBRARY DESTINATION . COMPONENT python)
