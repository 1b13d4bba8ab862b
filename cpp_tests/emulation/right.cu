// Compiled for both builds of the emulation, never for a GPU.
#include "emulation/right.h"

#include "cuda/launch/launch.cuh"
#include "cuda/launch/shared.cuh"

namespace fastattn::cuda {

extern const testing::RightKernels right_kernels;

namespace {

constexpr unsigned kAllLanes = 0xffffffffU;

__global__ void reverse_static_kernel(const float* input, float* output) {
  __shared__ float tile[64];
  tile[threadIdx.x] = input[threadIdx.x];
  __syncthreads();
  output[threadIdx.x] = tile[63 - threadIdx.x];
}

__global__ void reverse_dynamic_kernel(const float* input, float* output) {
  float* tile = dynamic_shared<float>();
  tile[threadIdx.x] = input[threadIdx.x];
  __syncthreads();
  output[threadIdx.x] = tile[63 - threadIdx.x];
}

__global__ void warp_sums_kernel(const float* input, float* output) {
  float by_xor = input[threadIdx.x];
  for (int step = 16; step > 0; step /= 2) by_xor += __shfl_xor_sync(kAllLanes, by_xor, step);
  output[threadIdx.x] = by_xor;

  float by_down = input[threadIdx.x];
  for (int step = 16; step > 0; step /= 2) by_down += __shfl_down_sync(kAllLanes, by_down, step);
  output[64 + threadIdx.x] = __shfl_sync(kAllLanes, by_down, 0);

  // An inclusive scan: the last lane holds the sum.
  float by_up = input[threadIdx.x];
  const int lane = threadIdx.x % 32;
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_up_sync(kAllLanes, by_up, step);
    if (lane >= step) by_up += other;
  }
  output[128 + threadIdx.x] = __shfl_sync(kAllLanes, by_up, 31);

  // Within groups of 8 lanes.
  float by_eight = input[threadIdx.x];
  for (int step = 4; step > 0; step /= 2) by_eight += __shfl_xor_sync(kAllLanes, by_eight, step, 8);
  output[192 + threadIdx.x] = by_eight;
}

__global__ void votes_kernel(const float* input, unsigned* output) {
  const int positive = input[threadIdx.x] > 0.0F;
  output[threadIdx.x] = __ballot_sync(kAllLanes, positive);
  output[64 + threadIdx.x] = __any_sync(kAllLanes, positive);
  output[128 + threadIdx.x] = __all_sync(kAllLanes, positive);
}

__global__ void atomics_kernel(const float* input, float* sum, int* largest, unsigned* count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(sum, input[i]);
  if (input[i] > 0.0F) atomicMax(largest, i);
  unsigned seen = *static_cast<volatile unsigned*>(count);
  for (unsigned old = seen + 1; old != seen;) {
    old = seen;
    seen = atomicCAS(count, old, old + 1);
  }
}

__global__ void transpose_kernel(const float* input, float* output) {
  const unsigned row = blockIdx.y * blockDim.y + threadIdx.y;
  const unsigned column = blockIdx.x * blockDim.x + threadIdx.x;
  output[column * (blockDim.y * gridDim.y) + row] = input[row * (blockDim.x * gridDim.x) + column];
}

__global__ void vectors_kernel(const float* input, float* output) {
  if (threadIdx.x < 16) {
    float4 value = reinterpret_cast<const float4*>(input)[threadIdx.x];
    value.w += 1.0F;
    reinterpret_cast<float4*>(output)[threadIdx.x] = value;
  }
  __syncthreads();
  const float2 value = reinterpret_cast<const float2*>(output)[threadIdx.x];
  reinterpret_cast<float2*>(output)[threadIdx.x] = make_float2(value.y, value.x);
}

__global__ void strided_kernel(const float* input, float* output, int stride) {
  float* tile = dynamic_shared<float>();
  for (int i = threadIdx.x; i < 32 * 36; i += 32) tile[i] = input[i % 64];
  __syncthreads();
  output[threadIdx.x] = tile[threadIdx.x * stride];
}

__global__ void strided_vectors_kernel(const float* input, float* output, int stride) {
  float* tile = dynamic_shared<float>();
  for (int i = threadIdx.x; i < 32 * 36; i += 32) tile[i] = input[i % 64];
  __syncthreads();
  const float4 value = *reinterpret_cast<const float4*>(tile + threadIdx.x * stride);
  output[threadIdx.x] = value.x + value.y + value.z + value.w;
}

__global__ void partial_warp_kernel(const float* input, float* output) {
  const unsigned lanes = threadIdx.x < 32 ? kAllLanes : 1U;
  output[threadIdx.x] = __shfl_sync(lanes, input[threadIdx.x], 0);
}

constexpr LaunchPlan kOneBlock = {
    .blocks = 1, .threads = 64, .dynamic_shared_bytes = 64 * sizeof(float)};
constexpr LaunchPlan kOneWarp = {
    .blocks = 1, .threads = 32, .dynamic_shared_bytes = 32 * 36 * sizeof(float)};

void transpose(const float* input, float* output) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(3, 2);
  config.blockDim = dim3(4, 4);
  check(cudaLaunchKernelEx(&config, transpose_kernel, input, output), "launch");
}

}  // namespace

const testing::RightKernels right_kernels = {
    .reverse_static =
        [](const float* input, float* output) {
          launch<reverse_static_kernel>(kOneBlock, nullptr, input, output);
        },
    .reverse_dynamic =
        [](const float* input, float* output) {
          launch<reverse_dynamic_kernel>(kOneBlock, nullptr, input, output);
        },
    .warp_sums = [](const float* input,
                    float* output) { launch<warp_sums_kernel>(kOneBlock, nullptr, input, output); },
    .votes = [](const float* input,
                unsigned* output) { launch<votes_kernel>(kOneBlock, nullptr, input, output); },
    .atomics =
        [](const float* input, float* sum, int* largest, unsigned* count) {
          launch<atomics_kernel>({.blocks = 4, .threads = 16}, nullptr, input, sum, largest, count);
        },
    .transpose = transpose,
    .vectors =
        [](const float* input, float* output) {
          launch<vectors_kernel>({.blocks = 1, .threads = 32}, nullptr, input, output);
        },
    .strided = [](const float* input, float* output,
                  int stride) { launch<strided_kernel>(kOneWarp, nullptr, input, output, stride); },
    .strided_vectors =
        [](const float* input, float* output, int stride) {
          launch<strided_vectors_kernel>(kOneWarp, nullptr, input, output, stride);
        },
    .partial_warp =
        [](const float* input, float* output) {
          launch<partial_warp_kernel>({.blocks = 1, .threads = 33}, nullptr, input, output);
        },
};

}  // namespace fastattn::cuda
