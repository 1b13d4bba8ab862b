// V3: FlashAttention-2 with each warp's state in its own registers.
//
// Idea            m, l and O belong to one warp, so keep them in its registers. What is left in
//                 shared memory is what lanes must exchange: Q, P, and one tile that K and V share.
// New since V2    O, m and l in registers; both products register-blocked, so that a value of K or V
//                 is read once for 8 rows; 32,768 bytes of shared memory instead of 58,368.
// Who owns what   block: 64 query rows of one head. warp: 8 of them. lane: one key of the tile in
//                 Q K^T and in the softmax, output columns lane and lane + 32 in P V.
// Limit now       Shared memory's turns: K's column, whose 32 rows all start in the same bank, and
//                 copies of 4 bytes.
// Measured        5.57 ms, 9.3 TFLOP/s, error 3.6e-7 (H200, B=4, H=12, M=N=2048, D=64)
// Read more       docs/ladder/v3.md; Dao, FlashAttention-2, section 3.3 (arXiv:2307.08691)
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/launch/launch.cuh"
#include "cuda/launch/shared.cuh"
#include "fastattn/fastattn.h"

namespace fastattn::cuda {
namespace {

constexpr std::size_t kHeadDim = 64;  // fixed, so that a lane's arrays are registers
constexpr std::size_t kBlockQ = 64;   // 8 rows for each of 8 warps
constexpr std::size_t kBlockKV = 32;  // one key a lane
constexpr std::size_t kThreads = 256;
constexpr std::size_t kWarpSize = 32;
constexpr std::size_t kRowsPerWarp = kBlockQ / (kThreads / kWarpSize);
constexpr std::size_t kColumnsPerLane = kHeadDim / kWarpSize;
constexpr unsigned kAllLanes = 0xffffffffU;

struct SharedStorage {
  float q[kBlockQ * kHeadDim];
  float kv[kBlockKV * kHeadDim];  // K until the scores are done, then V
  float p[kBlockQ * kBlockKV];
};
static_assert(sizeof(SharedStorage) == 32768);

__device__ float warp_max(float value) {
  for (std::size_t step = kWarpSize / 2; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

__device__ float warp_sum(float value) {
  for (std::size_t step = kWarpSize / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, step);
  }
  return value;
}

// Copies `rows` rows; rows of the tile past the end of the tensor become 0.
__device__ void load_tile(float* sTile, const float* gTile, std::int64_t row_stride,
                          std::size_t tile_rows, std::size_t rows) {
  for (std::size_t i = threadIdx.x; i < tile_rows * kHeadDim; i += kThreads) {
    const std::size_t row = i / kHeadDim;
    const std::size_t d = i % kHeadDim;
    sTile[i] = row < rows ? gTile[static_cast<std::int64_t>(row) * row_stride + d] : 0.0F;
  }
}

__global__ void __launch_bounds__(kThreads)
    warp_local_kernel(const __grid_constant__ ForwardParams p) {
  SharedStorage& s = *dynamic_shared<SharedStorage>();

  const std::size_t warp = threadIdx.x / kWarpSize;
  const std::size_t lane = threadIdx.x % kWarpSize;
  const std::size_t first_row = warp * kRowsPerWarp;  // of this warp, in the tile
  const std::size_t len_q = p.len_q;
  const std::size_t len_kv = p.len_kv;
  const int q_tiles = (p.len_q - 1) / static_cast<int>(kBlockQ) + 1;
  const int head_index = static_cast<int>(blockIdx.x) / q_tiles;  // into [B, Hq]
  const std::size_t q_start = blockIdx.x % q_tiles * kBlockQ;
  const std::int64_t batch = head_index / p.heads_q;
  const std::int64_t head = head_index % p.heads_q;
  const std::int64_t kv_head = static_cast<int>(head) / (p.heads_q / p.heads_kv);
  const std::size_t rows = min(kBlockQ, len_q - q_start);
  const float* gQ = static_cast<const float*>(p.q) + batch * p.q_stride.batch +
                    head * p.q_stride.head +
                    static_cast<std::int64_t>(q_start) * p.q_stride.row;  // [rows, D]
  const float* gK = static_cast<const float*>(p.k) + batch * p.k_stride.batch +
                    kv_head * p.k_stride.head;  // [N, D]
  const float* gV = static_cast<const float*>(p.v) + batch * p.v_stride.batch +
                    kv_head * p.v_stride.head;  // [N, D]
  float* gO = static_cast<float*>(p.out) + batch * p.out_stride.batch + head * p.out_stride.head +
              static_cast<std::int64_t>(q_start) * p.out_stride.row;  // [rows, D]

  const float* sQ = s.q + first_row * kHeadDim;  // [kRowsPerWarp, D]
  float* sP = s.p + first_row * kBlockKV;        // [kRowsPerWarp, kBlockKV]

  load_tile(s.q, gQ, p.q_stride.row, kBlockQ, rows);

  float row_max[kRowsPerWarp];  // the same in all lanes
  float row_sum[kRowsPerWarp];  // the same in all lanes
  float rO[kRowsPerWarp][kColumnsPerLane];
#pragma unroll
  for (std::size_t r = 0; r < kRowsPerWarp; ++r) {
    row_max[r] = -INFINITY;
    row_sum[r] = 0.0F;
#pragma unroll
    for (std::size_t c = 0; c < kColumnsPerLane; ++c) rO[r][c] = 0.0F;
  }

  for (std::size_t kv_start = 0; kv_start < len_kv; kv_start += kBlockKV) {
    const std::size_t keys = min(kBlockKV, len_kv - kv_start);
    __syncthreads();
    load_tile(s.kv, gK + static_cast<std::int64_t>(kv_start) * p.k_stride.row, p.k_stride.row,
              kBlockKV, keys);
    __syncthreads();

    // S = scale Q K^T: one value of K against 8 rows of Q.
    float rS[kRowsPerWarp] = {};
    for (std::size_t d = 0; d < kHeadDim; ++d) {
      const float k = s.kv[lane * kHeadDim + d];
#pragma unroll
      for (std::size_t r = 0; r < kRowsPerWarp; ++r) rS[r] += sQ[r * kHeadDim + d] * k;
    }

    // P = exp(S - m_new), not divided by anything; the old l and O shrink by exp(m_old - m_new).
#pragma unroll
    for (std::size_t r = 0; r < kRowsPerWarp; ++r) {
      const float score = lane < keys ? __fmul_rn(rS[r], p.scale) : -INFINITY;
      const float new_max = fmaxf(row_max[r], warp_max(score));
      const float shift = new_max == -INFINITY ? 0.0F : new_max;
      const float weight = expf(score - shift);
      const float rescale = expf(row_max[r] - shift);
      row_sum[r] = row_sum[r] * rescale + warp_sum(weight);
      row_max[r] = new_max;
#pragma unroll
      for (std::size_t c = 0; c < kColumnsPerLane; ++c) rO[r][c] *= rescale;
      sP[r * kBlockKV + lane] = weight;
    }

    __syncthreads();
    load_tile(s.kv, gV + static_cast<std::int64_t>(kv_start) * p.v_stride.row, p.v_stride.row,
              kBlockKV, keys);
    __syncthreads();

    // O = rescale O + P V: one value of V against 8 rows of P. The tile is summed by itself first:
    // a sum over all keys in one go would round each product at the size of the whole.
    float rPV[kRowsPerWarp][kColumnsPerLane] = {};
    for (std::size_t key = 0; key < kBlockKV; ++key) {
#pragma unroll
      for (std::size_t c = 0; c < kColumnsPerLane; ++c) {
        const float v = s.kv[key * kHeadDim + c * kWarpSize + lane];
#pragma unroll
        for (std::size_t r = 0; r < kRowsPerWarp; ++r) rPV[r][c] += sP[r * kBlockKV + key] * v;
      }
    }
#pragma unroll
    for (std::size_t r = 0; r < kRowsPerWarp; ++r) {
#pragma unroll
      for (std::size_t c = 0; c < kColumnsPerLane; ++c) rO[r][c] += rPV[r][c];
    }
  }

  // The one division. A row with no weight at all saw no key: its output is 0.
#pragma unroll
  for (std::size_t r = 0; r < kRowsPerWarp; ++r) {
    const std::size_t row = first_row + r;
    if (row >= rows) break;
    const float inverse = row_sum[r] == 0.0F ? 0.0F : 1.0F / row_sum[r];
#pragma unroll
    for (std::size_t c = 0; c < kColumnsPerLane; ++c) {
      gO[static_cast<std::int64_t>(row) * p.out_stride.row + c * kWarpSize + lane] =
          rO[r][c] * inverse;
    }
    if (p.lse != nullptr && lane == 0) {
      p.lse[static_cast<std::int64_t>(head_index) * p.len_q + q_start + row] =
          row_max[r] + logf(row_sum[r]);
    }
  }
}

LaunchPlan plan(const ForwardParams& p) {
  return {.blocks = static_cast<std::int64_t>(p.batch) * p.heads_q * ceil_div(p.len_q, kBlockQ),
          .threads = kThreads,
          .dynamic_shared_bytes = sizeof(SharedStorage)};
}

void run(const ForwardParams& p, void* stream) { launch<warp_local_kernel>(plan(p), stream, p); }

}  // namespace

extern const Kernel v3_warp_local;
const Kernel v3_warp_local = {
    .name = "v3",
    .title = "warp-local FlashAttention-2: softmax state and output in registers",
    .arithmetic = "float32 multiply-adds",
    .backend = Backend::kCuda,
    .capabilities = {.head_dim_min = kHeadDim,
                     .head_dim_max = kHeadDim,
                     .lengths_differ = true,
                     .grouped_heads = true,
                     .min_compute_capability = 75},
    .redirect = "v2",
    .plan = plan,
    .run = run,
};

}  // namespace fastattn::cuda
