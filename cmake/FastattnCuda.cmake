# Finds the CUDA toolkit and settles the architectures.
#
# Sets FASTATTN_HAVE_CUDA (ON/OFF) and FASTATTN_CUDA_SUMMARY (one line for the end of the configure
# output) and defines fastattn_add_cuda_sources() and fastattn_cuda_definitions().

if(DEFINED ENV{FASTATTN_CUDA} AND NOT "$ENV{FASTATTN_CUDA}" STREQUAL "")
  set(_cuda_default "$ENV{FASTATTN_CUDA}")
else()
  set(_cuda_default AUTO)
endif()
set(FASTATTN_CUDA "${_cuda_default}" CACHE STRING
  "The CUDA backend: AUTO (where a toolkit is found), ON (required) or OFF")
set_property(CACHE FASTATTN_CUDA PROPERTY STRINGS AUTO ON OFF)

string(TOUPPER "${FASTATTN_CUDA}" _cuda_wanted)
if(_cuda_wanted STREQUAL "AUTO")
elseif(_cuda_wanted MATCHES "^(ON|TRUE|YES|1)$")
  set(_cuda_wanted ON)
elseif(_cuda_wanted MATCHES "^(OFF|FALSE|NO|0)$")
  set(_cuda_wanted OFF)
else()
  message(FATAL_ERROR "FASTATTN_CUDA is '${FASTATTN_CUDA}', not one of AUTO, ON, OFF")
endif()

# One architecture list, first hit wins: -DCMAKE_CUDA_ARCHITECTURES, the environment's
# FASTATTN_CUDA_ARCHS and CUDAARCHS, the default. An empty value counts as not given. Must run before
# enable_language(CUDA), which would else pick the compiler's own default.
function(_fastattn_choose_architectures nvcc result)
  if(NOT "${CMAKE_CUDA_ARCHITECTURES}" STREQUAL "")
    set(_archs "${CMAKE_CUDA_ARCHITECTURES}")
  elseif(NOT "$ENV{FASTATTN_CUDA_ARCHS}" STREQUAL "")
    set(_archs "$ENV{FASTATTN_CUDA_ARCHS}")
  elseif(NOT "$ENV{CUDAARCHS}" STREQUAL "")
    set(_archs "$ENV{CUDAARCHS}")
  else()
    # Machine code for each generation from Turing on, as far as this toolkit knows it, and PTX of
    # the two newest families for GPUs that come later.
    execute_process(COMMAND "${nvcc}" --list-gpu-arch
      OUTPUT_VARIABLE _known RESULT_VARIABLE _failed ERROR_QUIET)
    set(_archs)
    foreach(_arch IN ITEMS 75-real 80-real 86-real 89-real 90-real 100 120)
      string(REGEX MATCH "^[0-9]+" _number "${_arch}")
      if(_failed OR _known MATCHES "compute_${_number}[^0-9a-z]")
        list(APPEND _archs ${_arch})
      endif()
    endforeach()
    if(NOT "120" IN_LIST _archs)  # an older toolkit: PTX of the newest that it has
      list(TRANSFORM _archs REPLACE "-real$" "" AT -1)
    endif()
  endif()
  # Commas and blanks are friendlier than semicolons in a shell.
  string(REGEX REPLACE "[, ]+" ";" _archs "${_archs}")
  set(${result} "${_archs}" PARENT_SCOPE)
endfunction()

set(FASTATTN_HAVE_CUDA OFF)
if(_cuda_wanted STREQUAL "OFF")
  set(FASTATTN_CUDA_SUMMARY "CPU backend only (FASTATTN_CUDA=OFF)")
