// forward(): from Python's arguments to ForwardParams, and the result back.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <limits>
#include <new>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/interrupt.h"
#include "bindings/native_function.h"
#include "bindings/tensor.h"
#include "bindings/without_gil.h"

#if FASTATTN_HAVE_CUDA
#include "bindings/in_flight.h"
#endif

namespace fastattn::bindings {
namespace {

// numpy.bool_ and numbers.Real: what Python's own bool and float do not cover.
PyObject* numpy_bool = nullptr;
PyObject* real_number = nullptr;

void configure(nb::object resolve, nb::object bool_type, nb::object real_type) {
  set_resolver(std::move(resolve));
  numpy_bool = bool_type.release().ptr();
  real_number = real_type.release().ptr();
}

std::string short_repr(nb::handle object) {
  std::string text = utf8(nb::repr(object));
  std::size_t size = 80;
  if (text.size() <= size) return text;
  // A cut inside of a code point would be no text: back to where one begins.
  while ((static_cast<unsigned char>(text[size]) & 0xC0U) == 0x80U) --size;
  return text.substr(0, size) + "...";
}

std::string found(const char* name, nb::handle object) {
  return std::string(name) + ": got " + short_repr(object) + " of type " +
         Py_TYPE(object.ptr())->tp_name;
}

bool to_flag(nb::handle object, const char* name) {
  if (object.ptr() == Py_True) return true;
  if (object.ptr() == Py_False) return false;
  if (reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) != numpy_bool) {
    wrong_type(found(name, object) + ", takes True or False");
  }
  return PyObject_IsTrue(object.ptr()) == 1;
}

float to_scale(nb::handle object, std::int64_t head_dim) {
  if (object.is_none()) return static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
  if (!PyFloat_Check(object.ptr())) {
    const int is_real = PyObject_IsInstance(object.ptr(), real_number);
    if (is_real < 0) throw nb::python_error();
    if (is_real == 0 || PyBool_Check(object.ptr())) {
      wrong_type(found("scale", object) + ", takes a real number or None");
    }
  }
  const double value = PyFloat_AsDouble(object.ptr());
  if (PyErr_Occurred() != nullptr) {
    if (PyErr_ExceptionMatches(PyExc_OverflowError) == 0) throw nb::python_error();
    PyErr_Clear();
    wrong_value("scale: got a number beyond float64, takes a number that is finite in float32");
  }
  const auto scale = static_cast<float>(value);
  if (!std::isfinite(scale)) {
    wrong_value("scale: got " + short_repr(object) + ", takes a number that is finite in float32");
  }
  return scale;
}

// One side of the window. What no int holds is no limit: sequences are shorter than that.
int to_window_side(nb::handle object, nb::handle window) {
  const nb::object index =
      nb::steal(PyBool_Check(object.ptr()) ? nullptr : PyNumber_Index(object.ptr()));
  if (!index.is_valid()) {
    if (PyErr_Occurred() != nullptr && PyErr_ExceptionMatches(PyExc_TypeError) == 0) {
      throw nb::python_error();
    }
    PyErr_Clear();
    wrong_type(found("window", window) + ", takes None or a pair of integers (left, right)");
  }
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow > 0 || value > std::numeric_limits<int>::max()) return -1;
  if (overflow < 0 || value < -1) {
    wrong_value("window: got " + short_repr(window) + ", takes numbers from -1 (no limit)");
  }
  return static_cast<int>(value);
}

}  // namespace

Mask to_mask(nb::handle causal, nb::handle window) {
  Mask mask{.causal = to_flag(causal, "causal")};
  if (window.is_none()) return mask;
  const bool is_tuple = PyTuple_Check(window.ptr());
  if (!is_tuple && !PyList_Check(window.ptr())) {
    wrong_type(found("window", window) + ", takes None or a pair of integers (left, right)");
  }
  // The items themselves, whatever a subclass says of them, and both before either runs code
  // (__index__) that could change a list.
  const Py_ssize_t size = is_tuple ? PyTuple_GET_SIZE(window.ptr()) : PyList_GET_SIZE(window.ptr());
  if (size != 2) {
    wrong_value("window: got " + std::to_string(size) + " numbers, takes two: (left, right)");
  }
  const auto item = [&](Py_ssize_t i) {
    return nb::borrow(is_tuple ? PyTuple_GET_ITEM(window.ptr(), i)
                               : PyList_GET_ITEM(window.ptr(), i));
  };
  const nb::object left = item(0);
  const nb::object right = item(1);
  mask.window_left = to_window_side(left, window);
  mask.window_right = to_window_side(right, window);
  return mask;
}

