#pragma once

#include <nanobind/nanobind.h>

namespace fastattn::bindings {

// xla_targets() and xla_target(): what _jax.py needs.
void bind_xla_ffi(nanobind::module_& m);

}  // namespace fastattn::bindings
