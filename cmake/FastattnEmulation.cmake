# Settles whether the CUDA kernels can be emulated on this host: FASTATTN_HAVE_EMULATION.

option(FASTATTN_EMULATION "Build the CUDA kernels for the host as well, emulated and checked" ON)

set(FASTATTN_HAVE_EMULATION OFF)
if(FASTATTN_EMULATION)
  include(CheckCXXSymbolExists)
  check_cxx_symbol_exists(makecontext ucontext.h FASTATTN_HAVE_MAKECONTEXT)
  if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux" OR NOT CMAKE_CXX_COMPILER_ID MATCHES "^(GNU|Clang)$")
    message(STATUS "No emulation of the CUDA kernels: it needs Linux, and GCC or Clang")
  elseif(NOT FASTATTN_HAVE_MAKECONTEXT)
    message(STATUS "No emulation of the CUDA kernels: this C library has no makecontext")
  elseif(CMAKE_CXX_FLAGS MATCHES "-fsanitize=")
    message(STATUS "No emulation of the CUDA kernels: it can't share a process with a sanitizer")
  else()
    set(FASTATTN_HAVE_EMULATION ON)
  endif()
endif()
