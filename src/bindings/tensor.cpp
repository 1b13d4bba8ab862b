#include "bindings/tensor.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace fastattn::bindings {
namespace {

constexpr const char* kTakes = ", takes float32, float16 or bfloat16";

// One entry for each type seen, guarded by the GIL. A program meets a handful of array types, for
// which a scan beats hashing.
std::vector<const ArrayType*>& known_types() {
  static auto* types = new std::vector<const ArrayType*>;
  return *types;
}

PyObject* resolver = nullptr;

// Made once and never released: the names and constants of the hot path.
struct Names {
  PyObject* dlpack = PyUnicode_InternFromString("__dlpack__");
  PyObject* stream_and_version = Py_BuildValue("(ss)", "stream", "max_version");
  PyObject* stream_only = Py_BuildValue("(s)", "stream");
  PyObject* version_only = Py_BuildValue("(s)", "max_version");
  PyObject* version = Py_BuildValue("(ii)", DLPACK_MAJOR_VERSION, 0);
};

const Names& names() {
  static const auto* instance = new Names;
  return *instance;
}

std::string prefix(const char* name) { return std::string(name) + ": "; }

std::string text_of(nb::handle object) { return utf8(nb::str(object)); }

// What an exception says; the name of its type where it can't even do that.
std::string reason_of(nb::handle error) {
  const nb::object text = nb::steal(PyObject_Str(error.ptr()));
  if (text.is_valid()) return utf8(text);
  PyErr_Clear();
  return Py_TYPE(error.ptr())->tp_name;
}

const DLPackExchangeAPI* exchange_api(PyTypeObject* type) {
  const nb::object capsule = nb::steal(
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__"));
  const auto* header = capsule.is_valid()
                           ? static_cast<const DLPackExchangeAPIHeader*>(
                                 PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"))
                           : nullptr;
  if (header == nullptr) PyErr_Clear();
  while (header != nullptr && header->version.major != DLPACK_MAJOR_VERSION) {
    header = header->prev_api;
  }
  const auto* api = reinterpret_cast<const DLPackExchangeAPI*>(header);
  return api != nullptr && api->dltensor_from_py_object_no_sync != nullptr ? api : nullptr;
}

Path path_named(std::string_view path) {
  if (path == "exchange") return Path::kExchange;
  if (path == "buffer") return Path::kBuffer;
  if (path == "no_sync") return Path::kNoSync;
  if (path == "traced") return Path::kTraced;
  return Path::kStream;
}

const ArrayType* find_type(const PyTypeObject* type) {
  for (const ArrayType* known : known_types()) {
    if (known->type == type) return known;
  }
  return nullptr;
}

const ArrayType& resolve(nb::handle object, const char* name) {
  const nb::handle type = object.type();
  nb::object adapter = nb::handle(resolver)(type, name);
  Path path = path_named(nb::cast<nb::str>(adapter.attr("path")).c_str());
  const DLPackExchangeAPI* exchange = nullptr;
  auto* type_object = reinterpret_cast<PyTypeObject*>(type.ptr());
  if (path == Path::kExchange) {
    exchange = exchange_api(type_object);
    if (exchange == nullptr) path = Path::kStream;  // of a major version that we can't read
  }
  nb::object requires_grad;
  nb::object is_neg;
  if (nb::cast<bool>(adapter.attr("screened"))) {
    requires_grad = type.attr("requires_grad");
    is_neg = type.attr("is_neg");
  }
  nb::object empty_like = adapter.attr("empty_like");
  nb::object new_empty = adapter.attr("new_empty");
  nb::object float32 = adapter.attr("float32");
  nb::object wrote = adapter.attr("wrote");
  // Python code ran: another thread may have been here meanwhile.
  if (const ArrayType* known = find_type(type_object)) return *known;
  type.inc_ref();
  known_types().push_back(new ArrayType{.type = type_object,
                                        .path = path,
                                        .exchange = exchange,
                                        .adapter = adapter.release(),
                                        .empty_like = empty_like.release(),
                                        .new_empty = new_empty.release(),
                                        .float32 = float32.release(),
                                        .wrote = wrote.release(),
                                        .requires_grad = requires_grad.release(),
                                        .is_neg = is_neg.release()});
  return *known_types().back();
}

// As the frameworks name them.
std::string dtype_name(const DLDataType& dtype) {
  static constexpr std::array<const char*, 18> kNames = {"int",
                                                         "uint",
                                                         "float",
                                                         "opaque handle",
                                                         "bfloat",
                                                         "complex",
                                                         "bool",
                                                         "float8_e3m4",
                                                         "float8_e4m3",
                                                         "float8_e4m3b11fnuz",
                                                         "float8_e4m3fn",
                                                         "float8_e4m3fnuz",
                                                         "float8_e5m2",
                                                         "float8_e5m2fnuz",
                                                         "float8_e8m0fnu",
                                                         "float6_e2m3fn",
                                                         "float6_e3m2fn",
                                                         "float4_e2m1fn"};
  std::string text = dtype.code < kNames.size()
                         ? kNames[dtype.code]
                         : "DLPack type code " + std::to_string(static_cast<int>(dtype.code));
  if (dtype.code <= kDLComplex && dtype.code != kDLOpaqueHandle) {
    text += std::to_string(static_cast<int>(dtype.bits));
  }
  if (dtype.lanes != 1) text += " x " + std::to_string(dtype.lanes);
  return text;
}

const char* device_type_name(int type) {
  switch (type) {
    case kDLCUDAHost:
      return "kDLCUDAHost (pinned host memory)";
    case kDLOpenCL:
      return "kDLOpenCL";
    case kDLVulkan:
      return "kDLVulkan";
    case kDLMetal:
      return "kDLMetal";
    case kDLROCM:
      return "kDLROCM";
    case kDLROCMHost:
      return "kDLROCMHost";
    case kDLOneAPI:
      return "kDLOneAPI";
    case kDLWebGPU:
      return "kDLWebGPU";
    case kDLExtDev:
      return "kDLExtDev";
    default:
      return "unknown";
  }
}

Device device_from(const char* name, int type, int ordinal) {
  switch (type) {
    case kDLCPU:
      return {};
    case kDLCUDA:
    case kDLCUDAManaged:
#if FASTATTN_HAVE_CUDA
      return {.backend = Backend::kCuda, .ordinal = ordinal};
#else
      throw ArgumentError(ArgumentError::Kind::kUnsupported,
                          prefix(name) + "on cuda:" + std::to_string(ordinal) +
                              ", and this build of fastattn has no CUDA backend: install it again "
                              "with FASTATTN_CUDA=ON in the environment, or move the array to the "
                              "CPU");
#endif
    default:
      wrong_value(prefix(name) + "on a device of DLPack type " + std::to_string(type) + ", " +
                  device_type_name(type) + "; takes CPU and CUDA memory");
  }
}

// Whether the Python error that is set says that the callee does not know a keyword: in the words
// of Python, Cython, pybind11 or nanobind.
bool is_keyword_error() {
  if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) return false;
  nb::python_error error;
  const std::string text = reason_of(error.value());
  error.restore();
  static constexpr std::array<const char*, 4> kWords = {
      "keyword argument", "max_version", "incompatible function arguments", "takes at most"};
  return std::ranges::any_of(
      kWords, [&](const char* words) { return text.find(words) != std::string::npos; });
}

// Calls object.__dlpack__ with as many of the keywords as the producer knows. `stream` may be null.
nb::object call_dlpack(nb::handle object, nb::handle stream) {
  const Names& n = names();
  const auto call = [&](PyObject* first, PyObject* second, PyObject* keywords) {
    // The empty first slot spares the callee a copy when it binds the method.
    PyObject* arguments[] = {nullptr, object.ptr(), first, second};
    return nb::steal(PyObject_VectorcallMethod(n.dlpack, arguments + 1,
                                               1 | PY_VECTORCALL_ARGUMENTS_OFFSET, keywords));
  };
  nb::object capsule = stream.is_valid() ? call(stream.ptr(), n.version, n.stream_and_version)
                                         : call(n.version, nullptr, n.version_only);
  if (!capsule.is_valid() && is_keyword_error()) {
    PyErr_Clear();  // a producer of DLPack 0.x has no max_version
    capsule = stream.is_valid() ? call(stream.ptr(), nullptr, n.stream_only)
                                : call(nullptr, nullptr, nullptr);
  }
  return capsule;
}

// Replaces the Python error that is set by a TypeError which names the argument. `refuse` of the
// adapter goes first: it may know better why the export failed.
[[noreturn]] void raise_export_error(const ArrayType& type, nb::handle object, const char* name) {
  nb::python_error error;
  if (!error.matches(PyExc_Exception) || error.matches(PyExc_MemoryError)) throw error;
  type.adapter.attr("refuse")(object, name);
  std::string reason = reason_of(error.value());
  reason = reason.substr(0, reason.find('\n'));  // torch appends a C++ backtrace
  nb::raise_from(error, PyExc_TypeError, "%s: %s could not be read through DLPack: %s", name,
                 Py_TYPE(object.ptr())->tp_name, reason.c_str());
}

}  // namespace

void wrong_type(const std::string& message) {
  throw ArgumentError(ArgumentError::Kind::kType, message);
}

void wrong_value(const std::string& message) {
  throw ArgumentError(ArgumentError::Kind::kValue, message);
}

std::string utf8(nb::handle text) {
  Py_ssize_t size = 0;
  if (const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size)) {
    return {bytes, static_cast<std::size_t>(size)};
  }
  PyErr_Clear();  // a lone surrogate
  const nb::object escaped =
      nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!escaped.is_valid()) throw nb::python_error();
  return {PyBytes_AS_STRING(escaped.ptr()),
          static_cast<std::size_t>(PyBytes_GET_SIZE(escaped.ptr()))};
}

