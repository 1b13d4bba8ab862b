#include "cuda/device.h"

#include <array>
#include <mutex>

#include "cuda/check.cuh"

namespace fastattn::cuda {
namespace {

constexpr int kMaxDevices = 64;

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

DeviceInfo read_device(int device) {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  return {.ordinal = device,
          .name = properties.name,
          .compute_capability = 10 * properties.major + properties.minor,
          .multiprocessors = properties.multiProcessorCount,
          .shared_bytes_per_block =
              static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)),
          .memory_bytes = properties.totalGlobalMem};
}

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t as_event(void* event) { return static_cast<cudaEvent_t>(event); }

}  // namespace

const DeviceInfo& device_info(int device) {
  static std::array<std::once_flag, kMaxDevices> once;
  static std::array<DeviceInfo, kMaxDevices> infos;
  if (device < 0 || device >= kMaxDevices) {
    throw ArgumentError(ArgumentError::Kind::kValue,
                        "device: CUDA ordinal " + std::to_string(device) + " is out of range");
  }
  // A throw inside call_once leaves the flag unset, so that the next call tries again.
  std::call_once(once[device], [device] { infos[device] = read_device(device); });
  return infos[device];
}

std::vector<DeviceInfo> list_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return {};
  }
  std::vector<DeviceInfo> devices;
  for (int device = 0; device < count; ++device) devices.push_back(device_info(device));
  return devices;
}

int driver_version() {
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  return version;
}

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

DeviceGuard::DeviceGuard(int device) {
  if (device < 0) return;
  const int current = current_device();
  if (current == device) return;
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (device >= count) {
    throw ArgumentError(ArgumentError::Kind::kValue, "device: CUDA ordinal " +
                                                         std::to_string(device) + ", there are " +
                                                         std::to_string(count) + " devices");
  }
  check(cudaSetDevice(device), "cudaSetDevice");
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) static_cast<void>(cudaSetDevice(previous_));
}

MemoryKind memory_kind(const void* pointer, int* device) {
  cudaPointerAttributes attributes;
  check(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
  if (device != nullptr) *device = attributes.device;
  switch (attributes.type) {
    case cudaMemoryTypeHost:
      return MemoryKind::kHost;
    case cudaMemoryTypeDevice:
      return MemoryKind::kDevice;
    case cudaMemoryTypeManaged:
      return MemoryKind::kManaged;
    default:
      return MemoryKind::kUnregistered;
  }
}

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(as_stream(stream), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

void* allocate(std::size_t bytes) {
  void* pointer = nullptr;
  const cudaError_t status = cudaMalloc(&pointer, bytes);
  if (status != cudaSuccess) fail(status, "cudaMalloc of " + std::to_string(bytes) + " bytes");
  return pointer;
}

void deallocate(void* pointer) noexcept { static_cast<void>(cudaFree(pointer)); }

void copy_to_device(void* device_pointer, const void* host, std::size_t bytes, void* stream) {
  check(cudaMemcpyAsync(device_pointer, host, bytes, cudaMemcpyHostToDevice, as_stream(stream)),
        "cudaMemcpyAsync to the device");
}

void copy_to_host(void* host, const void* device_pointer, std::size_t bytes, void* stream) {
  check(cudaMemcpyAsync(host, device_pointer, bytes, cudaMemcpyDeviceToHost, as_stream(stream)),
        "cudaMemcpyAsync to the host");
}

void fill_bytes(void* device_pointer, int value, std::size_t bytes, void* stream) {
  check(cudaMemsetAsync(device_pointer, value, bytes, as_stream(stream)), "cudaMemsetAsync");
}

void synchronize_device() { check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

void synchronize_stream(void* stream) {
  check(cudaStreamSynchronize(as_stream(stream)), "cudaStreamSynchronize");
}

void* create_event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreate(&event), "cudaEventCreate");
  return event;
}

void destroy_event(void* event) noexcept { static_cast<void>(cudaEventDestroy(as_event(event))); }

void record_event(void* event, void* stream) {
  check(cudaEventRecord(as_event(event), as_stream(stream)), "cudaEventRecord");
}

bool event_done(void* event) {
  // A query would break a graph capture that another thread has under way in the global mode.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
  const cudaError_t status = cudaEventQuery(as_event(event));
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
  if (status == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  check(status, "cudaEventQuery");
  return true;
}

void synchronize_event(void* event) {
  check(cudaEventSynchronize(as_event(event)), "cudaEventSynchronize");
}

float elapsed_ms(void* start, void* end) {
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, as_event(start), as_event(end)),
        "cudaEventElapsedTime");
  return milliseconds;
}

}  // namespace fastattn::cuda
