// Small pieces of tiles in registers: 4 floats at a time, and a row that several lanes share.
#pragma once

#include <cuda_runtime.h>

namespace fastattn::cuda {

__device__ __forceinline__ float4 load4(const float* address) {
  return *reinterpret_cast<const float4*>(address);
}

__device__ __forceinline__ void load4(float* values, const float* address) {
  const float4 x = load4(address);
  values[0] = x.x;
  values[1] = x.y;
  values[2] = x.z;
  values[3] = x.w;
}

// sum + a b.
__device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
  sum += a.x * b.x;
  sum += a.y * b.y;
  sum += a.z * b.z;
  sum += a.w * b.w;
  return sum;
}

// Over kLanes neighbouring lanes, a power of 2; all of them get the result.
template <int kLanes>
__device__ __forceinline__ float max_of_lanes(float value) {
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffU, value, lanes));
  }
  return value;
}

template <int kLanes>
__device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    value += __shfl_xor_sync(0xffffffffU, value, lanes);
  }
  return value;
}

}  // namespace fastattn::cuda