void set_resolver(nb::object object) { resolver = object.release().ptr(); }

const ArrayType& array_type(nb::handle object, const char* name) {
  const ArrayType* type = find_type(Py_TYPE(object.ptr()));
  return type != nullptr ? *type : resolve(object, name);
}

std::string to_string(const Device& device) {
  return device.backend == Backend::kCpu ? "cpu" : "cuda:" + std::to_string(device.ordinal);
}

Tensor::~Tensor() {
  if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
}

nb::object Tensor::owner(nb::handle object) const {
  return capsule_.is_valid() ? capsule_ : nb::borrow(object);
}

Device Tensor::device_of(nb::handle object) const {
  const nb::object pair =
      nb::steal(PyObject_CallMethod(object.ptr(), "__dlpack_device__", nullptr));
  if (!pair.is_valid()) raise_export_error(*type, object, name);
  std::array<int, 2> numbers{};
  bool is_right = PyTuple_Check(pair.ptr()) && PyTuple_GET_SIZE(pair.ptr()) == 2;
  for (std::size_t i = 0; i < numbers.size() && is_right; ++i) {
    const nb::object number =
        nb::steal(PyNumber_Index(PyTuple_GET_ITEM(pair.ptr(), static_cast<Py_ssize_t>(i))));
    int overflow = 0;
    const long value = number.is_valid() ? PyLong_AsLongAndOverflow(number.ptr(), &overflow) : -1L;
    is_right = number.is_valid() && overflow == 0 && std::in_range<int>(value);
    numbers[i] = static_cast<int>(value);
  }
  if (!is_right) {
    PyErr_Clear();
    wrong_type(prefix(name) + "__dlpack_device__ of " + Py_TYPE(object.ptr())->tp_name +
               " returned no pair of integers (device type, device)");
  }
  return device_from(name, numbers[0], numbers[1]);
}

