// What the rest of the library needs of the CUDA runtime, without its headers. Streams are
// cudaStream_t as void*. Every function throws CudaError where CUDA fails. Exported, though not
// installed: the Python module, which is another shared object, uses them too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fastattn/fastattn.h"

namespace fastattn::cuda {

// Properties of one GPU, read once.
FASTATTN_EXPORT const DeviceInfo& device_info(int device);

// Empty where there is no driver or no GPU; never throws for that.
FASTATTN_EXPORT std::vector<DeviceInfo> list_devices();

// CUDA version that the driver supports (13000 is 13.0); 0 without a driver.
FASTATTN_EXPORT int driver_version();

FASTATTN_EXPORT int current_device();

// Makes `device` current (-1: leaves it) and puts the old one back.
class FASTATTN_EXPORT DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

// Which of CUDA's kinds of memory a pointer is.
enum class MemoryKind : std::uint8_t { kUnregistered, kHost, kDevice, kManaged };
FASTATTN_EXPORT MemoryKind memory_kind(const void* pointer, int* device);

FASTATTN_EXPORT bool is_capturing(void* stream);

// Plain tools for callers that have a GPU and no framework (tests, benchmark), on the current
// device.
FASTATTN_EXPORT void* allocate(std::size_t bytes);
FASTATTN_EXPORT void deallocate(void* pointer) noexcept;
FASTATTN_EXPORT void copy_to_device(void* device_pointer, const void* host, std::size_t bytes,
                                    void* stream);
FASTATTN_EXPORT void copy_to_host(void* host, const void* device_pointer, std::size_t bytes,
                                  void* stream);
FASTATTN_EXPORT void fill_bytes(void* device_pointer, int value, std::size_t bytes, void* stream);
FASTATTN_EXPORT void synchronize_device();
FASTATTN_EXPORT void synchronize_stream(void* stream);

FASTATTN_EXPORT void* create_event();
FASTATTN_EXPORT void destroy_event(void* event) noexcept;
FASTATTN_EXPORT void record_event(void* event, void* stream);
FASTATTN_EXPORT bool event_done(void* event);
FASTATTN_EXPORT void synchronize_event(void* event);
FASTATTN_EXPORT float elapsed_ms(void* start, void* end);

}  // namespace fastattn::cuda
