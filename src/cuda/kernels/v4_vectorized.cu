// V4: V3, made ready for the machine.
//
// Idea            The algorithm stays; what the hardware charges for around it goes.
// New since V3    16-byte copies of Q, K and V where pointers and strides allow; K rows padded from
//                 64 to 65 floats, so that 32 lanes reading a column hit 32 banks; int for whatever
//                 a tile, row, warp or lane bounds, 64 bits for offsets into tensors alone; helpers
//                 inlined by force.
// Who owns what   block: 64 query rows of one head. warp: 8 of them. lane: one key of the tile in
//                 Q K^T and in the softmax, output columns lane and lane + 32 in P V.
// Limit now       Shared-memory traffic: a value of Q or P that is read serves one key or two
//                 columns, so the products wait for loads, not for the multipliers.
// Measured        2.42 ms, 21.3 TFLOP/s, error 3.6e-7 (H200, B=4, H=12, M=N=2048, D=64)
// Read more       docs/ladder/v4.md
//
// spills allowed: at most two registers, read once a tile. With the loop over keys unrolled by 2
// nothing is spilled, and the kernel takes 2.48 ms instead of 2.42 (H200, B=4, H=12, M=N=2048).
#include <cmath>
#include <cstdint>

#include "cuda/launch/dispatch.cuh"
#include "cuda/launch/launch.cuh"
#include "cuda/launch/shared.cuh"
#include "fastattn/fastattn.h"

namespace fastattn::cuda {
namespace {

constexpr int kHeadDim = 64;  // fixed, so that a lane's arrays are registers
constexpr int kBlockQ = 64;   // 8 rows for each of 8 warps
constexpr int kBlockKV = 32;  // one key a lane
constexpr int kThreads = 256;
constexpr int kWarpSize = 32;
constexpr int kRowsPerWarp = kBlockQ / (kThreads / kWarpSize);
constexpr int kKeyStride = kHeadDim + 1;  // of a K row in shared memory: odd, so no bank twice
constexpr int kColumnsPerLane = kHeadDim / kWarpSize;
constexpr unsigned kAllLanes = 0xffffffffU;

struct SharedStorage {
  float q[kBlockQ * kHeadDim];
  float kv[kBlockKV * kKeyStride];  // K until the scores are done, then V with rows of 64
  float p[kBlockQ * kBlockKV];
};
static_assert(sizeof(SharedStorage) == 32896);

__device__ __forceinline__ float warp_max(float value) {
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

__device__ __forceinline__ float warp_sum(float value) {
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, step);
  }
  return value;
}

// Copies `rows` rows to rows of kStride floats; rows past the end of the tensor become 0. kAligned:
// every row of the tensor starts at a multiple of 16 bytes.
template <bool kAligned, int kStride>
__device__ __forceinline__ void load_tile(float* sTile, const float* gTile, std::int64_t row_stride,
                                          int tile_rows, int rows) {
  constexpr int kWidth = kAligned ? 4 : 1;  // floats a copy
  constexpr int kCopiesPerRow = kHeadDim / kWidth;
#pragma unroll 1  // unrolled, the addresses of all copies would be kept in registers
  for (int i = static_cast<int>(threadIdx.x); i < tile_rows * kCopiesPerRow; i += kThreads) {
    const int row = i / kCopiesPerRow;
    const int d = i % kCopiesPerRow * kWidth;
    const float* source = gTile + row * row_stride + d;
    float* target = sTile + row * kStride + d;
    if constexpr (kAligned) {
      const float4 value = row < rows ? *reinterpret_cast<const float4*>(source)
                                      : make_float4(0.0F, 0.0F, 0.0F, 0.0F);
      if constexpr (kStride % 4 == 0) {
        *reinterpret_cast<float4*>(target) = value;
      } else {
        target[0] = value.x;
        target[1] = value.y;
        target[2] = value.z;
        target[3] = value.w;
      }
    } else {
      *target = row < rows ? *source : 0.0F;
    }
  }
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    vectorized_kernel(const __grid_constant__ ForwardParams p) {
  SharedStorage& s = *dynamic_shared<SharedStorage>();

  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int first_row = warp * kRowsPerWarp;  // of this warp, in the tile
  const int q_tiles = (p.len_q - 1) / kBlockQ + 1;
  const int head_index = static_cast<int>(blockIdx.x) / q_tiles;  // into [B, Hq]
  const int q_start = static_cast<int>(blockIdx.x) % q_tiles * kBlockQ;
  const std::int64_t batch = head_index / p.heads_q;
  const std::int64_t head = head_index % p.heads_q;
  const std::int64_t kv_head = static_cast<int>(head) / (p.heads_q / p.heads_kv);
  const float* gQ = static_cast<const float*>(p.q) + batch * p.q_stride.batch +
                    head * p.q_stride.head + q_start * p.q_stride.row;  // [rows, D]
  const float* gK = static_cast<const float*>(p.k) + batch * p.k_stride.batch +
                    kv_head * p.k_stride.head;  // [N, D]
  const float* gV = static_cast<const float*>(p.v) + batch * p.v_stride.batch +
                    kv_head * p.v_stride.head;  // [N, D]

  const float* sQ = s.q + first_row * kHeadDim;  // [kRowsPerWarp, D]
  float* sP = s.p + first_row * kBlockKV;        // [kRowsPerWarp, kBlockKV]

  load_tile<kAligned, kHeadDim>(s.q, gQ, p.q_stride.row, kBlockQ, min(kBlockQ, p.len_q - q_start));

  float row_max[kRowsPerWarp];  // the same in all lanes
  float row_sum[kRowsPerWarp];  // the same in all lanes
  float rO[kRowsPerWarp][kColumnsPerLane];
#pragma unroll
  for (int r = 0; r < kRowsPerWarp; ++r) {
    row_max[r] = -INFINITY;
    row_sum[r] = 0.0F;
#pragma unroll
    for (int c = 0; c < kColumnsPerLane; ++c) rO[r][c] = 0.0F;
  }

  for (int keys_left = p.len_kv; keys_left > 0; keys_left -= kBlockKV) {
    const int keys = min(kBlockKV, keys_left);
    __syncthreads();
    load_tile<kAligned, kKeyStride>(s.kv, gK, p.k_stride.row, kBlockKV, keys);
    __syncthreads();

    // S = scale Q K^T: one value of K against 8 rows of Q.
    float rS[kRowsPerWarp] = {};
#pragma unroll 4  // 4 values of a row of Q or P are one 16-byte load; more would cost registers
    for (int d = 0; d < kHeadDim; ++d) {
      const float k = s.kv[lane * kKeyStride + d];
#pragma unroll
      for (int r = 0; r < kRowsPerWarp; ++r) rS[r] += sQ[r * kHeadDim + d] * k;
    }

    // P = exp(S - m_new), not divided by anything; the old l and O shrink by exp(m_old - m_new).
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
      const float score = lane < keys ? __fmul_rn(rS[r], p.scale) : -INFINITY;
      const float new_max = fmaxf(row_max[r], warp_max(score));
      const float shift = new_max == -INFINITY ? 0.0F : new_max;
      const float weight = expf(score - shift);
      const float rescale = expf(row_max[r] - shift);
      row_sum[r] = row_sum[r] * rescale + warp_sum(weight);
      row_max[r] = new_max;
#pragma unroll
      for (int c = 0; c < kColumnsPerLane; ++c) rO[r][c] *= rescale;
      sP[r * kBlockKV + lane] = weight;
    }

    __syncthreads();
    load_tile<kAligned, kHeadDim>(s.kv, gV, p.v_stride.row, kBlockKV, keys);
    __syncthreads();

    // O = rescale O + P V: one value of V against 8 rows of P. The tile is summed by itself first:
    // a sum over all keys in one go would round each product at the size of the whole.
    float rPV[kRowsPerWarp][kColumnsPerLane] = {};
#pragma unroll 4
    for (int key = 0; key < kBlockKV; ++key) {
#pragma unroll
      for (int c = 0; c < kColumnsPerLane; ++c) {
        const float v = s.kv[key * kHeadDim + c * kWarpSize + lane];
#pragma unroll
        for (int r = 0; r < kRowsPerWarp; ++r) rPV[r][c] += sP[r * kBlockKV + key] * v;
      }
    }
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
#pragma unroll
      for (int c = 0; c < kColumnsPerLane; ++c) rO[r][c] += rPV[r][c];
    }
    gK += kBlockKV * p.k_stride.row;
    gV += kBlockKV * p.v_stride.row;
  }

