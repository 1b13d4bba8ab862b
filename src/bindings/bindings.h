// The parts of the Python module `fastattn._core`.
#pragma once

#include <nanobind/nanobind.h>

namespace fastattn::bindings {

// configure() and forward().
void bind_attention(nanobind::module_& m);

// kernels(), plan(), build_info(), cuda_devices(), cuda_driver_version(), cpu_threads().
void bind_info(nanobind::module_& m);

// CudaBuffer, CudaEvent, synchronize(): a GPU without a framework.
void bind_cuda_tools(nanobind::module_& m);

}  // namespace fastattn::bindings
