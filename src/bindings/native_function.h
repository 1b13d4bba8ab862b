// A C function that stands for a Python function: called without a Python frame.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <string>

namespace fastattn::bindings {

namespace nb = nanobind;

// The parameters of a Python function without a body of its own, whose values a call is bound to.
class Signature {
 public:
  static constexpr std::size_t kMost = 10;
  using Values = std::array<PyObject*, kMost>;  // borrowed, in the order of the parameters

  // Positional parameters without defaults, then keyword-only ones with. Kept for good.
  explicit Signature(nb::object declaration);

  // By the vectorcall protocol. False where Python itself would refuse the call.
  bool bind(PyObject* const* arguments, std::size_t count, PyObject* keywords,
            Values& values) const;

  // Raises Python's own TypeError for a call that bind() refused: by making it.
  [[nodiscard]] PyObject* refuse(PyObject* const* arguments, std::size_t count,
                                 PyObject* keywords) const;

 private:
  [[nodiscard]] std::size_t index_of(PyObject* keyword) const;

  PyObject* declaration_;
  std::size_t size_ = 0;
  std::size_t positional_ = 0;
  Values names_{};
  Values defaults_{};  // null: required
};

// `call` as a builtin function of the declaration's name and module; `text` becomes its
// __text_signature__ and __doc__.
nb::object builtin_function(nb::handle declaration, const std::string& text,
                            _PyCFunctionFastWithKeywords call);

}  // namespace fastattn::bindings