void Tensor::read(const ArrayType& array_type, nb::handle object, const char* argument,
                  void* launch_stream, bool foreign, bool is_ours) {
  name = argument;
  type = &array_type;
  if (array_type.path == Path::kBuffer) {
    read_buffer(object);
  } else if (array_type.path == Path::kExchange) {
    read_exchange(object);
    if (foreign && device.backend == Backend::kCuda) read_dlpack(object, launch_stream);
  } else if (device_of(object).backend == Backend::kCpu) {
    read_dlpack(object, std::nullopt);
  } else if (array_type.path == Path::kNoSync && !foreign) {
    read_dlpack(object, std::bit_cast<void*>(std::intptr_t{-1}));
  } else {
    read_dlpack(object, launch_stream);
  }
  if (data == nullptr && !is_empty()) {
    array_type.adapter.attr("refuse")(object, name);  // it may know why
    wrong_value(prefix(name) + "null data pointer, but shape " + shape_text() + " has elements");
  }
  if (array_type.is_neg.is_valid() && !is_ours) screen(object);
}

void Tensor::read_exchange(nb::handle object) {
  DLTensor tensor;
  if (type->exchange->dltensor_from_py_object_no_sync(object.ptr(), &tensor) != 0) {
    raise_export_error(*type, object, name);
  }
  take(tensor);
}

