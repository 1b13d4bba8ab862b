# Warnings for our own targets only: never exported, never on by default as errors, so that a new
# compiler can't break a user's install.
function(fastattn_set_warnings target)
  set(_flags -Wall -Wextra)
  if(FASTATTN_WARNINGS_AS_ERRORS)
    list(APPEND _flags -Werror)
  endif()
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang,AppleClang>:${_flags}>")
  if(FASTATTN_WARNINGS_AS_ERRORS)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>")
  endif()
endfunction()
