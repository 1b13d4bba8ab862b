// Kernels that use what the rungs use of CUDA, and more of it, and are right.
#pragma once

namespace fastattn::testing {

struct RightKernels {
  // output[i] = input[63 - i], through static and through dynamic shared memory.
  void (*reverse_static)(const float* input, float* output);
  void (*reverse_dynamic)(const float* input, float* output);
  // Each warp's sum, by each kind of shuffle: [kind][64].
  void (*warp_sums)(const float* input, float* output);
  // Of each warp: ballot of input > 0, any, all: [3][64].
  void (*votes)(const float* input, unsigned* output);
  // The sum of all over 4 blocks, the largest index with a positive input, a count by exchange.
  void (*atomics)(const float* input, float* sum, int* largest, unsigned* count);
  // A 2D grid of 2D blocks transposes [8, 12] by tiles of 4 x 4.
  void (*transpose)(const float* input, float* output);
  // 16 float4 and 32 float2.
  void (*vectors)(const float* input, float* output);
  // input read by lane from shared memory at `stride` floats, as float and (aligned) as float4.
  void (*strided)(const float* input, float* output, int stride);
  void (*strided_vectors)(const float* input, float* output, int stride);
  // 33 threads: a warp that is not full.
  void (*partial_warp)(const float* input, float* output);
};

}  // namespace fastattn::testing
