// From any Python array to a pointer, a shape and strides: the readers of DESIGN section 6.
#pragma once

#include <dlpack/dlpack.h>
#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "fastattn/fastattn.h"

namespace fastattn::bindings {

namespace nb = nanobind;

inline constexpr int kRank = 4;  // [batch, heads, length, head_dim]

[[noreturn]] void wrong_type(const std::string& message);
[[noreturn]] void wrong_value(const std::string& message);

// Of a Python string; what UTF-8 has no bytes for is escaped.
std::string utf8(nb::handle text);

// How arrays of one Python type are read.
enum class Path : std::uint8_t {
  kExchange,  // DLPack's C exchange API: no Python call, and it names the current stream
  kBuffer,    // Python's buffer protocol
  kNoSync,    // __dlpack__(stream=-1), for frameworks whose current stream the adapter knows
  kStream,    // __dlpack__(stream=launch stream), for any other producer
  kTraced,    // the adapter does the whole call (JAX)
};

// What is known of one Python type; lives as long as the process.
struct ArrayType {
  PyTypeObject* type;
  Path path;
  const DLPackExchangeAPI* exchange;  // kExchange only
  nb::handle adapter;                 // an Adapter of python/fastattn/_adapters
  nb::handle empty_like;              // its method, or None
  nb::handle new_empty;               // its method, or None
  nb::handle float32;                 // the dtype, as new_empty takes it
  nb::handle wrote;                   // its method, or None
  // torch: what the type says of requires_grad (a descriptor) and is_neg (a method). Null
  // where arrays need no look at what their memory does not show.
  nb::handle requires_grad;
  nb::handle is_neg;

  [[nodiscard]] bool allocates_by_exchange() const {
    return exchange != nullptr && empty_like.is_none();
  }

  // Arrays of one framework share an allocator and a current stream.
  [[nodiscard]] bool same_framework(const ArrayType& other) const {
    return adapter.is(other.adapter) && exchange == other.exchange;
  }
};

// The resolver of fastattn._adapters, called once for each type: resolve(type, argument) ->
// Adapter.
void set_resolver(nb::object resolver);

// Throws TypeError where the object is no array that we take. `name` is that of the argument.
const ArrayType& array_type(nb::handle object, const char* name);

struct Device {
  Backend backend = Backend::kCpu;
  int ordinal = -1;

  friend bool operator==(const Device&, const Device&) = default;
};

std::string to_string(const Device& device);

// Four-dimensional, of a dtype that some kernel takes, on the CPU or on a CUDA device; the strides
// are in elements and 0 or more dimensions may be empty. Holds what keeps the memory alive.
class Tensor {
 public:
  Tensor() { buffer_.obj = nullptr; }
  ~Tensor();
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  // `is_ours`: we allocated it, so nothing about it needs a look. `launch_stream` is read by
  // Path::kStream alone, and by arrays `foreign` to the framework whose stream that is: their
  // producer then orders its own work before ours.
  void read(const ArrayType& type, nb::handle object, const char* name, void* launch_stream,
            bool foreign, bool is_ours);

  // What is still needed of `object` to keep the memory alive.
  [[nodiscard]] nb::object owner(nb::handle object) const;

  const char* name = "";
  int rank = kRank;  // 3 for lse, whose missing last dimension then counts as 1
  const ArrayType* type = nullptr;
  void* data = nullptr;
  std::array<std::int64_t, kRank> shape{};
  std::array<std::int64_t, kRank> stride{};
  DType dtype = DType::kFloat32;
  Device device;
  bool read_only = false;

  [[nodiscard]] Strides strides() const { return {stride[0], stride[1], stride[2]}; }
  [[nodiscard]] bool is_empty() const;
  [[nodiscard]] bool rows_are_contiguous() const { return stride[3] == 1; }
  [[nodiscard]] std::uintptr_t item_size() const { return dtype == DType::kFloat32 ? 4 : 2; }
  // Every element of one span of memory, in any order of the dimensions.
  [[nodiscard]] bool is_dense() const;
  [[nodiscard]] std::string shape_text() const;

 private:
  // By __dlpack_device__: __dlpack__ takes a stream for CUDA arrays alone.
  [[nodiscard]] Device device_of(nb::handle object) const;
  void read_exchange(nb::handle object);
  void read_buffer(nb::handle object);
  void read_dlpack(nb::handle object, std::optional<void*> stream);
  void take(const DLTensor& tensor);
  void set_layout(int ndim, const std::int64_t* sizes, const std::int64_t* steps);
  [[noreturn]] void refuse_dtype(const std::string& found) const;
  void screen(nb::handle object) const;

  nb::object capsule_;
  Py_buffer buffer_;  // without an object: unused, and not worth the time to clear it
};

// A new array of the framework of `like`, in C order.
nb::object allocate_by_exchange(const ArrayType& type, const Tensor& like, DType dtype, int ndim,
                                const std::int64_t* shape);

}  // namespace fastattn::bindings
