# libpagemill_cuda.so: csrc/cuda/*.cu behind the C interface of cuda_kernels.h. Nothing links it: the Python module and
# anybody else load it at run time, so that one build of the rest serves machines with and without a GPU.
#
# Sets cuda_is_built, cuda_reason (why not), cuda_architectures and cuda_compiler for build_info.json.

set(PAGEMILL_CUDA AUTO CACHE STRING "build the CUDA kernels: AUTO (where nvcc is found), ON or OFF")
set_property(CACHE PAGEMILL_CUDA PROPERTY STRINGS AUTO ON OFF)
set(PAGEMILL_CUDA_ARCHITECTURES "" CACHE STRING
    "architectures to compile for, as 80;90a; empty: 80;86;89;90a, and 100 where the compiler knows it")
option(PAGEMILL_DEVICE_CHECKS "check on the device what addresses memory: slots, block ids, token ids, positions" OFF)

set(cuda_is_built OFF)
set(cuda_reason "")
set(cuda_architectures "")
set(cuda_compiler "")

string(TOUPPER "${PAGEMILL_CUDA}" cuda_choice)
if(cuda_choice STREQUAL "AUTO")
  set(cuda_is_required OFF)
elseif(cuda_choice)
  set(cuda_is_required ON)
else()
  set(cuda_reason "turned off when the kernels were built (PAGEMILL_CUDA=OFF)")
  return()
endif()

# Flags for the architectures are given below: no list of CMake's own is asked for or checked.
set(CMAKE_CUDA_ARCHITECTURES OFF)

# A compiler that does not work here, say with too new a host compiler, counts as none. A compiler named by the caller
# (CMAKE_CUDA_COMPILER) is used as it is.
if(NOT CMAKE_CUDA_COMPILER)
  if(NOT DEFINED ENV{CUDACXX})
    find_program(PAGEMILL_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES bin)
    mark_as_advanced(PAGEMILL_NVCC)
    if(PAGEMILL_NVCC)
      set(ENV{CUDACXX} ${PAGEMILL_NVCC})
    endif()
  endif()
  include(CheckLanguage)
  check_language(CUDA)
endif()
if(NOT CMAKE_CUDA_COMPILER)
  set(cuda_reason "no working nvcc was found when the kernels were built")
  if(cuda_is_required)
    message(FATAL_ERROR "PAGEMILL_CUDA=${PAGEMILL_CUDA}: no working nvcc was found; put it on PATH or set CUDACXX")
  endif()
  message(STATUS "CUDA kernels: off, no working nvcc was found")
  return()
endif()
enable_language(CUDA)
# CMake before 3.26 does not know that nvcc has C++20.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
set(cuda_compiler ${CMAKE_CUDA_COMPILER_VERSION})
if(cuda_compiler VERSION_LESS 12.0)
  set(cuda_reason "nvcc ${cuda_compiler} is too old, 12.0 or newer is needed")
  if(cuda_is_required)
    message(FATAL_ERROR "PAGEMILL_CUDA=${PAGEMILL_CUDA}: ${cuda_reason}")
  endif()
  message(STATUS "CUDA kernels: off, ${cuda_reason}")
  return()
endif()

execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-code OUTPUT_VARIABLE known_codes)
string(REGEX MATCHALL "sm_[0-9]+[a-z]?" known_codes "${known_codes}")
set(cuda_architectures ${PAGEMILL_CUDA_ARCHITECTURES})
if(NOT cuda_architectures)
  set(cuda_architectures 80 86 89 90a)
  if("sm_100" IN_LIST known_codes)
    list(APPEND cuda_architectures 100)
  endif()
endif()

# Machine code for each; PTX, which later processors compile when they load it, for the last one that is not tied to its
# own generation by a letter.
set(architecture_flags)
set(portable_architecture "")
foreach(architecture ${cuda_architectures})
  if(NOT architecture MATCHES "^[1-9][0-9]+[af]?$")
    message(FATAL_ERROR "PAGEMILL_CUDA_ARCHITECTURES: ${architecture} is not an architecture; 80, 86, 89, 90a, 100 are")
  endif()
  string(REGEX REPLACE "[af]$" "" number ${architecture})
  if(number LESS 80)
    message(FATAL_ERROR "PAGEMILL_CUDA_ARCHITECTURES: ${architecture} is not supported; 80 is the oldest")
  endif()
  if(NOT "sm_${number}" IN_LIST known_codes)
    message(FATAL_ERROR "PAGEMILL_CUDA_ARCHITECTURES: nvcc ${cuda_compiler} does not know ${architecture}")
  endif()
  list(APPEND architecture_flags "SHELL:-gencode arch=compute_${architecture},code=sm_${architecture}")
  if(architecture STREQUAL number)
    set(portable_architecture ${number})
  endif()
endforeach()
if(portable_architecture)
  list(APPEND architecture_flags
       "SHELL:-gencode arch=compute_${portable_architecture},code=compute_${portable_architecture}")
endif()

file(GLOB cuda_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cuda/*.cu)
add_library(pagemill_cuda SHARED ${cuda_sources})
target_include_directories(pagemill_cuda PUBLIC include PRIVATE cuda)
target_compile_options(
  pagemill_cuda
  PRIVATE ${architecture_flags} --expt-relaxed-constexpr "SHELL:-Xfatbin -compress-all" -Xcompiler=-Wall)
if(PAGEMILL_DEVICE_CHECKS)
  target_compile_definitions(pagemill_cuda PRIVATE PAGEMILL_DEVICE_CHECKS)
endif()
# The runtime is linked in and finds the driver when it is first called, so the library loads on any machine. The
# version script keeps everything but the C functions inside: it can meet another copy of the runtime in one process.
set(exports ${CMAKE_CURRENT_SOURCE_DIR}/cuda/exports.map)
target_link_options(pagemill_cuda PRIVATE -Wl,--version-script=${exports} -Wl,--no-undefined)
set_target_properties(
  pagemill_cuda
  PROPERTIES CUDA_STANDARD 20
             CUDA_STANDARD_REQUIRED ON
             CUDA_RUNTIME_LIBRARY Static
             LINK_DEPENDS ${exports})
set(cuda_is_built ON)
list(JOIN cuda_architectures ", " shown)
message(STATUS "CUDA kernels: nvcc ${cuda_compiler}, architectures ${shown}")
