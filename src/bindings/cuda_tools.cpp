// CUDA memory, events and waiting, for tests and benchmarks where there is a GPU and no framework.
#include <dlpack/dlpack.h>
#include <nanobind/nanobind.h>

#include <bit>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "bindings/without_gil.h"
#include "fastattn/fastattn.h"

#if FASTATTN_HAVE_CUDA
#include "cuda/device.h"
#endif

namespace fastattn::bindings {
namespace {

namespace nb = nanobind;

#if FASTATTN_HAVE_CUDA

void* as_pointer(std::uintptr_t handle) { return std::bit_cast<void*>(handle); }

// A contiguous view of a host object's memory.
class HostView {
 public:
  HostView(nb::handle object, bool writable) {
    const int flags = PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object.ptr(), &buffer_, flags) != 0) throw nb::python_error();
  }
  ~HostView() { PyBuffer_Release(&buffer_); }
  HostView(const HostView&) = delete;
  HostView& operator=(const HostView&) = delete;

  [[nodiscard]] void* data() const { return buffer_.buf; }
  [[nodiscard]] std::size_t size() const { return static_cast<std::size_t>(buffer_.len); }

 private:
  Py_buffer buffer_{};
};

class CudaBuffer {
 public:
  CudaBuffer(std::size_t bytes, int device) : bytes_(bytes), device_(device) {
    const cuda::DeviceGuard guard(device);
    if (bytes > 0) pointer_ = cuda::allocate(bytes);
  }
  ~CudaBuffer() {
    if (pointer_ != nullptr) cuda::deallocate(pointer_);
  }
  CudaBuffer(const CudaBuffer&) = delete;
  CudaBuffer& operator=(const CudaBuffer&) = delete;

  void copy_from_host(nb::handle host, std::uintptr_t stream) {
    const HostView view(host, false);
    check_size(view.size());
    const cuda::DeviceGuard guard(device_);
    cuda::copy_to_device(pointer_, view.data(), view.size(), as_pointer(stream));
    cuda::synchronize_stream(as_pointer(stream));
  }

  void copy_to_host(nb::handle host, std::uintptr_t stream) const {
    const HostView view(host, true);
    check_size(view.size());
    const cuda::DeviceGuard guard(device_);
    // Work on other streams may still be writing.
    cuda::synchronize_device();
    cuda::copy_to_host(view.data(), pointer_, view.size(), as_pointer(stream));
    cuda::synchronize_stream(as_pointer(stream));
  }

  void fill(int value, std::uintptr_t stream) {
    const cuda::DeviceGuard guard(device_);
    cuda::fill_bytes(pointer_, value, bytes_, as_pointer(stream));
  }

  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  [[nodiscard]] int device() const { return device_; }
  [[nodiscard]] void* pointer() const { return pointer_; }
  [[nodiscard]] std::uintptr_t address() const { return std::bit_cast<std::uintptr_t>(pointer_); }

 private:
  void check_size(std::size_t bytes) const {
    if (bytes > bytes_) {
      throw ArgumentError(ArgumentError::Kind::kValue, "host: got " + std::to_string(bytes) +
                                                           " bytes, the buffer has " +
                                                           std::to_string(bytes_));
    }
  }

  std::size_t bytes_;
  int device_;
  void* pointer_ = nullptr;
};

