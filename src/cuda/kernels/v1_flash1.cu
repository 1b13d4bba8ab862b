// V1: FlashAttention-1.
//
// Idea            Never store S. Take K and V tile by tile; for each, walk all query tiles, and fold
//                 the tile into a running softmax: row maximum m, row sum l, normalised output O.
// New since V0    One fused kernel. Scores live in shared memory for as long as they are needed;
//                 global memory holds O, m and l between visits, O(M) instead of O(M N).
// Who owns what   block: one (batch, head), all of its tiles. warp: in each phase every fourth score
//                 row (lane = key) or output row (lane = column); a barrier ends each phase.
// Limit now       The grid: B*Hq blocks leave most of the GPU idle. Within a block, each query
//                 tile's O is read and written once per key tile.
// Measured        200.4 ms, 0.26 TFLOP/s, error 4.0e-7 (H200, B=4, H=12, M=N=2048, D=64)
// Read more       docs/ladder/v1.md; Dao et al., FlashAttention, algorithm 1 (arXiv:2205.14135)
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/launch/launch.cuh"
#include "cuda/launch/scratch.cuh"
#include "cuda/launch/shared.cuh"
#include "fastattn/fastattn.h"

namespace fastattn::cuda {
namespace {

constexpr std::size_t kBlockQ = 32;   // one warp reduces ...
constexpr std::size_t kBlockKV = 32;  // ... a row of 32 scores, one a lane
constexpr std::size_t kThreads = 128;
constexpr std::size_t kWarpSize = 32;
constexpr std::size_t kWarps = kThreads / kWarpSize;
constexpr int kBlocksPerSM = 2;  // the grid has no more: no registers need to be saved for it
constexpr unsigned kAllLanes = 0xffffffffU;

// sQ, sK, sV, sO [32, D]; sS [32, 32]; row_max, row_sum, old_scale, new_scale [32].
constexpr std::size_t shared_floats(std::size_t head_dim) {
  return 2 * kBlockQ * head_dim + 2 * kBlockKV * head_dim + kBlockQ * kBlockKV + 4 * kBlockQ;
}
static_assert(shared_floats(64) == 9344);

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
    flash1_kernel(const __grid_constant__ ForwardParams p, float* gMax /* [B, Hq, M] */,
                  float* gSum /* [B, Hq, M] */) {
  const std::size_t head_dim = p.head_dim;
  float* sQ = dynamic_shared<float>();       // [kBlockQ, D]
  float* sO = sQ + kBlockQ * head_dim;       // [kBlockQ, D]
  float* sK = sO + kBlockQ * head_dim;       // [kBlockKV, D]
  float* sV = sK + kBlockKV * head_dim;      // [kBlockKV, D]
  float* sS = sV + kBlockKV * head_dim;      // [kBlockQ, kBlockKV]
  float* row_max = sS + kBlockQ * kBlockKV;  // [kBlockQ]
  float* row_sum = row_max + kBlockQ;        // [kBlockQ]
  float* old_scale = row_sum + kBlockQ;      // [kBlockQ]
  float* new_scale = old_scale + kBlockQ;    // [kBlockQ]

  const std::size_t warp = threadIdx.x / kWarpSize;
  const std::size_t lane = threadIdx.x % kWarpSize;
  const int head_index = static_cast<int>(blockIdx.x);  // into [B, Hq]
  const std::int64_t batch = head_index / p.heads_q;
  const std::int64_t head = head_index % p.heads_q;
  const std::int64_t kv_head = static_cast<int>(head) / (p.heads_q / p.heads_kv);
  const std::size_t len_q = p.len_q;
  const std::size_t len_kv = p.len_kv;
  const float* gQ =
      static_cast<const float*>(p.q) + batch * p.q_stride.batch + head * p.q_stride.head;  // [M, D]
  const float* gK = static_cast<const float*>(p.k) + batch * p.k_stride.batch +
                    kv_head * p.k_stride.head;  // [N, D]
  const float* gV = static_cast<const float*>(p.v) + batch * p.v_stride.batch +
                    kv_head * p.v_stride.head;  // [N, D]
  float* gO =
      static_cast<float*>(p.out) + batch * p.out_stride.batch + head * p.out_stride.head;  // [M, D]
  gMax += static_cast<std::int64_t>(head_index) * p.len_q;
  gSum += static_cast<std::int64_t>(head_index) * p.len_q;

  for (std::size_t row = warp; row < len_q; row += kWarps) {
    for (std::size_t d = lane; d < head_dim; d += kWarpSize) {
      gO[static_cast<std::int64_t>(row) * p.out_stride.row + d] = 0.0F;
    }
    if (lane == 0) {
      gMax[row] = -INFINITY;
      gSum[row] = 0.0F;
    }
  }

  for (std::size_t kv_start = 0; kv_start < len_kv; kv_start += kBlockKV) {
    const std::size_t keys = min(kBlockKV, len_kv - kv_start);
    __syncthreads();
    load_tile(sK, gK + static_cast<std::int64_t>(kv_start) * p.k_stride.row, p.k_stride.row,
              kBlockKV, keys, head_dim);
    load_tile(sV, gV + static_cast<std::int64_t>(kv_start) * p.v_stride.row, p.v_stride.row,
              kBlockKV, keys, head_dim);

    for (std::size_t q_start = 0; q_start < len_q; q_start += kBlockQ) {
      const std::size_t rows = min(kBlockQ, len_q - q_start);
      float* gTile = gO + static_cast<std::int64_t>(q_start) * p.out_stride.row;  // [rows, D]
      __syncthreads();
      load_tile(sQ, gQ + static_cast<std::int64_t>(q_start) * p.q_stride.row, p.q_stride.row,
                kBlockQ, rows, head_dim);
      load_tile(sO, gTile, p.out_stride.row, kBlockQ, rows, head_dim);
      if (threadIdx.x < rows) {
        row_max[threadIdx.x] = gMax[q_start + threadIdx.x];
        row_sum[threadIdx.x] = gSum[q_start + threadIdx.x];
      }
      __syncthreads();

      // S = scale Q K^T. Keys past the end count as -inf.
      for (std::size_t row = warp; row < rows; row += kWarps) {
        float dot = 0.0F;
        for (std::size_t d = 0; d < head_dim; ++d) {
          dot += sQ[row * head_dim + d] * sK[lane * head_dim + d];
        }
        sS[row * kBlockKV + lane] = lane < keys ? __fmul_rn(dot, p.scale) : -INFINITY;
      }
      __syncthreads();

      // P = exp(S - m_new), and what the old O and the new product must be multiplied by so that
      // O stays normalised: l_old exp(m_old - m_new) / l_new, and 1 / l_new.
      for (std::size_t row = warp; row < rows; row += kWarps) {
        const float score = sS[row * kBlockKV + lane];
        const float old_max = row_max[row];
        const float new_max = fmaxf(old_max, warp_max(score));
        const float shift = new_max == -INFINITY ? 0.0F : new_max;
        const float weight = expf(score - shift);
        const float old_sum = row_sum[row] * expf(old_max - shift);
        const float new_sum = old_sum + warp_sum(weight);
        sS[row * kBlockKV + lane] = weight;
        __syncwarp();
        if (lane == 0) {
          row_max[row] = new_max;
          row_sum[row] = new_sum;
          const float inverse = new_sum == 0.0F ? 0.0F : 1.0F / new_sum;
          old_scale[row] = old_sum * inverse;
          new_scale[row] = inverse;
        }
      }
      __syncthreads();

      // O = old_scale O + new_scale P V.
      for (std::size_t row = warp; row < rows; row += kWarps) {
        for (std::size_t d = lane; d < head_dim; d += kWarpSize) {
          float sum = 0.0F;
          for (std::size_t key = 0; key < kBlockKV; ++key) {
            sum += sS[row * kBlockKV + key] * sV[key * head_dim + d];
          }
          const float old = old_scale[row] * sO[row * head_dim + d];
          gTile[static_cast<std::int64_t>(row) * p.out_stride.row + d] = old + new_scale[row] * sum;
        }
      }
      if (threadIdx.x < rows) {
        gMax[q_start + threadIdx.x] = row_max[threadIdx.x];
        gSum[q_start + threadIdx.x] = row_sum[threadIdx.x];
      }
    }
  }

  __syncthreads();
  if (p.lse == nullptr) return;
  float* gLse = p.lse + static_cast<std::int64_t>(head_index) * p.len_q;  // [M]
  for (std::size_t row = threadIdx.x; row < len_q; row += kThreads) {
    gLse[row] = gMax[row] + logf(gSum[row]);
  }
}

LaunchPlan plan(const ForwardParams& p) {
  const std::int64_t heads = static_cast<std::int64_t>(p.batch) * p.heads_q;
  return {.blocks = heads,
          .threads = kThreads,
          .dynamic_shared_bytes = shared_floats(p.head_dim) * sizeof(float),
          .workspace_bytes = static_cast<std::size_t>(heads) * p.len_q * 2 * sizeof(float)};
}

void run(const ForwardParams& p, void* stream) {
  const LaunchPlan launch_plan = plan(p);
  const Scratch scratch(launch_plan.workspace_bytes, stream, "row maxima and sums [2, B, Hq, M]");
  float* gMax = scratch.floats();
  float* gSum = gMax + launch_plan.blocks * p.len_q;
  launch<flash1_kernel>(launch_plan, stream, p, gMax, gSum);
}

}  // namespace

extern const Kernel v1_flash1;
const Kernel v1_flash1 = {
    .name = "v1",
    .title = "FlashAttention-1: fused tiles, K/V outside, queries inside, one block a head",
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