void Tensor::read_dlpack(nb::handle object, std::optional<void*> stream) {
  if (stream) {
    // DLPack knows the legacy default stream as 1; 0 is not allowed.
    const auto handle = std::bit_cast<std::intptr_t>(*stream);
    capsule_ = call_dlpack(object, nb::int_(handle == 0 ? 1 : handle));
  } else {
    capsule_ = call_dlpack(object, {});
  }
  if (!capsule_.is_valid()) raise_export_error(*type, object, name);
  // The capsule stays ours and unused, so that its own destructor ends the export.
  if (PyCapsule_IsValid(capsule_.ptr(), "dltensor_versioned") != 0) {
    const auto* managed = static_cast<const DLManagedTensorVersioned*>(
        PyCapsule_GetPointer(capsule_.ptr(), "dltensor_versioned"));
    if (managed->version.major != DLPACK_MAJOR_VERSION) {
      wrong_type(prefix(name) + "DLPack version " + std::to_string(managed->version.major) +
                 " can't be read, " + std::to_string(DLPACK_MAJOR_VERSION) + " can");
    }
    // A write to a copy would be lost.
    read_only =
        (managed->flags & (DLPACK_FLAG_BITMASK_READ_ONLY | DLPACK_FLAG_BITMASK_IS_COPIED)) != 0;
    take(managed->dl_tensor);
  } else if (PyCapsule_IsValid(capsule_.ptr(), "dltensor") != 0) {
    take(static_cast<const DLManagedTensor*>(PyCapsule_GetPointer(capsule_.ptr(), "dltensor"))
             ->dl_tensor);
  } else {
    wrong_type(prefix(name) + "__dlpack__ of " + Py_TYPE(object.ptr())->tp_name +
               " returned no DLPack capsule");
  }
}

void Tensor::take(const DLTensor& tensor) {
  device = device_from(name, tensor.device.device_type, tensor.device.device_id);
  const DLDataType& type_of = tensor.dtype;
  if (type_of.code == kDLFloat && type_of.bits == 32 && type_of.lanes == 1) {
    dtype = DType::kFloat32;
  } else if (type_of.code == kDLFloat && type_of.bits == 16 && type_of.lanes == 1) {
    dtype = DType::kFloat16;
  } else if (type_of.code == kDLBfloat && type_of.bits == 16 && type_of.lanes == 1) {
    dtype = DType::kBFloat16;
  } else {
    refuse_dtype(dtype_name(type_of));
  }
  data = tensor.data == nullptr ? nullptr : static_cast<char*>(tensor.data) + tensor.byte_offset;
  set_layout(tensor.ndim, tensor.shape, tensor.strides);
}