  // The one division. A row with no weight at all saw no key: its output is 0.
  float* gO = static_cast<float*>(p.out) + batch * p.out_stride.batch + head * p.out_stride.head +
              q_start * p.out_stride.row;  // [rows, D]
#pragma unroll
  for (int r = 0; r < kRowsPerWarp; ++r) {
    const int row = first_row + r;
    if (q_start + row >= p.len_q) break;
    const float inverse = row_sum[r] == 0.0F ? 0.0F : 1.0F / row_sum[r];
#pragma unroll
    for (int c = 0; c < kColumnsPerLane; ++c) {
      gO[row * p.out_stride.row + c * kWarpSize + lane] = rO[r][c] * inverse;
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

// Every row starts at a multiple of 16 bytes: 4 floats, so the strides must be multiples of 4.
bool is_aligned(const void* pointer, const Strides& stride) {
  return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0 && stride.batch % 4 == 0 &&
         stride.head % 4 == 0 && stride.row % 4 == 0;
}

void run(const ForwardParams& p, void* stream) {
  const bool aligned =
      is_aligned(p.q, p.q_stride) && is_aligned(p.k, p.k_stride) && is_aligned(p.v, p.v_stride);
  dispatch_bool(aligned, [&](auto kAligned) {
    launch<vectorized_kernel<kAligned.value>>(plan(p), stream, p);
  });
}

}  // namespace

extern const Kernel v4_vectorized;
const Kernel v4_vectorized = {
    .name = "v4",
    .title = "V3 with 16-byte copies, padded K rows and 32-bit indices",
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