namespace {

std::string_view to_kernel_name(nb::handle object) {
  if (!PyUnicode_Check(object.ptr())) wrong_type(found("kernel", object) + ", takes a string");
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (text == nullptr) throw nb::python_error();
  return {text, static_cast<std::size_t>(size)};
}

// A cudaStream_t from an integer or from any framework's stream object; empty for None.
std::optional<void*> to_stream(nb::handle object) {
  if (object.is_none()) return std::nullopt;
  nb::object value = nb::borrow(object);
  if (!PyLong_Check(object.ptr())) {
    if (nb::hasattr(object, "__cuda_stream__")) {
      const nb::object pair = object.attr("__cuda_stream__")();  // (protocol version, handle)
      if (!PyTuple_Check(pair.ptr()) || PyTuple_GET_SIZE(pair.ptr()) != 2) {
        wrong_type("stream: __cuda_stream__() returned " + short_repr(pair) +
                   ", takes a pair (version, handle)");
      }
      value = nb::borrow(PyTuple_GET_ITEM(pair.ptr(), 1));
    } else if (nb::hasattr(object, "cuda_stream")) {
      value = object.attr("cuda_stream");
    } else if (nb::hasattr(object, "ptr")) {
      value = object.attr("ptr");
    }
  }
  if (!PyLong_Check(value.ptr()) || PyBool_Check(value.ptr())) {
    wrong_type(found("stream", object) +
               ", takes None, an integer, or an object with __cuda_stream__(), .cuda_stream or "
               ".ptr");
  }
  const long long handle = PyLong_AsLongLong(value.ptr());
  if (handle < 0) {  // also what does not fit
    PyErr_Clear();
    wrong_value("stream: got " + short_repr(value) +
                ", takes 0 or 1 (legacy default stream), 2 "
                "(per-thread default stream) or a stream's handle");
  }
  // 1 is DLPack's name, and CUDA's, of the stream that 0 is; one name makes them comparable.
  return std::bit_cast<void*>(static_cast<std::intptr_t>(handle == 1 ? 0 : handle));
}

// The stream on which the framework of `q` enqueues its own work now.
void* current_stream(const ArrayType& type, const Device& device) {
  void* stream = nullptr;
  if (type.path == Path::kExchange) {
    if (type.exchange->current_work_stream(kDLCUDA, device.ordinal, &stream) != 0) {
      throw nb::python_error();
    }
  } else if (type.path == Path::kNoSync) {
    stream = to_stream(type.adapter.attr("current_stream")(device.ordinal)).value_or(nullptr);
  }
  return stream;
}

// --- checks --------------------------------------------------------------------------------------

void same_size(const Tensor& tensor, int dim, const char* what, const Tensor& other,
               int other_dim) {
  const std::int64_t size = tensor.shape[static_cast<std::size_t>(dim)];
  const std::int64_t wanted = other.shape[static_cast<std::size_t>(other_dim)];
  if (size != wanted) {
    wrong_value(std::string(tensor.name) + ": got shape " + tensor.shape_text() + ", " + what +
                " " + std::to_string(size) + " is not the " + std::to_string(wanted) + " of " +
                other.name + " " + other.shape_text());
  }
}

void same_dtype(const Tensor& tensor, const Tensor& q) {
  if (tensor.dtype != q.dtype) {
    wrong_type(std::string(tensor.name) + ": got dtype " + std::string(to_string(tensor.dtype)) +
               ", takes that of q, " + std::string(to_string(q.dtype)));
  }
}

void same_device(const Tensor& tensor, const Tensor& q) {
  if (tensor.device != q.device) {
    wrong_value(std::string(tensor.name) + ": on " + to_string(tensor.device) +
                ", takes the device of q, " + to_string(q.device));
  }
}

void check_inputs(const Tensor& q, const Tensor& k, const Tensor& v) {
  for (const Tensor* tensor : {&k, &v}) {
    same_dtype(*tensor, q);
    same_device(*tensor, q);
    same_size(*tensor, 0, "batch size", q, 0);
  }
  same_size(k, 3, "head_dim", q, 3);
  same_size(v, 1, "head count", k, 1);
  same_size(v, 2, "length", k, 2);
}

// Elements as numbers, counted from address 0, that a view occupies; for one dtype they compare.
struct Footprint {
  struct Dim {
    std::int64_t stride;  // not negative
    std::int64_t size;
  };