void Tensor::read_buffer(nb::handle object) {
  // NumPy has no bfloat16 of its own, and lends no memory of an extension's type: read its bits.
  bool is_bfloat16 = false;
  if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_RECORDS_RO) != 0) {
    PyErr_Clear();
    const nb::object numpy_dtype = object.attr("dtype");
    is_bfloat16 = text_of(numpy_dtype) == "bfloat16";
    if (!is_bfloat16) refuse_dtype(text_of(numpy_dtype));
    const nb::object bits = object.attr("view")("uint16");
    if (PyObject_GetBuffer(bits.ptr(), &buffer_, PyBUF_RECORDS_RO) != 0) throw nb::python_error();
  }
  std::string_view format = buffer_.format == nullptr ? "B" : buffer_.format;
  constexpr char kNative = std::endian::native == std::endian::little ? '<' : '>';
  if (format.starts_with('@') || format.starts_with('=') || format.starts_with(kNative)) {
    format.remove_prefix(1);
  }
  if (is_bfloat16) {
    dtype = DType::kBFloat16;
  } else if (format == "f") {
    dtype = DType::kFloat32;
  } else if (format == "e") {
    dtype = DType::kFloat16;
  } else {
    const std::string found = text_of(object.attr("dtype"));
    refuse_dtype(found == "float32" || found == "float16" ? found + " of foreign byte order"
                                                          : found);
  }
  read_only = buffer_.readonly != 0;
  data = buffer_.buf;
  std::array<std::int64_t, PyBUF_MAX_NDIM> sizes;
  std::array<std::int64_t, PyBUF_MAX_NDIM> steps;
  for (int i = 0; i < buffer_.ndim; ++i) {
    if (buffer_.strides[i] % buffer_.itemsize != 0) {
      wrong_value(prefix(name) + "a stride of " + std::to_string(buffer_.strides[i]) +
                  " bytes is not a multiple of the item size " + std::to_string(buffer_.itemsize) +
                  "; make a copy");
    }
    sizes[static_cast<std::size_t>(i)] = buffer_.shape[i];
    steps[static_cast<std::size_t>(i)] = buffer_.strides[i] / buffer_.itemsize;
  }
  set_layout(buffer_.ndim, sizes.data(), steps.data());
}

void Tensor::set_layout(int ndim, const std::int64_t* sizes, const std::int64_t* steps) {
  if (ndim != rank) {
    std::string text;
    for (int i = 0; i < ndim; ++i) text += (i == 0 ? "" : ", ") + std::to_string(sizes[i]);
    wrong_value(prefix(name) + "got " + std::to_string(ndim) + " dimensions, shape (" + text +
                "), takes 4: (batch, heads, length, head_dim)");
  }
  for (int i = 0; i < kRank; ++i) shape[static_cast<std::size_t>(i)] = i < rank ? sizes[i] : 1;
  for (const std::int64_t size : shape) {
    if (size > std::numeric_limits<int>::max()) {
      wrong_value(prefix(name) + "got shape " + shape_text() + ", takes sizes up to 2147483647");
    }
  }
  if (is_empty()) {
    // The strides of empty arrays are whatever their framework likes, and so may their pointer be.
    stride = {0, 0, 0, 1};
    return;
  }
  if (steps == nullptr) {
    std::int64_t step = 1;
    for (std::size_t i = kRank; i-- > 0;) {
      stride[i] = step;
      step *= shape[i];
    }
  } else {
    // CuPy divides a negative stride in bytes as an unsigned number; in bytes again, it wraps
    // right.
    const auto size = static_cast<std::int64_t>(item_size());
    const auto wrapped = [size](std::int64_t step) {
      const auto bytes = static_cast<std::uint64_t>(step) * static_cast<std::uint64_t>(size);
      return static_cast<std::int64_t>(bytes) / size;
    };
    for (int i = 0; i < kRank; ++i) {
      stride[static_cast<std::size_t>(i)] = i < rank ? wrapped(steps[i]) : 1;
    }
    if (shape[3] == 1) stride[3] = 1;
  }
  if (std::bit_cast<std::uintptr_t>(data) % item_size() != 0) {
    wrong_value(prefix(name) + "the data are not aligned to their item size of " +
                std::to_string(item_size()) + " bytes; make a copy");
  }
}

