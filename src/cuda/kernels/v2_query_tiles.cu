// V2: FlashAttention-2, simplified.
//
// Idea            Turn the loops inside out. A block owns one query tile and walks K and V once, so
//                 its O never leaves the chip, and O is divided by the row sum once, at the end.
// New since V1    Query tiles are independent: the grid has B*Hq*ceil(M/64) blocks, not B*Hq. A
//                 warp owns whole score rows, so only loading K and V needs a barrier.
// Who owns what   block: 64 query rows of one head. warp: 16 of them. lane: one key of the tile in
//                 Q K^T and in the softmax, every 32nd column in P V.
// Limit now       Shared memory, in size and in traffic: m, l, O and P all live there, few blocks
//                 fit an SM, and both products read two operands per multiply; the lanes read one
//                 column of K, which is one bank.
// Measured        56.89 ms, 0.91 TFLOP/s, error 3.6e-7 (H200, B=4, H=12, M=N=2048, D=64)
// Read more       docs/ladder/v2.md; Dao, FlashAttention-2, section 3 (arXiv:2307.08691)
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/launch/launch.cuh"
#include "cuda/launch/shared.cuh"
#include "fastattn/fastattn.h"

namespace fastattn::cuda {
namespace {

constexpr std::size_t kBlockQ = 64;   // 16 rows for each of 4 warps
constexpr std::size_t kBlockKV = 32;  // one key a lane
constexpr std::size_t kThreads = 128;
constexpr std::size_t kWarpSize = 32;
constexpr std::size_t kRowsPerWarp = kBlockQ / (kThreads / kWarpSize);
constexpr int kBlocksPerSM = 3;  // as many as 227 KB of shared memory hold
constexpr unsigned kAllLanes = 0xffffffffU;

// sQ, sO [64, D]; sK, sV [32, D]; sP [64, 32]; row_max, row_sum, tile_max, rescale [64].
constexpr std::size_t shared_floats(std::size_t head_dim) {
  return 2 * kBlockQ * head_dim + 2 * kBlockKV * head_dim + kBlockQ * kBlockKV + 4 * kBlockQ;
}
static_assert(shared_floats(64) == 14592);

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

// Copies `rows` rows of D floats; rows of the tile past the end of the tensor become 0.
__device__ void load_tile(float* sTile, const float* gTile, std::int64_t row_stride,
                          std::size_t tile_rows, std::size_t rows, std::size_t head_dim) {
  for (std::size_t row = threadIdx.x / kWarpSize; row < tile_rows; row += kThreads / kWarpSize) {
    for (std::size_t d = threadIdx.x % kWarpSize; d < head_dim; d += kWarpSize) {
      sTile[row * head_dim + d] =
          row < rows ? gTile[static_cast<std::int64_t>(row) * row_stride + d] : 0.0F;
    }
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    query_tiles_kernel(const __grid_constant__ ForwardParams p) {
  const std::size_t head_dim = p.head_dim;
  float* sQ = dynamic_shared<float>();       // [kBlockQ, D]
  float* sO = sQ + kBlockQ * head_dim;       // [kBlockQ, D]
  float* sK = sO + kBlockQ * head_dim;       // [kBlockKV, D]
  float* sV = sK + kBlockKV * head_dim;      // [kBlockKV, D]
  float* sP = sV + kBlockKV * head_dim;      // [kBlockQ, kBlockKV]
  float* row_max = sP + kBlockQ * kBlockKV;  // [kBlockQ]
  float* row_sum = row_max + kBlockQ;        // [kBlockQ]
  float* tile_max = row_sum + kBlockQ;       // [kBlockQ]
  float* rescale = tile_max + kBlockQ;       // [kBlockQ]

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

  load_tile(sQ, gQ, p.q_stride.row, kBlockQ, rows, head_dim);
  for (std::size_t row = first_row; row < first_row + kRowsPerWarp; ++row) {
    for (std::size_t d = lane; d < head_dim; d += kWarpSize) sO[row * head_dim + d] = 0.0F;
    row_max[row] = -INFINITY;
    row_sum[row] = 0.0F;
  }

  for (std::size_t kv_start = 0; kv_start < len_kv; kv_start += kBlockKV) {
    const std::size_t keys = min(kBlockKV, len_kv - kv_start);
    __syncthreads();
    load_tile(sK, gK + static_cast<std::int64_t>(kv_start) * p.k_stride.row, p.k_stride.row,
              kBlockKV, keys, head_dim);
    load_tile(sV, gV + static_cast<std::int64_t>(kv_start) * p.v_stride.row, p.v_stride.row,
              kBlockKV, keys, head_dim);
    __syncthreads();

    // S = scale Q K^T. Keys past the end count as -inf.
    for (std::size_t row = first_row; row < first_row + kRowsPerWarp; ++row) {
      float dot = 0.0F;
      for (std::size_t d = 0; d < head_dim; ++d) {
        dot += sQ[row * head_dim + d] * sK[lane * head_dim + d];
      }
      const float score = lane < keys ? __fmul_rn(dot, p.scale) : -INFINITY;
      sP[row * kBlockKV + lane] = score;
      const float max = warp_max(score);
      if (lane == 0) tile_max[row] = max;
    }
    __syncwarp();

    // P = exp(S - m_new), not divided by anything; the old l and O shrink by exp(m_old - m_new).
    for (std::size_t row = first_row; row < first_row + kRowsPerWarp; ++row) {
      const float old_max = row_max[row];
      const float new_max = fmaxf(old_max, tile_max[row]);
      const float shift = new_max == -INFINITY ? 0.0F : new_max;
      const float weight = expf(sP[row * kBlockKV + lane] - shift);
      sP[row * kBlockKV + lane] = weight;
      const float sum = warp_sum(weight);
      __syncwarp();  // all lanes have read row_max
      if (lane == 0) {
        rescale[row] = expf(old_max - shift);
        row_sum[row] = row_sum[row] * rescale[row] + sum;
        row_max[row] = new_max;
      }
    }
    __syncwarp();

    // O = rescale O + P V.
    for (std::size_t row = first_row; row < first_row + kRowsPerWarp; ++row) {
      for (std::size_t d = lane; d < head_dim; d += kWarpSize) {
        float sum = 0.0F;
        for (std::size_t key = 0; key < kBlockKV; ++key) {
          sum += sP[row * kBlockKV + key] * sV[key * head_dim + d];
        }
        sO[row * head_dim + d] = sO[row * head_dim + d] * rescale[row] + sum;
      }
    }
  }

  // The one division. A row with no weight at all saw no key: its output is 0.
  __syncwarp();
  for (std::size_t row = first_row; row < min(first_row + kRowsPerWarp, rows); ++row) {
    const float inverse = row_sum[row] == 0.0F ? 0.0F : 1.0F / row_sum[row];
    for (std::size_t d = lane; d < head_dim; d += kWarpSize) {
      gO[static_cast<std::int64_t>(row) * p.out_stride.row + d] = sO[row * head_dim + d] * inverse;
    }
    if (p.lse != nullptr && lane == 0) {
      p.lse[static_cast<std::int64_t>(head_index) * p.len_q + q_start + row] =
          row_max[row] + logf(row_sum[row]);
    }
  }
}

LaunchPlan plan(const ForwardParams& p) {
  return {.blocks = static_cast<std::int64_t>(p.batch) * p.heads_q * ceil_div(p.len_q, kBlockQ),
          .threads = kThreads,
          .dynamic_shared_bytes = shared_floats(p.head_dim) * sizeof(float)};
}

void run(const ForwardParams& p, void* stream) { launch<query_tiles_kernel>(plan(p), stream, p); }

}  // namespace

extern const Kernel v2_query_tiles;
const Kernel v2_query_tiles = {
    .name = "v2",
    .title = "FlashAttention-2, simplified: a block a query tile, state in shared memory",
    .arithmetic = "float32 multiply-adds",
    .backend = Backend::kCuda,
    .capabilities = {.head_dim_max = 128,
                     .lengths_differ = true,
                     .grouped_heads = true,
                     .min_compute_capability = 75},
    .redirect = "",
    .plan = plan,
    .run = run,
};

}  // namespace fastattn::cuda
