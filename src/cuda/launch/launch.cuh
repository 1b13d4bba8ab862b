// How every kernel reaches the GPU: the shared-memory opt-in, the launch, and its error check.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "cuda/check.cuh"
#include "cuda/device.h"
#include "fastattn/fastattn.h"

namespace fastattn::cuda {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0); }

// Of two counts; the largest integer where the product is beyond it.
constexpr std::int64_t saturating_product(std::int64_t a, std::int64_t b) {
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
  return b != 0 && a > kLargest / b ? kLargest : a * b;
}

[[noreturn]] inline void fail_launch(cudaError_t status, const LaunchPlan& plan) {
  std::string what = "launch of " + std::to_string(plan.blocks) + " blocks of " +
                     std::to_string(plan.threads) + " threads with " +
                     std::to_string(plan.dynamic_shared_bytes) + " bytes of shared memory";
  if (status == cudaErrorNoKernelImageForDevice) {
    const DeviceInfo& gpu = device_info(current_device());
    what += " (" + gpu.name + " has compute capability " +
            std::to_string(gpu.compute_capability / 10) + "." +
            std::to_string(gpu.compute_capability % 10) + "; this build holds code for " +
            std::string(build_info().cuda_archs) + ")";
  }
  fail(status, what);
}

// More than 48 KB of dynamic shared memory must be asked for, per kernel and device. Asked for
// once, at the device's maximum: the call costs more than a launch.
template <auto kKernel>
void allow_shared_memory() {
  static std::atomic<std::uint64_t> allowed{0};
  const int device = current_device();
  const std::uint64_t bit = 1ULL << (device % 64);
  if ((allowed.load(std::memory_order_relaxed) & bit) != 0) return;
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kKernel), "cudaFuncGetAttributes");
  const std::size_t most = device_info(device).shared_bytes_per_block - attributes.sharedSizeBytes;
  check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(most)),
        "cudaFuncSetAttribute");
  allowed.fetch_or(bit, std::memory_order_relaxed);
}

// KB of shared memory for a block that the GPUs have which code of an architecture is made for.
__host__ __device__ constexpr int shared_kb(int architecture) {
  if (architecture < 80) return 64;
  if (architecture == 80 || architecture == 87) return 163;
  return architecture < 90 || architecture >= 120 ? 99 : 227;
}

// The least shared_kb() that hold so many bytes a block, of GPUs since 8.0.
__host__ __device__ constexpr int kb_that_hold(std::size_t bytes) {
  for (const int kb : {99, 163}) {
    if (bytes <= static_cast<std::size_t>(kb) * 1024) return kb;
  }
  return 227;
}

// Whether code that only GPUs with min_kb to max_kb run is wanted in this pass of the compiler. A
// kernel that begins with `if constexpr (!...) return;` costs it next to nothing.
__host__ __device__ constexpr bool compiled_for_kb(int min_kb, int max_kb) {
#ifdef __CUDA_ARCH__
  constexpr int kKb = shared_kb(__CUDA_ARCH__ / 10);
  return min_kb <= kKb && kKb <= max_kb;
#else
  return min_kb <= max_kb;  // the host, which may emulate all
#endif
}

// Of the current GPU; where there is none, of the largest.
struct SharedMemory {
  std::size_t bytes_per_block = 227 * 1024;
  int code_kb = 227;  // shared_kb() of the architecture that the kernel was compiled for
};

// A GPU may run code that was compiled for another: of its family, or for an older one as PTX.
template <auto kKernel>
SharedMemory shared_memory() {
  static std::array<std::atomic<int>, 64> architectures{};  // by device; 0: not yet known
  int device = 0;
  try {
    device = current_device();
  } catch (const CudaError&) {
    return {};  // plans are made without a GPU, too
  }
  const DeviceInfo& gpu = device_info(device);
  std::atomic<int>& architecture = architectures[device % architectures.size()];
  if (architecture.load(std::memory_order_relaxed) == 0) {
    cudaFuncAttributes attributes;
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kKernel);
    if (status != cudaSuccess) static_cast<void>(cudaGetLastError());  // the launch will say why
    architecture.store(status == cudaSuccess ? attributes.ptxVersion : gpu.compute_capability,
                       std::memory_order_relaxed);
  }
  return {.bytes_per_block = gpu.shared_bytes_per_block,
          .code_kb = shared_kb(architecture.load(std::memory_order_relaxed))};
}

// Enqueues kKernel<<<plan>>>(args...) on the stream of the current device.
template <auto kKernel, class... Args>
void launch(const LaunchPlan& plan, void* stream, Args... args) {
  constexpr std::size_t kAlwaysAllowed = 48 * 1024;
  if (plan.dynamic_shared_bytes > kAlwaysAllowed) allow_shared_memory<kKernel>();
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks));
  config.blockDim = dim3(static_cast<unsigned>(plan.threads));
  config.dynamicSmemBytes = plan.dynamic_shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t status = cudaLaunchKernelEx(&config, kKernel, args...);
  if (status != cudaSuccess) fail_launch(status, plan);
}

}  // namespace fastattn::cuda