bool Tensor::is_empty() const { return std::ranges::find(shape, 0) != shape.end(); }

bool Tensor::is_dense() const {
  if (is_empty()) return true;
  const auto is_c_order = [this] {
    std::int64_t step = 1;
    for (std::size_t i = kRank; i-- > 0;) {
      if (shape[i] != 1 && stride[i] != step) return false;
      step *= shape[i];
    }
    return true;
  };
  if (is_c_order()) return true;  // nearly always, and no sort
  std::array<std::pair<std::int64_t, std::int64_t>, kRank> dims;
  for (std::size_t i = 0; i < kRank; ++i) dims[i] = {stride[i], shape[i]};
  std::ranges::sort(dims);
  std::int64_t step = 1;
  for (const auto& [stride_of, size] : dims) {
    if (size == 1) continue;
    if (stride_of != step) return false;
    step *= size;
  }
  return true;
}

std::string Tensor::shape_text() const {
  std::string text = "(";
  for (std::size_t i = 0; i < kRank; ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + ")";
}

void Tensor::refuse_dtype(const std::string& found) const {
  wrong_type(prefix(name) + "got dtype " + found + kTakes);
}

void Tensor::screen(nb::handle object) const {
  // By the type's own descriptors, found once: the look-up by name costs as much as the answer.
  const nb::handle found = type->requires_grad;
  const descrgetfunc get = Py_TYPE(found.ptr())->tp_descr_get;  // null: the value itself
  const nb::object requires_grad =
      get == nullptr
          ? nb::borrow(found)
          : nb::steal(get(found.ptr(), object.ptr(), reinterpret_cast<PyObject*>(type->type)));
  if (!requires_grad.is_valid()) throw nb::python_error();
  const nb::object is_neg = nb::steal(PyObject_CallOneArg(type->is_neg.ptr(), object.ptr()));
  if (!is_neg.is_valid()) throw nb::python_error();
  if (requires_grad.ptr() != Py_False || is_neg.ptr() != Py_False) {
    type->adapter.attr("refuse")(object, name);
  }
}

nb::object allocate_by_exchange(const ArrayType& type, const Tensor& like, DType dtype, int ndim,
                                const std::int64_t* shape) {
  std::vector<std::int64_t> sizes(shape, shape + ndim);
  DLTensor prototype{};
  prototype.device = like.device.backend == Backend::kCpu ? DLDevice{kDLCPU, 0}
                                                          : DLDevice{kDLCUDA, like.device.ordinal};
  prototype.ndim = ndim;
  prototype.dtype = {
      .code = static_cast<std::uint8_t>(dtype == DType::kBFloat16 ? kDLBfloat : kDLFloat),
      .bits = static_cast<std::uint8_t>(dtype == DType::kFloat32 ? 32 : 16),
      .lanes = 1};
  prototype.shape = sizes.data();
  DLManagedTensorVersioned* managed = nullptr;
  std::string reason;
  const auto set_error = [](void* context, const char* kind, const char* message) {
    *static_cast<std::string*>(context) = std::string(kind) + ": " + message;
  };
  if (type.exchange->managed_tensor_allocator(&prototype, &managed, &reason, set_error) != 0) {
    PyErr_Clear();
    throw std::runtime_error("out: the allocator of " + std::string(type.type->tp_name) +
                             " failed: " + reason);
  }
  void* object = nullptr;
  if (type.exchange->managed_tensor_to_py_object_no_sync(managed, &object) != 0) {
    throw nb::python_error();
  }
  return nb::steal(static_cast<PyObject*>(object));
}

}  // namespace fastattn::bindings
