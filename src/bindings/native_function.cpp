#include "bindings/native_function.h"

#include <stdexcept>
#include <utility>

namespace fastattn::bindings {

Signature::Signature(nb::object declaration) : declaration_(declaration.release().ptr()) {
  const nb::handle function(declaration_);
  const nb::object code = function.attr("__code__");
  positional_ = nb::cast<std::size_t>(code.attr("co_argcount"));
  size_ = positional_ + nb::cast<std::size_t>(code.attr("co_kwonlyargcount"));
  if (size_ > kMost) throw std::length_error("declaration: too many parameters");
  for (std::size_t i = 0; i < size_; ++i) {
    names_[i] = nb::object(code.attr("co_varnames")[i]).release().ptr();
    if (i < positional_) continue;
    defaults_[i] =
        nb::object(function.attr("__kwdefaults__")[nb::handle(names_[i])]).release().ptr();
  }
}

std::size_t Signature::index_of(PyObject* keyword) const {
  // Names in source code are interned, so that one object stands for each.
  for (std::size_t i = 0; i < size_; ++i) {
    if (names_[i] == keyword) return i;
  }
  for (std::size_t i = 0; i < size_; ++i) {
    if (PyUnicode_Compare(names_[i], keyword) == 0) return i;
  }
  return size_;
}

bool Signature::bind(PyObject* const* arguments, std::size_t count, PyObject* keywords,
                     Values& values) const {
  if (count > positional_) return false;
  values = {};
  for (std::size_t i = 0; i < count; ++i) values[i] = arguments[i];
  const Py_ssize_t keyword_count = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t i = 0; i < keyword_count; ++i) {
    const std::size_t index = index_of(PyTuple_GET_ITEM(keywords, i));
    if (index == size_ || values[index] != nullptr) return false;
    values[index] = arguments[count + static_cast<std::size_t>(i)];
  }
  for (std::size_t i = 0; i < size_; ++i) {
    if (values[i] == nullptr) values[i] = defaults_[i];
    if (values[i] == nullptr) return false;
  }
  return true;
}

PyObject* Signature::refuse(PyObject* const* arguments, std::size_t count,
                            PyObject* keywords) const {
  return PyObject_Vectorcall(declaration_, arguments, count, keywords);
}

nb::object builtin_function(nb::handle declaration, const std::string& text,
                            _PyCFunctionFastWithKeywords call) {
  // Python keeps pointers to both; a function lives as long as the process.
  const auto* name = new std::string(nb::cast<nb::str>(declaration.attr("__name__")).c_str());
  auto* method =
      new PyMethodDef{.ml_name = name->c_str(),
                      .ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)),
                      .ml_flags = METH_FASTCALL | METH_KEYWORDS,
                      .ml_doc = (new std::string(text))->c_str()};
  const nb::object module_name = declaration.attr("__module__");
  nb::object function = nb::steal(PyCFunction_NewEx(method, nullptr, module_name.ptr()));
  if (!function.is_valid()) throw nb::python_error();
  return function;
}

}  // namespace fastattn::bindings
