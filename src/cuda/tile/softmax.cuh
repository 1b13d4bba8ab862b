// The online softmax of tiles in mma fragments, in powers of 2. A row's weights are 2^(score -
// reference); its reference follows the largest score only where that is far ahead, so that O is
// seldom rescaled.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "cuda/ptx/ex2.cuh"
#include "cuda/tile/lanes.cuh"

namespace fastattn::cuda {

inline constexpr float kLn2 = 0.69314718056F;
inline constexpr double kLog2E = 1.4426950408889634;

// The factor of the scores. A negative scale, or one of 0, is left to Q: see sign_of_scale().
__device__ __forceinline__ float scale_log2_of(float scale) {
  return scale == 0.0F ? 1.0F : static_cast<float>(fabs(static_cast<double>(scale)) * kLog2E);
}
__device__ __forceinline__ float sign_of_scale(float scale) {
  return scale > 0.0F ? 1.0F : (scale < 0.0F ? -1.0F : 0.0F);
}

// Moves the references of rows whose largest score in rS is over `end`, or that have none yet, so
// that this score becomes `start`. rS holds scores relative to the references. row_sum: of this
// thread's keys. A thread's row r is half r % 2 of fragment r / 2. Returns whether all rows have a
// reference.
template <int kRowTiles, int kKeyTiles, int kColumnTiles>
__device__ __forceinline__ bool move_references(float (&rS)[kRowTiles][kKeyTiles][4],
                                                float (&rO)[kRowTiles][kColumnTiles][4],
                                                float (&reference)[2 * kRowTiles],
                                                float (&row_sum)[2 * kRowTiles], float start,
                                                float end) {
  bool has_all = true;
#pragma unroll
  for (int r = 0; r < 2 * kRowTiles; ++r) {
    float ahead = -INFINITY;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      const float* s = rS[r / 2][n] + 2 * (r % 2);
      ahead = fmaxf(ahead, fmaxf(s[0], s[1]));
    }
    ahead = max_of_lanes<4>(ahead);
    const bool has_reference = sum_of_lanes<4>(row_sum[r]) != 0.0F;
    if (has_reference ? ahead <= end : ahead == -INFINITY) {
      has_all = has_all && has_reference;
      continue;
    }
    ahead -= start;
    const float rescale = has_reference ? ptx::ex2_approx_ftz(-ahead) : 0.0F;
    reference[r] += ahead;
    row_sum[r] *= rescale;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      rO[r / 2][n][2 * (r % 2)] *= rescale;
      rO[r / 2][n][2 * (r % 2) + 1] *= rescale;
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      rS[r / 2][n][2 * (r % 2)] -= ahead;
      rS[r / 2][n][2 * (r % 2) + 1] -= ahead;
    }
  }
  return has_all;
}

}  // namespace fastattn::cuda
