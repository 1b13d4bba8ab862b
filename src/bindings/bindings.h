// The parts of the Python module `fastattn._core`.
#pragma once

#include <nanobind/nanobind.h>

#include "fastattn/fastattn.h"

namespace fastattn::bindings {

// Sets the Python exception that stands for the error.
void set_python_error(const ArgumentError& error);

// Checked; throws Python's exceptions.
Mask to_mask(nanobind::handle causal, nanobind::handle window);

// configure() and native_forward().
void bind_attention(nanobind::module_& m);

// kernels(), plan(), build_info(), cuda_devices(), cuda_driver_version(), cpu_threads().
void bind_info(nanobind::module_& m);

// CudaBuffer, CudaEvent, synchronize(): a GPU without a framework.
void bind_cuda_tools(nanobind::module_& m);

// emulate(): only in builds with the emulation.
void bind_emulation(nanobind::module_& m);

}  // namespace fastattn::bindings
