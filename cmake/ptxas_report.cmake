# Compiler launcher for kernels: runs the compiler and turns what `ptxas -v` says into one line per
# kernel and architecture. A spill, or WGMMA instructions that ptxas serialised, fail the build.
#
#   cmake [-D CXXFILT=path] [-D INCLUDE_DIR=path]
#     -P ptxas_report.cmake -- nvcc ... -c kernel.cu -o kernel.o
#
# A kernel that is better off with spills says so in its .cu, or in the header under kernels/ that
# its .cu includes: `// spills allowed: REASON`. INCLUDE_DIR: where its includes are looked up.
# CMake script, so that a C++-only user needs no Python.
cmake_minimum_required(VERSION 3.26)

# The command is rebuilt from bracket arguments: paths may hold blanks, semicolons and brackets.
set(_command)
set(_seen_separator FALSE)
set(_device_debug FALSE)
set(_previous)
math(EXPR _last "${CMAKE_ARGC} - 1")
foreach(_index RANGE 0 ${_last})
  set(_argument "${CMAKE_ARGV${_index}}")
  if(NOT _seen_separator)
    if(_argument STREQUAL "--")
      set(_seen_separator TRUE)
    endif()
    continue()
  endif()
  string(APPEND _command " [====[${_argument}]====]")
  if(_argument MATCHES "\\.cu$")
    set(_source "${_argument}")
  elseif(_previous STREQUAL "-o")
    set(_object "${_argument}")
  elseif(_argument MATCHES "^(-G|--device-debug)$")
    set(_device_debug TRUE)
  endif()
  set(_previous "${_argument}")
endforeach()

cmake_language(EVAL CODE "
  execute_process(COMMAND ${_command}
    RESULT_VARIABLE _result OUTPUT_VARIABLE _stdout ERROR_VARIABLE _stderr)")
set(_output "${_stdout}${_stderr}")

# Semicolons and brackets would break the text up wrongly as a list of lines.
string(REPLACE ";" "\\;" _output "${_output}")
string(REPLACE "[" "<" _output "${_output}")
string(REPLACE "]" ">" _output "${_output}")
string(REPLACE "\n" ";" _output "${_output}")

get_filename_component(_file "${_source}" NAME)
set(_other)       # whatever isn't ptxas's report: warnings, errors
set(_problems)
set(_kernel)
set(_spill_bytes 0)
foreach(_line IN LISTS _output)
  if(_line MATCHES "^ptxas info +: Compiling entry function '([^']+)' for '(sm_[0-9a-z]+)'")
    set(_kernel "${CMAKE_MATCH_1}")
    set(_arch "${CMAKE_MATCH_2}")
    set(_stack 0)
    set(_spill_bytes 0)
    if(CXXFILT)
      execute_process(COMMAND "${CXXFILT}" "${_kernel}"
        OUTPUT_VARIABLE _kernel OUTPUT_STRIP_TRAILING_WHITESPACE)
      # Without namespaces, return type and parameters: `forward<64>`.
      string(REPLACE "(anonymous namespace)::" "" _kernel "${_kernel}")
      string(REGEX REPLACE "\\(int\\)|\\(bool\\)" "" _kernel "${_kernel}")
      string(REGEX REPLACE "\\(.*$" "" _kernel "${_kernel}")
      string(REGEX REPLACE "^void " "" _kernel "${_kernel}")
      string(REPLACE "fastattn::cuda::" "" _kernel "${_kernel}")
    endif()
  elseif(_line MATCHES "([0-9]+) bytes stack frame, ([0-9]+) bytes spill stores, ([0-9]+) bytes spill loads")
    # Functions that were not inlined are listed too; they count for the kernel they follow.
    math(EXPR _stack "${CMAKE_MATCH_1}")
    math(EXPR _spill_bytes "${_spill_bytes} + ${CMAKE_MATCH_2} + ${CMAKE_MATCH_3}")
  elseif(_line MATCHES "^ptxas info +: Used ([0-9]+) registers")
    set(_text "${CMAKE_MATCH_1} registers, ${_spill_bytes} bytes spilled")
    if(_stack GREATER 0)
      string(APPEND _text ", ${_stack} bytes of stack")
    endif()
    if(_line MATCHES "([0-9]+) bytes smem")
      string(APPEND _text ", ${CMAKE_MATCH_1} bytes of static shared memory")
    endif()
    message(NOTICE "ptxas ${_file} ${_arch} ${_kernel}: ${_text}")
    if(_spill_bytes GREATER 0)
      list(APPEND _problems "${_kernel} spills ${_spill_bytes} bytes on ${_arch}")
    endif()
  elseif(_line MATCHES "wgmma.*serialized")
    list(APPEND _problems "ptxas serialised WGMMA: ${_line}")
  elseif(_line MATCHES "^ptxas info +:" OR _line STREQUAL "")
    # Constants, function names, compile time: not needed.
  else()
    string(APPEND _other "${_line}\n")
  endif()
endforeach()

if(_other)
  string(STRIP "${_other}" _other)
  message(NOTICE "${_other}")
endif()
if(NOT _result EQUAL 0)
  message(FATAL_ERROR "${_file}: the CUDA compiler failed (${_result})")
endif()

if(_problems AND NOT _device_debug)  # -G turns optimisation off: spills mean nothing
  set(_wanted "// spills allowed: .*[a-z]")
  file(STRINGS "${_source}" _excuse REGEX "${_wanted}" LIMIT_COUNT 1)
  if(NOT _excuse AND INCLUDE_DIR)
    file(STRINGS "${_source}" _includes REGEX "^#include \"cuda/kernels/[^\"]+\"")
    foreach(_line IN LISTS _includes)
      string(REGEX REPLACE "^#include \"([^\"]+)\".*" "\\1" _header "${_line}")
      file(STRINGS "${INCLUDE_DIR}/${_header}" _found REGEX "${_wanted}" LIMIT_COUNT 1)
      list(APPEND _excuse ${_found})
    endforeach()
  endif()
  if(_excuse)
    list(FILTER _problems EXCLUDE REGEX " spills [0-9]+ bytes on ")
  endif()
  if(_problems)
    if(_object)
      file(REMOVE "${_object}")  # or make would take it as built
    endif()
    list(JOIN _problems "\n  " _problems)
    message(FATAL_ERROR
      "${_file}:\n  ${_problems}\n"
      "Lower the register use, or say why in the file: // spills allowed: REASON")
  endif()
endif()