class CudaEvent {
 public:
  explicit CudaEvent(int device) : device_(device) {
    const cuda::DeviceGuard guard(device);
    event_ = cuda::create_event();
  }
  ~CudaEvent() { cuda::destroy_event(event_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void record(std::uintptr_t stream) {
    const cuda::DeviceGuard guard(device_);
    cuda::record_event(event_, as_pointer(stream));
  }
  void synchronize() const {
    without_gil([this] { cuda::synchronize_event(event_); });
  }
  [[nodiscard]] bool is_done() const { return cuda::event_done(event_); }
  [[nodiscard]] float elapsed_ms(const CudaEvent& end) const {
    return cuda::elapsed_ms(event_, end.event_);
  }

 private:
  int device_;
  void* event_ = nullptr;
};

void synchronize(int device) {
  without_gil([device] {
    const cuda::DeviceGuard guard(device);
    cuda::synchronize_device();
  });
}

// What a DLPack consumer of a buffer holds.
struct Export {
  DLManagedTensorVersioned managed{};
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> stride;
  nb::object buffer;
};

constexpr const char* kCapsule = "dltensor_versioned";

void end_export(DLManagedTensorVersioned* managed) {
  const nb::gil_scoped_acquire acquire;
  delete static_cast<Export*>(managed->manager_ctx);
}

nb::object to_dlpack(nb::handle self, std::vector<std::int64_t> shape, std::string_view dtype,
                     nb::handle, nb::handle, nb::handle, nb::handle) {
  const auto& buffer = nb::cast<const CudaBuffer&>(self);
  const bool is_bfloat16 = dtype == "bfloat16";
  if (!is_bfloat16 && dtype != "float32" && dtype != "float16") {
    throw ArgumentError(
        ArgumentError::Kind::kValue,
        "dtype: got '" + std::string(dtype) + "', takes 'float32', 'float16' or 'bfloat16'");
  }
  const std::uint8_t bits = dtype == "float32" ? 32 : 16;
  auto owner = std::make_unique<Export>();
  owner->stride.resize(shape.size());
  std::int64_t count = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    owner->stride[i] = count;
    count *= shape[i];
  }
  if (static_cast<std::size_t>(count) * bits / 8 > buffer.bytes()) {
    throw ArgumentError(ArgumentError::Kind::kValue, "shape: " + std::to_string(count) +
                                                         " elements do not fit into " +
                                                         std::to_string(buffer.bytes()) + " bytes");
  }
  owner->shape = std::move(shape);
  owner->buffer = nb::borrow(self);
  owner->managed.version = {.major = DLPACK_MAJOR_VERSION, .minor = DLPACK_MINOR_VERSION};
  owner->managed.manager_ctx = owner.get();
  owner->managed.deleter = &end_export;
  DLTensor& tensor = owner->managed.dl_tensor;
  tensor.data = buffer.pointer();
  tensor.device = {.device_type = kDLCUDA, .device_id = buffer.device()};
  tensor.ndim = static_cast<std::int32_t>(owner->shape.size());
  tensor.dtype = {.code = static_cast<std::uint8_t>(is_bfloat16 ? kDLBfloat : kDLFloat),
                  .bits = bits,
                  .lanes = 1};
  tensor.shape = owner->shape.data();
  tensor.strides = owner->stride.data();
  PyObject* capsule = PyCapsule_New(&owner->managed, kCapsule, [](PyObject* object) {
    // A consumer that took the tensor renamed the capsule, and calls the deleter itself.
    if (PyCapsule_IsValid(object, kCapsule) == 0) return;
    auto* managed = static_cast<DLManagedTensorVersioned*>(PyCapsule_GetPointer(object, kCapsule));
    managed->deleter(managed);
  });
  if (capsule == nullptr) throw nb::python_error();
  static_cast<void>(owner.release());  // the capsule's now
  return nb::steal(capsule);
}

#else  // without the CUDA backend the names exist, and say why they do nothing

[[noreturn]] void no_cuda() {
  throw ArgumentError(ArgumentError::Kind::kUnsupported,
                      "this build of fastattn has no CUDA backend");
}

struct CudaBuffer {
  CudaBuffer(std::size_t, int) { no_cuda(); }
  void copy_from_host(nb::handle, std::uintptr_t) {}
  void copy_to_host(nb::handle, std::uintptr_t) const {}
  void fill(int, std::uintptr_t) {}
  [[nodiscard]] std::size_t bytes() const { return 0; }
  [[nodiscard]] int device() const { return 0; }
  [[nodiscard]] std::uintptr_t address() const { return 0; }
};

struct CudaEvent {
  explicit CudaEvent(int) { no_cuda(); }
  void record(std::uintptr_t) {}
  void synchronize() const {}
  [[nodiscard]] bool is_done() const { return true; }
  [[nodiscard]] float elapsed_ms(const CudaEvent&) const { return 0; }
};

void synchronize(int) { no_cuda(); }

nb::object to_dlpack(nb::handle, std::vector<std::int64_t>, std::string_view, nb::handle,
                     nb::handle, nb::handle, nb::handle) {
  no_cuda();
}

#endif

}  // namespace

void bind_cuda_tools(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<CudaBuffer>(m, "CudaBuffer", "Bytes in the memory of a GPU.")
      .def(nb::init<std::size_t, int>(), "nbytes"_a, "device"_a = 0)
      .def("copy_from_host", &CudaBuffer::copy_from_host, "host"_a, "stream"_a = 0,
           nb::sig("def copy_from_host(self, host: typing.Any, stream: int = 0) -> None"),
           "From a C-contiguous object with the buffer protocol. Waits for the copy.")
      .def("copy_to_host", &CudaBuffer::copy_to_host, "host"_a, "stream"_a = 0,
           nb::sig("def copy_to_host(self, host: typing.Any, stream: int = 0) -> None"),
           "Into a C-contiguous writable object, after all work of the device.")
      .def("fill", &CudaBuffer::fill, "value"_a, "stream"_a = 0,
           "Sets every byte, in stream order: 0xFF makes NaNs of all three dtypes.")
      .def("dlpack", &to_dlpack, "shape"_a, "dtype"_a, nb::kw_only(), "stream"_a = nb::none(),
           "max_version"_a = nb::none(), "dl_device"_a = nb::none(), "copy"_a = nb::none(),
           nb::sig("def dlpack(self, shape: collections.abc.Sequence[int], dtype: str, *, "
                   "stream: int | None = None, max_version: tuple[int, int] | None = None, "
                   "dl_device: tuple[int, int] | None = None, copy: bool | None = None) "
                   "-> typing.Any"),
           "A DLPack capsule of the buffer as a row-major array. Nothing waits: copies from the\n"
           "host are done when they return, and fill() is in stream order.")
      .def_prop_ro("nbytes", &CudaBuffer::bytes)
      .def_prop_ro("device", &CudaBuffer::device)
      .def_prop_ro("pointer", &CudaBuffer::address);
  nb::class_<CudaEvent>(m, "CudaEvent", "A point in a stream, with its time.")
      .def(nb::init<int>(), "device"_a = 0)
      .def("record", &CudaEvent::record, "stream"_a = 0)
      .def("synchronize", &CudaEvent::synchronize)
      .def("is_done", &CudaEvent::is_done)
      .def("elapsed_ms", &CudaEvent::elapsed_ms, "end"_a,
           "Milliseconds from this event to `end`; both must be done.");
  m.def("synchronize", &synchronize, "device"_a = 0, "Waits for all work of a GPU.");
}

}  // namespace fastattn::bindings