  std::int64_t first;  // the lowest
  std::int64_t row;    // elements of a row, which are contiguous
  std::array<Dim, kRank - 1> dims;

  explicit Footprint(const Tensor& tensor)
      : first(static_cast<std::int64_t>(std::bit_cast<std::uintptr_t>(tensor.data) /
                                        tensor.item_size())),
        row(tensor.shape[3]) {
    for (std::size_t i = 0; i < dims.size(); ++i) {
      const std::int64_t stride = tensor.stride[i];
      if (stride < 0) first += stride * (tensor.shape[i] - 1);
      dims[i] = {.stride = stride < 0 ? -stride : stride, .size = tensor.shape[i]};
    }
  }

  // From the first element of a row to behind its last, with all dimensions of smaller strides.
  [[nodiscard]] std::int64_t extent(std::int64_t below) const {
    std::int64_t last = row;
    for (const auto& [stride, size] : dims) {
      if (stride < below) last += stride * (size - 1);
    }
    return last;
  }
  [[nodiscard]] std::int64_t end() const {
    return first + extent(std::numeric_limits<std::int64_t>::max());
  }
};

// Whether the views interleave: the dimensions of strides from `from` on are steps by multiples of
// one period, within which the blocks that the others make up are apart.
bool interleave(const Footprint& a, const Footprint& b, std::int64_t from) {
  std::int64_t period = 0;
  for (const Footprint* view : {&a, &b}) {
    for (const auto& [stride, size] : view->dims) {
      if (size > 1 && stride >= from) period = std::gcd(period, stride);
    }
  }
  if (period == 0) return false;
  const std::int64_t ahead = ((b.first - a.first) % period + period) % period;
  return ahead >= a.extent(from) && ahead + b.extent(from) <= period;
}

// Whether a write to one may change the other: also where neither can be shown.
bool share_memory(const Tensor& a_tensor, const Tensor& b_tensor) {
  if (a_tensor.is_empty() || b_tensor.is_empty()) return false;
  const Footprint a(a_tensor);
  const Footprint b(b_tensor);
  if (a.end() <= b.first || b.end() <= a.first) return false;  // nearly always
  for (const Footprint* view : {&a, &b}) {
    for (const auto& [stride, size] : view->dims) {
      if (size > 1 && stride > 0 && interleave(a, b, stride)) return false;
    }
  }
  return true;
}

// The first dimension whose steps may lead to elements that the dimensions of smaller strides
// reach too; kRank where each element has memory of its own.
std::size_t overlapping_dim(const Tensor& tensor) {
  if (tensor.is_empty()) return kRank;
  const auto step = [&](std::size_t i) {
    return tensor.stride[i] < 0 ? -tensor.stride[i] : tensor.stride[i];
  };
  std::array<std::size_t, kRank - 1> order = {2, 1, 0};  // nearly always
  std::ranges::stable_sort(order, {}, step);
  std::int64_t farthest = tensor.shape[3] - 1;
  for (const std::size_t i : order) {
    if (tensor.shape[i] == 1) continue;
    if (step(i) <= farthest) return i;
    farthest += step(i) * (tensor.shape[i] - 1);
  }
  return kRank;
}

void check_out(const Tensor& out, bool is_ours, const Tensor& q, const Tensor& k, const Tensor& v) {
  same_dtype(out, q);
  same_device(out, q);
  if (out.read_only) wrong_value("out: the array is read-only");
  for (int dim = 0; dim < 3; ++dim) same_size(out, dim, "size", q, dim);
  same_size(out, 3, "head_dim", v, 3);
  if (!out.rows_are_contiguous()) {
    wrong_value("out: the last dimension has stride " + std::to_string(out.stride[3]) +
                ", takes stride 1");
  }
  if (is_ours) return;  // new memory, each element of it once
  if (const std::size_t dim = overlapping_dim(out); dim != kRank) {
    wrong_value("out: elements may share memory (stride " + std::to_string(out.stride[dim]) +
                " in dimension " + std::to_string(dim) + ")");
  }
  for (const Tensor* input : {&q, &k, &v}) {
    if (share_memory(out, *input)) {
      wrong_value("out: shares memory with " + std::string(input->name) +
                  ", which is still read while out is written");
    }
  }
}

// --- the call ------------------------------------------------------------------------------------

// One of the caller's arrays.
struct Operand {
  nb::object object;  // or the copy that stands for it
  Tensor tensor;
  bool foreign = false;  // of another framework than q

