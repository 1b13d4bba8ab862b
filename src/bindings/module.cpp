#include <nanobind/nanobind.h>

#include "bindings/bindings.h"
#include "bindings/xla_ffi.h"
#include "fastattn/fastattn.h"

namespace nb = nanobind;

namespace {

PyObject* python_type(fastattn::ArgumentError::Kind kind) {
  switch (kind) {
    case fastattn::ArgumentError::Kind::kType:
      return PyExc_TypeError;
    case fastattn::ArgumentError::Kind::kUnsupported:
      return PyExc_NotImplementedError;
    case fastattn::ArgumentError::Kind::kValue:
      break;
  }
  return PyExc_ValueError;
}

}  // namespace

void fastattn::bindings::set_python_error(const ArgumentError& error) {
  PyErr_SetString(python_type(error.kind()), error.what());
}

NB_MODULE(_core, m) {
  m.doc() = "The native half of fastattn. Private: use the functions of the package.";
  // CudaError needs no entry: it is a runtime_error, which nanobind raises as RuntimeError.
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const fastattn::ArgumentError& error) {
      fastattn::bindings::set_python_error(error);
    }
  });
  fastattn::bindings::bind_attention(m);
  fastattn::bindings::bind_info(m);
  fastattn::bindings::bind_cuda_tools(m);
#if FASTATTN_HAVE_EMULATION
  fastattn::bindings::bind_emulation(m);
#endif
  fastattn::bindings::bind_xla_ffi(m);
}
