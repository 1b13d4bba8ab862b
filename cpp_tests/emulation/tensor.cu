// Compiled for both builds of the emulation, and for a GPU to compare with.
#include "emulation/tensor.h"

#include "cuda/launch/launch.cuh"
#include "cuda/launch/shared.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/cvt.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"

namespace fastattn::cuda {

extern const testing::TensorKernels tensor_kernels;

namespace {

using testing::Product;

__global__ void load_kernel(const unsigned* rows, unsigned* output, int stride, bool transposed) {
  unsigned* tile = dynamic_shared<unsigned>();
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = 0; i < 4; ++i) tile[lane * stride + i] = rows[4 * lane + i];
  __syncwarp();
  unsigned r[4];
  if (transposed) {
    ptx::ldmatrix_x4_trans(r, tile + lane * stride);
  } else {
    ptx::ldmatrix_x4(r, tile + lane * stride);
  }
  for (int i = 0; i < 4; ++i) output[4 * lane + i] = r[i];
}

__global__ void multiply_kernel(Product product, const unsigned* gA, const unsigned* gB,
                                float* gD) {
  const int lane = static_cast<int>(threadIdx.x);
  unsigned a[4];
  float d[4];
  for (int i = 0; i < 4; ++i) {
    a[i] = gA[4 * lane + i];
    d[i] = gD[4 * lane + i];
  }
  const unsigned b0 = gB[2 * lane];
  const unsigned b1 = gB[2 * lane + 1];
  switch (product) {
    case Product::kF16:
      ptx::mma_m16n8k16_f16(d, a, b0, b1);
      break;
    case Product::kBF16:
      ptx::mma_m16n8k16_bf16(d, a, b0, b1);
      break;
    case Product::kF16Zero:
      ptx::mma_m16n8k16_f16_zero(d, a, b0, b1);
      break;
    case Product::kBF16Zero:
      ptx::mma_m16n8k16_bf16_zero(d, a, b0, b1);
      break;
  }
  for (int i = 0; i < 4; ++i) gD[4 * lane + i] = d[i];
}

// In one sum, and in sums of `run` steps that are added to each other.
__global__ void score_kernel(int steps, int run, const unsigned* gA, const unsigned* gB,
                             float* gWhole, float* gInRuns) {
  const int lane = static_cast<int>(threadIdx.x);
  float whole[4] = {};
  float part[4] = {};
  float sum[4] = {};
  for (int step = 0; step < steps; ++step) {
    unsigned a[4];
    for (int i = 0; i < 4; ++i) a[i] = gA[4 * (32 * step + lane) + i];
    const unsigned* b = gB + 2 * (32 * step + lane);
    ptx::mma_m16n8k16_f16(whole, a, b[0], b[1]);
    ptx::mma_m16n8k16_f16(part, a, b[0], b[1]);
    if (step % run != run - 1) continue;
    for (int i = 0; i < 4; ++i) {
      sum[i] += part[i];
      part[i] = 0.0F;
    }
  }
  for (int i = 0; i < 4; ++i) {
    gWhole[4 * lane + i] = whole[i];
    gInRuns[4 * lane + i] = sum[i];
  }
}

__global__ void convert_kernel(const float* input, unsigned* pairs, float* back) {
  const int lane = static_cast<int>(threadIdx.x);
  const float low = input[2 * lane];
  const float high = input[2 * lane + 1];
  const unsigned f16 = ptx::cvt_rn_f16x2(high, low);
  const unsigned bf16 = ptx::cvt_rn_bf16x2(high, low);
  pairs[lane] = f16;
  pairs[32 + lane] = bf16;
  const float2 from_f16 = ptx::f16x2_to_f32(f16);
  const float2 from_bf16 = ptx::bf16x2_to_f32(bf16);
  back[2 * lane] = from_f16.x;
  back[2 * lane + 1] = from_f16.y;
  back[64 + 2 * lane] = from_bf16.x;
  back[64 + 2 * lane + 1] = from_bf16.y;
}

__global__ void copy_by_8_kernel(const float* input, const int* inside, float* output) {
  float* tile = dynamic_shared<float>();
  const int lane = static_cast<int>(threadIdx.x);
  ptx::cp_async<8>(tile + 2 * lane, input + 2 * lane, inside[lane] != 0);
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
  __syncwarp();
  for (int i = 0; i < 2; ++i) output[32 * i + lane] = tile[32 * i + lane];
}

__global__ void vote_at_barrier_kernel(const float* input, int* output) {
  const int positive = input[threadIdx.x] > 0.0F;
  output[threadIdx.x] = __syncthreads_count(positive);
  output[64 + threadIdx.x] = __syncthreads_or(positive);
  output[128 + threadIdx.x] = __syncthreads_and(positive);
}

constexpr LaunchPlan one_warp(int shared_words) {
  return {.blocks = 1, .threads = 32, .dynamic_shared_bytes = shared_words * sizeof(float)};
}

}  // namespace

const testing::TensorKernels tensor_kernels = {
    .load =
        [](const unsigned* rows, unsigned* output, int stride, bool transposed) {
          launch<load_kernel>(one_warp(32 * stride), nullptr, rows, output, stride, transposed);
        },
    .multiply = [](Product product, const unsigned* a, const unsigned* b,
                   float* d) { launch<multiply_kernel>(one_warp(0), nullptr, product, a, b, d); },
    .score =
        [](int steps, int run, const unsigned* a, const unsigned* b, float* whole, float* in_runs) {
          launch<score_kernel>(one_warp(0), nullptr, steps, run, a, b, whole, in_runs);
        },
    .convert =
        [](const float* input, unsigned* pairs, float* back) {
          launch<convert_kernel>(one_warp(0), nullptr, input, pairs, back);
        },
    .copy_by_8 =
        [](const float* input, const int* inside, float* output) {
          launch<copy_by_8_kernel>(one_warp(64), nullptr, input, inside, output);
        },
    .vote_at_barrier =
        [](const float* input, int* output) {
          launch<vote_at_barrier_kernel>({.blocks = 1, .threads = 64}, nullptr, input, output);
        },
};

}  // namespace fastattn::cuda
