// Native work that lets other Python threads run.
#pragma once

#include <Python.h>

#if __has_include(<unistd.h>)
#include <unistd.h>
#endif

#include <exception>

namespace fastattn::bindings {

// Calls work() without the GIL, and passes its exception on.
//
// By hand, not by nb::gil_scoped_release: once the interpreter is being finalised, Python before
// 3.14 ends a daemon thread that asks for the GIL by pthread_exit(), whose unwinding would abort
// the process at the first noexcept function, such as a destructor that takes the GIL back. Such a
// thread hangs here until the process ends, as 3.14 lets it.
template <typename Work>
void without_gil(const Work& work) {
  std::exception_ptr failure;
  PyThreadState* const state = PyEval_SaveThread();
  try {
    work();
  } catch (...) {
    failure = std::current_exception();
  }
#if __has_include(<unistd.h>)
  try {
    PyEval_RestoreThread(state);
  } catch (...) {  // the unwinding, which a handler that never ends stops
    for (;;) pause();
  }
#else
  PyEval_RestoreThread(state);
#endif
  if (failure) std::rethrow_exception(failure);
}

}  // namespace fastattn::bindings
