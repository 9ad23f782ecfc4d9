# SPDX-License-Identifier: Apache-2.0
# Every option of the build. BUILD_SHARED_LIBS is CMake's own and decides static or shared.

set(
  FANFOLD_CUDA
  "AUTO"
  CACHE STRING
  "Build the GPU backend: AUTO (when nvcc is found), ON, OFF, or SIM (for the simulated device of the tests, which needs CUDA's headers only)"
)
set_property(
  CACHE FANFOLD_CUDA
  PROPERTY STRINGS AUTO ON OFF SIM
)
set(
  FANFOLD_SANITIZE
  ""
  CACHE STRING
  "Sanitizers for everything built here: empty, address or thread"
)
set_property(CACHE FANFOLD_SANITIZE PROPERTY STRINGS "" address thread)
# The C++ tests reach into the library, of which a shared one exports the public names only.
if(PROJECT_IS_TOP_LEVEL AND NOT BUILD_SHARED_LIBS)
  option(FANFOLD_BUILD_TESTS "Build the C++ tests (static library only)" ON)
else()
  option(FANFOLD_BUILD_TESTS "Build the C++ tests (static library only)" OFF)
endif()
if(FANFOLD_BUILD_TESTS AND BUILD_SHARED_LIBS)
  message(FATAL_ERROR "FANFOLD_BUILD_TESTS=ON: expected BUILD_SHARED_LIBS=OFF, got ON")
endif()
option(FANFOLD_BUILD_PYTHON "Build the Python extension module" OFF)
option(
  FANFOLD_BUILD_DEVICE_CHECK
  "Build device_check, which checks and measures a GPU (static library with the GPU backend only)"
  OFF
)
option(
  FANFOLD_MPI
  "Build the component mpi, which needs an MPI library (fanfold itself never does)"
  OFF
)
option(FANFOLD_INSTALL "Install the library, its headers and its CMake package" ON)
option(FANFOLD_WERROR "Turn compiler warnings into errors" OFF)

# AUTO becomes ON or OFF here, so that nothing below this line knows a third state.
if(FANFOLD_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(FANFOLD_WITH_CUDA ON)
  else()
    set(FANFOLD_WITH_CUDA OFF)
  endif()
  message(STATUS "fanfold: FANFOLD_CUDA=AUTO chose ${FANFOLD_WITH_CUDA}")
elseif(FANFOLD_CUDA STREQUAL "SIM")
  set(FANFOLD_WITH_CUDA ON)
else()
  set(FANFOLD_WITH_CUDA ${FANFOLD_CUDA})
endif()
if(FANFOLD_CUDA STREQUAL "SIM")
  set(FANFOLD_CUDA_IS_SIMULATED ON)
else()
  set(FANFOLD_CUDA_IS_SIMULATED OFF)
endif()

if(FANFOLD_BUILD_DEVICE_CHECK AND (BUILD_SHARED_LIBS OR NOT FANFOLD_WITH_CUDA))
  message(
    FATAL_ERROR
    "FANFOLD_BUILD_DEVICE_CHECK=ON: expected BUILD_SHARED_LIBS=OFF and FANFOLD_CUDA=ON or SIM"
  )
endif()

if(FANFOLD_WITH_CUDA AND NOT FANFOLD_CUDA_IS_SIMULATED)
  # Never the build machine's own GPU: a fixed list, unless the caller gives one.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES "80-real;90-real;100-real;100-virtual")
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
endif()

if(FANFOLD_MPI)
  set(MPI_CXX_SKIP_MPICXX ON) # its C++ classes, which MPI itself has withdrawn
  find_package(MPI REQUIRED COMPONENTS CXX GLOBAL) # a project that adds this one links it
endif()

# fanfold_build_options: warnings and sanitizers for everything built here, never exported.
# Sanitizers reach the tests as well: a half-instrumented program reports nonsense.
add_library(fanfold_build_options INTERFACE)
target_compile_options(
  fanfold_build_options
  INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow;-Wconversion;-Wsign-conversion>"
    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wshadow,-Wconversion,-Wsign-conversion>"
)
if(FANFOLD_WERROR)
  target_compile_options(
    fanfold_build_options
    INTERFACE
      $<$<COMPILE_LANGUAGE:CXX>:-Werror>
      "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xcompiler=-Werror>"
  )
endif()
if(FANFOLD_SANITIZE STREQUAL "address")
  set(FANFOLD_SANITIZE_FLAGS -fsanitize=address,undefined -fno-sanitize-recover=all)
elseif(FANFOLD_SANITIZE STREQUAL "thread")
  set(FANFOLD_SANITIZE_FLAGS -fsanitize=thread)
elseif(NOT FANFOLD_SANITIZE STREQUAL "")
  message(
    FATAL_ERROR
    "FANFOLD_SANITIZE: expected address, thread or nothing, got ${FANFOLD_SANITIZE}"
  )
endif()
if(FANFOLD_SANITIZE)
  target_compile_options(
    fanfold_build_options
    INTERFACE ${FANFOLD_SANITIZE_FLAGS} -fno-omit-frame-pointer
  )
  target_link_options(fanfold_build_options INTERFACE ${FANFOLD_SANITIZE_FLAGS})
endif()
