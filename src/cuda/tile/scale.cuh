// Scores in powers of 2: the scale takes the factor log2(e), and exponentials are one instruction.
#pragma once

#include <cuda_runtime.h>

#include <cfloat>
#include <cmath>
#include <numbers>

namespace fastattn::cuda {

// Finite whatever the scale: infinity times a score of 0 would be NaN.
__device__ __forceinline__ float scale_to_log2(float scale) {
  constexpr double kMost = FLT_MAX;
  return static_cast<float>(fmin(fmax(scale * std::numbers::log2e, -kMost), kMost));
}

// Natural log of sum * 2^row_max. A score was multiplied by scale * log2(e), or by FLT_MAX where
// that is more: then |scale| / FLT_MAX, here / 2^128, is over ln 2.
__device__ __forceinline__ float natural_log(float row_max, float sum, float scale) {
  constexpr float kLn2 = std::numbers::ln2_v<float>;
  return row_max * fmaxf(fabsf(scale) * 0x1p-128F, kLn2) + log2f(sum) * kLn2;
}

}  // namespace fastattn::cuda
