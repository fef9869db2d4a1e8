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
