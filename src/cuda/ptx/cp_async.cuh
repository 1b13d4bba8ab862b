// Copies from global to shared memory that go on while the thread computes.
// PTX ISA: "Data Movement and Conversion Instructions: cp.async" (sm_80 and newer). On an older GPU
// the same calls copy at once.
#pragma once

#include <cuda_runtime.h>

namespace fastattn::cuda::ptx {

// Copies kBytes (4, 8 or 16, both addresses aligned to them), or writes zeros where `inside` is false
// and reads nothing. A count of bytes to read would do both, but takes five instructions more.
template <int kBytes>
__device__ __forceinline__ void cp_async(void* shared, const void* global, bool inside = true) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
#if __CUDA_ARCH__ >= 800
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (kBytes == 16) {
    asm volatile(
        "{\n.reg .pred outside;\nsetp.eq.s32 outside, %2, 0;\n"
        "cp.async.cg.shared.global [%0], [%1], 16, outside;\n}" ::"r"(address),
        "l"(global), "r"(static_cast<int>(inside))
        : "memory");
  } else {
    asm volatile(
        "{\n.reg .pred outside;\nsetp.eq.s32 outside, %3, 0;\n"
        "cp.async.ca.shared.global [%0], [%1], %2, outside;\n}" ::"r"(address),
        "l"(global), "n"(kBytes), "r"(static_cast<int>(inside))
        : "memory");
  }
#else
  auto* target = static_cast<float*>(shared);
  const auto* source = static_cast<const float*>(global);
#pragma unroll
  for (int i = 0; i < kBytes / 4; ++i) target[i] = inside ? source[i] : 0.0F;
#endif
}

// Ends a group of the copies that this thread has issued since the last group; it may be empty.
__device__ __forceinline__ void cp_async_commit_group() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kGroups of this thread's latest groups are still under way.
template <int kGroups>
__device__ __forceinline__ void cp_async_wait_group() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
#endif
}

}  // namespace fastattn::cuda::ptx