else()
  if(NOT CMAKE_CUDA_COMPILER AND "$ENV{CUDACXX}" STREQUAL "")
    find_program(FASTATTN_NVCC nvcc
      HINTS ENV CUDA_HOME ENV CUDA_PATH ENV CUDAToolkit_ROOT
      PATHS /usr/local/cuda /opt/cuda
      PATH_SUFFIXES bin)
    mark_as_advanced(FASTATTN_NVCC)
    if(FASTATTN_NVCC)
      set(CMAKE_CUDA_COMPILER "${FASTATTN_NVCC}")
    endif()
  endif()
  if(CMAKE_CUDA_COMPILER)
    set(_nvcc "${CMAKE_CUDA_COMPILER}")
  else()
    set(_nvcc "$ENV{CUDACXX}")
  endif()
  if(_nvcc AND NOT EXISTS "${_nvcc}")
    find_program(_nvcc_on_path "${_nvcc}" NO_CACHE)
    if(NOT _nvcc_on_path)
      message(FATAL_ERROR "No such CUDA compiler: ${_nvcc}")
    endif()
    set(_nvcc "${_nvcc_on_path}")
  endif()
  if(_nvcc)
    _fastattn_choose_architectures("${_nvcc}" CMAKE_CUDA_ARCHITECTURES)
    enable_language(CUDA)
    # CMake would leave it to nvcc, which then takes its own default and only warns.
    if("native" IN_LIST CMAKE_CUDA_ARCHITECTURES AND
       NOT CMAKE_CUDA_ARCHITECTURES_NATIVE MATCHES "^[0-9]")
      message(FATAL_ERROR "No GPU for architecture 'native': name one, as 90, or FASTATTN_CUDA=OFF")
    endif()
    set(FASTATTN_HAVE_CUDA ON)
    string(REGEX MATCH "^[0-9]+\\.[0-9]+" FASTATTN_CUDA_TOOLKIT "${CMAKE_CUDA_COMPILER_VERSION}")
    string(REPLACE ";" " " _archs "${CMAKE_CUDA_ARCHITECTURES}")
    set(FASTATTN_CUDA_SUMMARY
      "CPU and CUDA backends (CUDA ${FASTATTN_CUDA_TOOLKIT}, architectures ${_archs})")
  elseif(_cuda_wanted STREQUAL "ON")
    # Short: CMake breaks a longer one into several lines.
    message(FATAL_ERROR "FASTATTN_CUDA=ON, but there is no nvcc (PATH, CUDA_HOME, CUDACXX)")
  else()
    set(FASTATTN_CUDA_SUMMARY "CPU backend only (no CUDA toolkit found; FASTATTN_CUDA=ON requires it)")
  endif()
endif()

# fastattn_cuda_kernel_sources(RESULT): the kernels' sources, read from the registry so that a new
# kernel is one line there and no line here. A kernel is kernels/STEM.cu or, a big one, the folder
# kernels/STEM/: all its .cu files, and one generated file for each line of its instances.def.
function(fastattn_cuda_kernel_sources result)
  set(_def "${PROJECT_SOURCE_DIR}/src/cuda/kernels.def")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${_def}")
  file(STRINGS "${_def}" _lines REGEX "^FASTATTN_CUDA_KERNEL\\(")
  set(_sources)
  foreach(_line IN LISTS _lines)
    string(REGEX REPLACE "^FASTATTN_CUDA_KERNEL\\([^,]+,[ ]*([A-Za-z0-9_]+)[ ]*\\).*" "\\1" _stem "${_line}")
    set(_path "${PROJECT_SOURCE_DIR}/src/cuda/kernels/${_stem}")
    if(IS_DIRECTORY "${_path}" AND NOT EXISTS "${_path}.cu")
      file(GLOB _files CONFIGURE_DEPENDS "${_path}/*.cu" "${_path}/instances.def")
      if("${_path}/instances.def" IN_LIST _files)
        list(REMOVE_ITEM _files "${_path}/instances.def")
        _fastattn_generate_instances("${_stem}" _instances)
        list(APPEND _files ${_instances})
      endif()
      list(APPEND _sources ${_files})
    else()
      list(APPEND _sources "${_path}.cu")
    endif()
  endforeach()
  set(${result} ${_sources} PARENT_SCOPE)
endfunction()

