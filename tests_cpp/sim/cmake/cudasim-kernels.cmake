# SPDX-License-Identifier: Apache-2.0
include_guard(GLOBAL)

# cudasim_kernel_options(<source>... [DEFINITIONS <name>...])
#
# Compiles kernel sources, .cu or .cpp, for the simulated device: as C++, with the definitions that
# tell them so. Call it in the directory that adds the sources to a target.
#
# The callbacks of -fsanitize=thread show each access to the checks; the sanitizer's runtime is never
# linked. Under a real sanitizer they are left out, and races in kernels are not looked for.
function(cudasim_kernel_options)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "" "DEFINITIONS")
  # -O1: positions stay exact. Kernels view one type's bytes as another's, and expect each
  # operation to be rounded as written.
  set(options -O1 -g -fno-strict-aliasing -ffp-contract=off)
  get_target_property(sanitizer cudasim::cudasim CUDASIM_SANITIZE)
  if(NOT sanitizer)
    list(APPEND options -fsanitize=thread)
  endif()
  set_source_files_properties(
    ${arg_UNPARSED_ARGUMENTS}
    PROPERTIES
      LANGUAGE CXX
      COMPILE_OPTIONS "-x;c++;${options}"
      COMPILE_DEFINITIONS "${arg_DEFINITIONS}"
      SKIP_PRECOMPILE_HEADERS ON
      SKIP_UNITY_BUILD_INCLUSION ON
  )
endfunction()

# cudasim_add_kernels(<target> SOURCES <source>... [DEFINITIONS <name>...])
#
# Adds kernel sources to a target and links the simulated device.
function(cudasim_add_kernels target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;DEFINITIONS")
  cudasim_kernel_options(${arg_SOURCES} DEFINITIONS ${arg_DEFINITIONS})
  target_sources(${target} PRIVATE ${arg_SOURCES})
  target_link_libraries(${target} PRIVATE cudasim::cudasim)
endfunction()
