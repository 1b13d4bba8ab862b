// 2 to the power of x in one instruction.
// PTX ISA: "Floating Point Instructions: ex2" (relative error 2^-22; subnormal results are 0).
#pragma once

#include <cuda_runtime.h>

namespace fastattn::cuda::ptx {

__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace fastattn::cuda::ptx
