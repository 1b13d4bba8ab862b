// V0: attention as the formula says it.
//
// Idea            Three kernels over a score matrix in global memory: S = scale Q K^T,
//                 P = softmax(S) in place, O = P V.
// New             It is the first rung: nothing is tiled, nothing is kept on chip.
// Who owns what   scores: a thread one score. softmax: a warp one row. output: a thread one element.
// Limit now       The way K is read: the lanes of a warp want 32 rows of it at once, and every thread
//                 reads its operands by itself. S, M*N floats a head, crosses memory six times.
// Measured        58.85 ms, 0.88 TFLOP/s, error 3.5e-7 (H200, B=4, H=12, M=N=2048, D=64)
// Read more       docs/ladder/v0.md
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/launch/launch.cuh"
#include "cuda/launch/scratch.cuh"
#include "fastattn/fastattn.h"

namespace fastattn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarpSize = 32;
constexpr int kRowsPerBlock = kThreads / kWarpSize;  // softmax: one warp a row
constexpr int kSumRun = 64;                          // keys
constexpr unsigned kAllLanes = 0xffffffffU;

// Where element (row, 0) of one head lies in a tensor [B, H, length, D].
__device__ std::int64_t row_offset(const Strides& stride, std::int64_t batch, std::int64_t head,
                                   std::int64_t row) {
  return batch * stride.batch + head * stride.head + row * stride.row;
}

__global__ void __launch_bounds__(kThreads)
    scores_kernel(const __grid_constant__ ForwardParams p, float* gS /* [B, Hq, M, N] */) {
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t row_index = index / p.len_kv;  // into [B, Hq, M]
  if (row_index >= static_cast<std::int64_t>(p.batch) * p.heads_q * p.len_q) return;
  const std::int64_t key = index % p.len_kv;
  const std::int64_t row = row_index % p.len_q;
  const std::int64_t head = row_index / p.len_q % p.heads_q;
  const std::int64_t batch = row_index / p.len_q / p.heads_q;
  const std::int64_t kv_head = head / (p.heads_q / p.heads_kv);

  const float* gQ = static_cast<const float*>(p.q) + row_offset(p.q_stride, batch, head, row);
  const float* gK = static_cast<const float*>(p.k) + row_offset(p.k_stride, batch, kv_head, key);
  float dot = 0.0F;
  for (int d = 0; d < p.head_dim; ++d) dot += gQ[d] * gK[d];
  gS[index] = __fmul_rn(dot, p.scale);
}

__global__ void __launch_bounds__(kThreads)
    softmax_kernel(const __grid_constant__ ForwardParams p, float* gS /* [B, Hq, M, N] */) {
  const int lane = threadIdx.x % kWarpSize;
  const std::int64_t row_index =
      static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarpSize;
  if (row_index >= static_cast<std::int64_t>(p.batch) * p.heads_q * p.len_q) return;
  float* gRow = gS + row_index * p.len_kv;  // [N]

  float row_max = -INFINITY;
  for (int key = lane; key < p.len_kv; key += kWarpSize) row_max = fmaxf(row_max, gRow[key]);
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
    row_max = fmaxf(row_max, __shfl_xor_sync(kAllLanes, row_max, step));
  }
  // With no finite score there is nothing to shift by, and -inf - -inf would be NaN.
  const float shift = row_max == -INFINITY ? 0.0F : row_max;

  float row_sum = 0.0F;
  for (int key = lane; key < p.len_kv; key += kWarpSize) row_sum += expf(gRow[key] - shift);
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
    row_sum += __shfl_xor_sync(kAllLanes, row_sum, step);
  }

  const float inverse = row_sum == 0.0F ? 0.0F : 1.0F / row_sum;
  for (int key = lane; key < p.len_kv; key += kWarpSize) {
    gRow[key] = expf(gRow[key] - shift) * inverse;
  }
  if (p.lse != nullptr && lane == 0) p.lse[row_index] = row_max + logf(row_sum);
}

__global__ void __launch_bounds__(kThreads)
    output_kernel(const __grid_constant__ ForwardParams p, const float* gP /* [B, Hq, M, N] */) {
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t row_index = index / p.head_dim_v;  // into [B, Hq, M]
  if (row_index >= static_cast<std::int64_t>(p.batch) * p.heads_q * p.len_q) return;
  const std::int64_t column = index % p.head_dim_v;
  const std::int64_t row = row_index % p.len_q;
  const std::int64_t head = row_index / p.len_q % p.heads_q;
  const std::int64_t batch = row_index / p.len_q / p.heads_q;
  const std::int64_t kv_head = head / (p.heads_q / p.heads_kv);

  const float* gRow = gP + row_index * p.len_kv;  // [N]
  const float* gV =
      static_cast<const float*>(p.v) + row_offset(p.v_stride, batch, kv_head, 0) + column;
  float sum = 0.0F;
  // In runs of keys: one sum over all would round each product at the size of the whole.
  for (int start = 0; start < p.len_kv; start += kSumRun) {
    float run = 0.0F;
    for (int key = start; key < min(start + kSumRun, p.len_kv); ++key) {
      run += gRow[key] * gV[key * p.v_stride.row];
    }
    sum += run;
  }
  static_cast<float*>(p.out)[row_offset(p.out_stride, batch, head, row) + column] = sum;
}

std::int64_t rows(const ForwardParams& p) {
  return static_cast<std::int64_t>(p.batch) * p.heads_q * p.len_q;
}

// One thread per element, whatever the element is.
LaunchPlan elementwise(std::int64_t elements) {
  return {.blocks = ceil_div(elements, kThreads), .threads = kThreads};
}

// The largest of the three grids, so that a call that has too many blocks is refused.
LaunchPlan plan(const ForwardParams& p) {
  const std::int64_t scores = saturating_product(rows(p), p.len_kv);
  LaunchPlan largest = elementwise(std::max(scores, rows(p) * p.head_dim_v));
  largest.blocks = std::max(largest.blocks, ceil_div(rows(p), kRowsPerBlock));
  largest.workspace_bytes = saturating_product(scores, sizeof(float));
  return largest;
}

void run(const ForwardParams& p, void* stream) {
  const Scratch scratch(plan(p).workspace_bytes, stream, "the scores [B, Hq, M, N]");
  launch<scores_kernel>(elementwise(rows(p) * p.len_kv), stream, p, scratch.floats());
  launch<softmax_kernel>({.blocks = ceil_div(rows(p), kRowsPerBlock), .threads = kThreads}, stream,
                         p, scratch.floats());
  launch<output_kernel>(elementwise(rows(p) * p.head_dim_v), stream, p,
                        static_cast<const float*>(scratch.floats()));
}

}  // namespace

extern const Kernel v0_naive;
const Kernel v0_naive = {
    .name = "v0",
    .title = "naive: scores, softmax and output as three kernels over [B, H, M, N]",
    .arithmetic = "float32 multiply-adds",
    .backend = Backend::kCuda,
    .capabilities = {.head_dim_max = 256, .grouped_heads = true, .min_compute_capability = 75},
    .redirect = "",
    .plan = plan,
    .run = run,
};

}  // namespace fastattn::cuda