# For each FASTATTN_INSTANCE(HEADER, argument...) of a kernel's table, a file in the build tree that
# includes HEADER.cuh of the kernel's folder and expands its FASTATTN_INSTANTIATE_HEADER(argument...).
function(_fastattn_generate_instances stem result)
  set(_folder "cuda/kernels/${stem}")
  set(_table "${PROJECT_SOURCE_DIR}/src/${_folder}/instances.def")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${_table}")
  file(STRINGS "${_table}" _lines REGEX "^FASTATTN_INSTANCE")
  set(_sources)
  foreach(_line IN LISTS _lines)
    if(NOT _line MATCHES "^FASTATTN_INSTANCE\\(([A-Za-z0-9_]+),([^()]+)\\)")
      message(FATAL_ERROR "${_table}: '${_line}' is not FASTATTN_INSTANCE(header, argument...)")
    endif()
    set(_header "${CMAKE_MATCH_1}")
    string(STRIP "${CMAKE_MATCH_2}" _arguments)
    string(REGEX REPLACE "[^A-Za-z0-9]+" "_" _name "${stem}_${_header}_${_arguments}")
    set(_source "${PROJECT_BINARY_DIR}/instances/${_name}.cu")
    if(_source IN_LIST _sources)
      message(FATAL_ERROR "${_table}: '${_line}' stands there twice")
    endif()
    # Written only where it changes, so that configuring anew compiles nothing anew.
    file(CONFIGURE OUTPUT "${_source}" @ONLY CONTENT
"#include \"${_folder}/${_header}.cuh\"

namespace fastattn::cuda {
FASTATTN_INSTANTIATE_${_header}(${_arguments})
}  // namespace fastattn::cuda
")
    list(APPEND _sources "${_source}")
  endforeach()
  set(${result} ${_sources} PARENT_SCOPE)
endfunction()

function(fastattn_add_cuda_sources target)
  fastattn_cuda_kernel_sources(_kernels)
  target_sources(${target} PRIVATE "${PROJECT_SOURCE_DIR}/src/cuda/device.cu" ${_kernels})
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>")
  find_program(FASTATTN_CXXFILT NAMES cu++filt c++filt llvm-cxxfilt)
  mark_as_advanced(FASTATTN_CXXFILT)
  # A launcher that the user asked for (ccache ...) runs inside ours.
  set(_launcher "${CMAKE_COMMAND}" "-DCXXFILT=${FASTATTN_CXXFILT}"
    "-DINCLUDE_DIR=${PROJECT_SOURCE_DIR}/src"
    -P "${PROJECT_SOURCE_DIR}/cmake/ptxas_report.cmake" -- ${CMAKE_CUDA_COMPILER_LAUNCHER})
  set_target_properties(${target} PROPERTIES
    CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}"
    CUDA_RUNTIME_LIBRARY Static
    CUDA_COMPILER_LAUNCHER "${_launcher}")
endfunction()

# What src/core needs to know, by the names it uses. The strings are
# for host code only: nvcc has its own ideas of separators in -D.
function(fastattn_cuda_definitions result)
  set(_have 0)
  set(_archs)
  set(_toolkit)
  if(FASTATTN_HAVE_CUDA)
    set(_have 1)
    list(JOIN CMAKE_CUDA_ARCHITECTURES " " _archs)
    set(_toolkit "${FASTATTN_CUDA_TOOLKIT}")
  endif()
  set(_emulation 0)
  if(FASTATTN_HAVE_EMULATION)
    set(_emulation 1)
  endif()
  set(${result}
    FASTATTN_HAVE_CUDA=${_have}
    FASTATTN_HAVE_EMULATION=${_emulation}
    "$<$<COMPILE_LANGUAGE:CXX>:FASTATTN_CUDA_ARCHS=\"${_archs}\">"
    "$<$<COMPILE_LANGUAGE:CXX>:FASTATTN_CUDA_TOOLKIT=\"${_toolkit}\">" PARENT_SCOPE)
endfunction()
