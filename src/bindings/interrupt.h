// Ctrl-C ends an emulated call, which may take minutes.
#pragma once

#if FASTATTN_HAVE_EMULATION

#include <nanobind/nanobind.h>

#include "emulation/emulation.h"

namespace fastattn::bindings {

// While this lives, emulated launches of this thread look for signals between their blocks. The GIL
// is held when it is made.
class Interruptible {
 public:
  Interruptible() : before_(emulation::set_pause(is_main_thread() ? &check_signals : nullptr)) {}
  ~Interruptible() { emulation::set_pause(before_); }
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

 private:
  // Python handles signals there alone. Another thread must not ask for the GIL here, since it may
  // be told to end while Python does.
  static bool is_main_thread() {
    const nanobind::object threading = nanobind::module_::import_("threading");
    return threading.attr("current_thread")().is(threading.attr("main_thread")());
  }
  static void check_signals() {
    const nanobind::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
  }

  emulation::Pause before_;
};

}  // namespace fastattn::bindings

#endif