  bool is_ours = false;  // not the caller's own

  void read(const ArrayType& type, nb::handle array, const char* name, void* stream) {
    object = nb::borrow(array);
    tensor.read(type, object, name, stream, foreign, is_ours);
  }
};

struct Launch {
  void* stream = nullptr;
  bool elsewhere = false;  // not on the current stream of q's framework

  // What the adapters' allocators are told: None is their current stream.
  [[nodiscard]] nb::object argument() const {
    if (!elsewhere) return nb::none();
    return nb::int_(std::bit_cast<std::intptr_t>(stream));
  }
};

Launch choose_stream(const Tensor& q, std::optional<void*> wanted) {
  if (q.device.backend == Backend::kCpu) {
    if (wanted) wrong_value("stream: takes None for arrays on the CPU");
    return {};
  }
  if (q.type->path == Path::kStream) return {.stream = wanted.value_or(nullptr)};
  void* const current = current_stream(*q.type, q.device);
  if (!wanted) return {.stream = current};
  return {.stream = *wanted, .elsewhere = *wanted != current};
}

// The kernels read rows of contiguous elements; the framework copies what is laid out otherwise.
void make_rows_contiguous(std::optional<Operand>& operand, const Launch& launch) {
  const Tensor& tensor = operand->tensor;
  if (tensor.rows_are_contiguous()) return;
  const ArrayType& type = *tensor.type;
  const char* const name = tensor.name;
  const bool foreign = operand->foreign;
  const nb::object copy = type.adapter.attr("contiguous")(operand->object, launch.argument());
  if (copy.is_none()) {
    wrong_value(std::string(name) + ": the last dimension has stride " +
                std::to_string(tensor.stride[3]) + ", takes stride 1; make a contiguous copy");
  }
  operand.emplace();
  operand->foreign = foreign;
  operand->is_ours = true;
  operand->read(type, copy, name, launch.stream);
}

// A new array in C order, of the kind of q.
nb::object allocate(const Operand& q, std::span<const std::int64_t> shape, DType dtype,
                    const Launch& launch) {
  const Tensor& like = q.tensor;
  const ArrayType& type = *like.type;
  if (type.allocates_by_exchange()) {
    return allocate_by_exchange(type, like, dtype, static_cast<int>(shape.size()), shape.data());
  }
  if (type.new_empty.is_none() || launch.elsewhere) {
    const nb::tuple sizes = shape.size() == kRank
                                ? nb::make_tuple(shape[0], shape[1], shape[2], shape[3])
                                : nb::make_tuple(shape[0], shape[1], shape[2]);
    return type.adapter.attr("empty")(q.object, sizes, to_string(dtype), launch.argument());
  }
  static PyObject* const dtype_keyword = Py_BuildValue("(s)", "dtype");
  std::array<nb::object, kRank> sizes;
  std::array<PyObject*, kRank + 2> arguments = {q.object.ptr()};
  std::size_t count = 1;
  for (const std::int64_t size : shape) {
    sizes[count - 1] = nb::int_(size);
    arguments[count] = sizes[count - 1].ptr();
    ++count;
  }
  const bool same_dtype = dtype == like.dtype;
  arguments[count] = type.float32.ptr();  // the one that differs is that of lse
  nb::object array = nb::steal(PyObject_Vectorcall(type.new_empty.ptr(), arguments.data(), count,
                                                   same_dtype ? nullptr : dtype_keyword));
  if (!array.is_valid()) throw nb::python_error();
  return array;
}

nb::object allocate_out(const Operand& q, std::int64_t head_dim_v, const Launch& launch) {
  const Tensor& like = q.tensor;
  const std::array<std::int64_t, kRank> shape = {like.shape[0], like.shape[1], like.shape[2],
                                                 head_dim_v};
  // empty_like keeps the order of q's dimensions, which is a layout that we write where q is dense.
  if (!like.type->empty_like.is_none() && !launch.elsewhere && shape == like.shape &&
      like.is_dense()) {
    nb::object array = nb::steal(PyObject_CallOneArg(like.type->empty_like.ptr(), q.object.ptr()));
    if (!array.is_valid()) throw nb::python_error();
    return array;
  }
  return allocate(q, shape, like.dtype, launch);
}

nb::object allocate_lse(const Operand& q, const Launch& launch) {
  return allocate(q, std::span(q.tensor.shape).first<kRank - 1>(), DType::kFloat32, launch);
}

#if FASTATTN_HAVE_CUDA
// Memory that goes back to its allocator in the order of the launch stream may be freed right after
// the call. The rest is kept until the work is done.
void keep_alive(std::initializer_list<const Operand*> operands, const Device& device,
                const Launch& launch) {
  std::vector<nb::object> kept;
  for (const Operand* operand : operands) {
    const ArrayType& type = *operand->tensor.type;
    if (!launch.elsewhere && !operand->foreign && type.path != Path::kStream) continue;
    const bool recorded =
        launch.elsewhere && !operand->foreign &&
        nb::cast<bool>(type.adapter.attr("record_stream")(operand->object, launch.argument()));
    if (!recorded) kept.push_back(operand->tensor.owner(operand->object));
  }
  if (!kept.empty()) hold_until_done(device.ordinal, launch.stream, std::move(kept));
}
#endif

nb::object forward(nb::handle q_array, nb::handle k_array, nb::handle v_array, nb::handle kernel,
                   nb::handle causal, nb::handle window, nb::handle scale, nb::handle return_lse,
                   nb::handle out_array, nb::handle stream) {
  const ArrayType& q_type = array_type(q_array, "q");
  const ArrayType& k_type = array_type(k_array, "k");
  const ArrayType& v_type = array_type(v_array, "v");
  for (const ArrayType* type : {&q_type, &k_type, &v_type}) {
    if (type->path == Path::kTraced) {
      to_kernel_name(kernel);
      const Mask mask = to_mask(causal, window);
      const nb::object factor =
          scale.is_none() ? nb::none() : nb::object(nb::float_(to_scale(scale, 1)));
      return type->adapter.attr("forward")(q_array, k_array, v_array, kernel, mask.causal,
                                           nb::make_tuple(mask.window_left, mask.window_right),
                                           factor, to_flag(return_lse, "return_lse"), out_array,
                                           stream);
    }
  }

  const std::optional<void*> wanted_stream = to_stream(stream);
  std::optional<Operand> q(std::in_place);
  std::optional<Operand> k(std::in_place);
  std::optional<Operand> v(std::in_place);
  q->read(q_type, q_array, "q", wanted_stream.value_or(nullptr));
  const Launch launch = choose_stream(q->tensor, wanted_stream);
  k->foreign = !k_type.same_framework(q_type);
  v->foreign = !v_type.same_framework(q_type);
  k->read(k_type, k_array, "k", launch.stream);
  v->read(v_type, v_array, "v", launch.stream);
  check_inputs(q->tensor, k->tensor, v->tensor);

  const std::string_view kernel_name = to_kernel_name(kernel);
  const bool wants_lse = to_flag(return_lse, "return_lse");
  const Mask mask = to_mask(causal, window);
  const float factor = to_scale(scale, q->tensor.shape[3]);

  make_rows_contiguous(q, launch);
  make_rows_contiguous(k, launch);
  make_rows_contiguous(v, launch);

  Operand out;
  const bool is_given = !out_array.is_none();
  const nb::object out_object =
      is_given ? nb::borrow(out_array) : allocate_out(*q, v->tensor.shape[3], launch);
  const ArrayType& out_type = array_type(out_object, "out");
  if (out_type.path == Path::kTraced) {
    wrong_value(std::string("out: ") + out_type.type->tp_name + " is immutable");
  }
  out.foreign = !out_type.same_framework(q_type);
  out.is_ours = !is_given;
  out.read(out_type, out_object, "out", launch.stream);
  check_out(out.tensor, out.is_ours, q->tensor, k->tensor, v->tensor);

  std::optional<Operand> lse;
  if (wants_lse) {
    const nb::object lse_object = allocate_lse(*q, launch);
    lse.emplace();
    lse->tensor.rank = kRank - 1;
    lse->is_ours = true;
    lse->read(array_type(lse_object, "lse"), lse_object, "lse", launch.stream);
  }

  const auto& [batch, heads_q, len_q, head_dim] = q->tensor.shape;
  const ForwardParams params{.q = q->tensor.data,
                             .k = k->tensor.data,
                             .v = v->tensor.data,
                             .out = out.tensor.data,
                             .lse = lse ? static_cast<float*>(lse->tensor.data) : nullptr,
                             .q_stride = q->tensor.strides(),
                             .k_stride = k->tensor.strides(),
                             .v_stride = v->tensor.strides(),
                             .out_stride = out.tensor.strides(),
                             .batch = static_cast<int>(batch),
                             .heads_q = static_cast<int>(heads_q),
                             .heads_kv = static_cast<int>(k->tensor.shape[1]),
                             .len_q = static_cast<int>(len_q),
                             .len_kv = static_cast<int>(k->tensor.shape[2]),
                             .head_dim = static_cast<int>(head_dim),
                             .head_dim_v = static_cast<int>(v->tensor.shape[3]),
                             .scale = factor,
                             .dtype = q->tensor.dtype,
                             .mask = mask};
  const Device& device = q->tensor.device;
  const Target target{.backend = device.backend, .device = device.ordinal, .stream = launch.stream};
  if (device.backend == Backend::kCpu) {
#if FASTATTN_HAVE_EMULATION
    std::optional<Interruptible> interruptible;
    if (kernel_name != "auto" && kernel_name != "cpu") interruptible.emplace();  // a rung, by name
#endif
    // The arrays stay alive: the caller's frame and our operands refer to them.
    without_gil([&] { fastattn::forward(params, target, kernel_name); });
  } else {
    fastattn::forward(params, target, kernel_name);
  }
#if FASTATTN_HAVE_CUDA
  if (device.backend == Backend::kCuda) {
    keep_alive({&*q, &*k, &*v, &out}, device, launch);
    if (lse) keep_alive({&*lse}, device, launch);
    release_done();
  }
#endif
  if (is_given && !out_type.wrote.is_none()) out_type.wrote(out_object);
  if (!lse) return out_object;
  return nb::make_tuple(out_object, lse->object);
}

// --- as a Python function ------------------------------------------------------------------------

const Signature* forward_signature = nullptr;

PyObject* call_forward(PyObject*, PyObject* const* arguments, Py_ssize_t count,
                       PyObject* keywords) noexcept {
  Signature::Values values;
  const auto positional = static_cast<std::size_t>(count);
  if (!forward_signature->bind(arguments, positional, keywords, values)) {
    return forward_signature->refuse(arguments, positional, keywords);
  }
  try {
    const auto& [q, k, v, kernel, causal, window, scale, return_lse, out, stream] = values;
    return forward(q, k, v, kernel, causal, window, scale, return_lse, out, stream).release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const ArgumentError& error) {
    set_python_error(error);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

nb::object native_forward(nb::object declaration, const std::string& text) {
  nb::object function = builtin_function(declaration, text, &call_forward);
  forward_signature = new Signature(std::move(declaration));
  return function;
}

}  // namespace

void bind_attention(nb::module_& m) {
  using namespace nb::literals;
  m.def("configure", &configure, "resolve"_a, "bool_type"_a, "real_type"_a,
        nb::sig("def configure(resolve: collections.abc.Callable[[type, str], object], "
                "bool_type: type, real_type: type) -> None"),
        "Called once, by fastattn._adapters.");
  m.def("native_forward", &native_forward, "declaration"_a, "text"_a,
        nb::sig(
            "def native_forward(declaration: collections.abc.Callable[..., object], text: str) -> "
            "types.BuiltinFunctionType"),
        "fastattn.forward: the function with the signature of `declaration`. `text` is that "
        "signature and the documentation, as __text_signature__ and __doc__ are read from it.");
}

}  // namespace fastattn::bindings
