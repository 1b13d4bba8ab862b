// The online softmax of tiles in mma fragments, in powers of 2. A row's weights are 2^(score -
// reference); its reference follows the largest score only where that is far ahead, so that O is
// seldom rescaled.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "cuda/ptx/ex2.cuh"
#include "cuda/tile/lanes.cuh"
#include "cuda/tile/scale.cuh"

namespace fastattn::cuda {

// The factor of the scores. A negative scale, or one of 0, is left to Q: see sign_of_scale().
__device__ __forceinline__ float scale_log2_of(float scale) {
  return scale == 0.0F ? 1.0F : scale_to_log2(fabsf(scale));
}
__device__ __forceinline__ float sign_of_scale(float scale) {
  return scale > 0.0F ? 1.0F : (scale < 0.0F ? -1.0F : 0.0F);
}

// The largest of a row's scores that this thread holds. A thread's row r is half r % 2 of fragment
// r / 2.
template <int kRowTiles, int kKeyTiles>
__device__ __forceinline__ float largest_of_row(const float (&rS)[kRowTiles][kKeyTiles][4], int r) {
  float largest = -INFINITY;
#pragma unroll
  for (int n = 0; n < kKeyTiles; ++n) {
    const float* s = rS[r / 2][n] + 2 * (r % 2);
    largest = fmaxf(largest, fmaxf(s[0], s[1]));
  }
  return largest;
}

// A warp's references, and the sums of its rows' weights, each of one thread's keys. A reference's
// own score has the weight 2^kStart.
template <int kRows, int kStart>
struct References {
  float value[kRows] = {};  // what is subtracted from scores
  float row_sum[kRows] = {};
  bool all_set = false;

  // Moves the references of rows whose largest score makes a weight over 2^end, so that this weight
  // becomes 2^kStart, and of rows that have no weight yet, unless this one makes one of 2^least or
  // more; rescales O. `largest`: of this thread's keys. on_move(row, score): score is value + kStart,
  // before it was rounded.
  template <int kRowTiles, int kColumnTiles, class OnMove>
  __device__ __forceinline__ void follow(const float (&largest)[kRows],
                                         float (&rO)[kRowTiles][kColumnTiles][4], float end,
                                         float least, OnMove on_move) {
    bool moves = !all_set;
#pragma unroll
    for (int r = 0; r < kRows; ++r) moves = moves || largest[r] - value[r] > end;
    if (!__any_sync(0xffffffffU, moves)) return;
    all_set = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float row_largest = max_of_lanes<4>(largest[r]);
      const bool is_set = sum_of_lanes<4>(row_sum[r]) != 0.0F;
      const float ahead = row_largest - value[r];
      if (is_set || ahead >= least ? ahead <= end : row_largest == -INFINITY) {
        all_set = all_set && is_set;
        continue;
      }
      const float old = value[r];
      on_move(r, row_largest);
      value[r] = row_largest - kStart;
      const float rescale = is_set ? ptx::ex2_approx_ftz(old - value[r]) : 0.0F;
      row_sum[r] *= rescale;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        rO[r / 2][n][2 * (r % 2)] *= rescale;
        rO[r / 2][n][2 * (r % 2) + 1] *= rescale;
      }
    }
  }

  // Makes whole sums of what the lanes hold.
  __device__ __forceinline__ void add_lanes() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) row_sum[r] = sum_of_lanes<4>(row_sum[r]);
  }

  // The natural log of the sum of a row's exponentials; each lane may ask for another row.
  // score_of(row): value + kStart.
  template <class ScoreOf>
  [[nodiscard]] __device__ __forceinline__ float log_sum(int row, float scale,
                                                         ScoreOf score_of) const {
    float at = 0.0F, sum = 0.0F;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r != row) continue;
      at = score_of(r);
      sum = row_sum[r];
    }
    constexpr float kUnit = 1.0F / static_cast<float>(1 << kStart);
    return sum == 0.0F ? -INFINITY : natural_log(at, sum * kUnit, scale);
  }
};

}  // namespace fastattn::cuda
