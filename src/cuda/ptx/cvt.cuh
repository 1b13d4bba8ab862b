// Between fp32 and pairs of 16-bit numbers in a register.
// PTX ISA: "Data Movement and Conversion Instructions: cvt" (pairs: sm_80 and newer).
#pragma once

#include <cuda_runtime.h>

namespace fastattn::cuda::ptx {

// Both rounded to nearest, ties to even; `low` goes to bits 0 to 15. Beyond the range: inf.
__device__ __forceinline__ unsigned cvt_rn_f16x2(float high, float low) {
  unsigned pair;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
  asm("{\n .reg .b16 low, high;\n cvt.rn.f16.f32 high, %1;\n cvt.rn.f16.f32 low, %2;\n"
      " mov.b32 %0, {low, high};\n}"
      : "=r"(pair)
      : "f"(high), "f"(low));
#endif
  return pair;
}

__device__ __forceinline__ unsigned cvt_rn_bf16x2(float high, float low) {
  unsigned pair = 0;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
  __trap();
#endif
  return pair;
}

// {low, high}, exactly.
__device__ __forceinline__ float2 f16x2_to_f32(unsigned pair) {
  float2 result;
  asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %2;\n cvt.f32.f16 %0, low;\n"
      " cvt.f32.f16 %1, high;\n}"
      : "=f"(result.x), "=f"(result.y)
      : "r"(pair));
  return result;
}

// bf16 is the upper half of fp32.
__device__ __forceinline__ float2 bf16x2_to_f32(unsigned pair) {
  return make_float2(__uint_as_float(pair << 16U), __uint_as_float(pair & 0xffff0000U));
}

}  // namespace fastattn::cuda::ptx
