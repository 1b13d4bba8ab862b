// 1 / x in one instruction.
// PTX ISA: "Floating Point Instructions: rcp" (error of 1 ulp at most; subnormal numbers are 0).
#pragma once

#include <cuda_runtime.h>

namespace fastattn::cuda::ptx {

__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace fastattn::cuda::ptx
