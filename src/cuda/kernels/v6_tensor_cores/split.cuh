// V6 for float32: each operand as two float16 parts under a power-of-two scale, x = (hi + lo) / 2^e,
// and three products for each: hi hi + hi lo + lo hi. What is left out, lo lo, is below 2^-22.
//
// A first kernel splits K and V, tile by tile, into scratch memory; the second is FlashAttention-2
// on mma.sync. Tensor cores truncate their sums: so the small products are added first, and the sums
// of a tile are added to O outside of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/v6_tensor_cores/instances.cuh"
#include "cuda/launch/launch.cuh"
#include "cuda/launch/scratch.cuh"
#include "cuda/launch/shared.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ex2.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/tile/copy.cuh"
#include "cuda/tile/lanes.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/number16.cuh"
#include "cuda/tile/schedule.cuh"
#include "cuda/tile/softmax.cuh"
#include "fastattn/fastattn.h"

namespace fastattn::cuda::v6::split {

#ifndef SP64
#define SP64 kWarps = 4, kRowTiles = 2, kBlockKV = 32, kStages = 3, kBlocksPerSM = 2, kQInRegisters = 1, kKeepK = 1
#endif
#ifndef SP128
#define SP128 kWarps = 8, kRowTiles = 1, kBlockKV = 64, kStages = 2, kBlocksPerSM = 1, kQInRegisters = 1, kKeepK = 1
#endif
#ifndef SP256
#define SP256 kWarps = 8, kRowTiles = 1, kBlockKV = 16, kStages = 2, kBlocksPerSM = 1, kQInRegisters = 0, kKeepK = 0
#endif
template <int kHeadDim>
struct Shape;
template <>
struct Shape<64> {
  static constexpr int SP64;
};
template <>
struct Shape<128> {
  static constexpr int SP128;
};
template <>
struct Shape<256> {
  static constexpr int SP256;
};

// What the pre-pass tells of a tile of keys.
struct alignas(16) TileHead {
  float k_factor, v_factor;  // what a split number is to be multiplied by
  int k_is_uneven, v_is_uneven;  // its rows have factors of their own; or it holds an inf or a NaN
};

// Scratch memory: for each tile of each head, [4][kBlockKV, kHeadDim] of float16 (K hi, K lo, V hi,
// V lo, in Tile16's order), then the factors of its rows, [2][kBlockKV], then all heads.
struct SplitKV {
  std::uint16_t* parts;
  float* factors;
  TileHead* heads;
  int tiles;       // of a head
  int first_tile;  // of those that some row sees
};

struct Call {
  ForwardParams p;
  SplitKV kv;
  int heads_together;
};

template <int kHeadDim_>
struct Traits : Shape<kHeadDim_> {
  using S = Shape<kHeadDim_>;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kThreads = S::kWarps * 32;
  static constexpr int kWarpRows = S::kRowTiles * 16;
  static constexpr int kBlockQ = S::kWarps * kWarpRows;
  static constexpr int kPartBytes = S::kBlockKV * kHeadDim * 2;
  static constexpr int kTileBytes = 4 * kPartBytes;
  static constexpr int kQBytes = S::kQInRegisters ? 0 : 2 * kBlockQ * kHeadDim * 2;
  static constexpr std::size_t kSharedBytes = 
      kQBytes + S::kStages * (kTileBytes + static_cast<int>(sizeof(TileHead)));

  // The tiles that hold a key which some row sees.
  static KeyRange seen_tiles(const ForwardParams& p) {
    const int begin = visible_keys(p, 0).begin, end = visible_keys(p, p.len_q - 1).end;
    if (begin >= end) return {0, 0};
    return {begin / S::kBlockKV, (end - 1) / S::kBlockKV + 1};
  }
  static SplitKV layout(const ForwardParams& p, void* memory) {
    const KeyRange tiles = seen_tiles(p);
    const std::int64_t all =
        static_cast<std::int64_t>(tiles.end - tiles.begin) * p.batch * p.heads_kv;
    char* bytes = static_cast<char*>(memory);
    return {.parts = reinterpret_cast<std::uint16_t*>(bytes),
            .factors = reinterpret_cast<float*>(bytes + all * kTileBytes),
            .heads = reinterpret_cast<TileHead*>(bytes + all * (kTileBytes + 2 * S::kBlockKV * 4)),
            .tiles = tiles.end - tiles.begin,
            .first_tile = tiles.begin};
  }
  static std::size_t scratch_bytes(const ForwardParams& p) {
    const KeyRange tiles = seen_tiles(p);
    constexpr std::size_t kBytes = kTileBytes + 2 * S::kBlockKV * sizeof(float) + sizeof(TileHead);
    return static_cast<std::size_t>(tiles.end - tiles.begin) * p.batch * p.heads_kv * kBytes;
  }
};

// Weights are at most 2^15, which float16 holds, and a row's largest one so far was 2^7 or more.
constexpr float kWeightStart = 7.0F;
constexpr float kWeightEnd = 15.0F;
constexpr float kWeightUnit = 1.0F / 32768.0F;

// The power of 2 that brings |x| to [2^14, 2^15); 1 for 0. Clamped so that its inverse is no subnormal.
__device__ __forceinline__ float scale_of(float absolute_max) {
  if (absolute_max == 0.0F) return 1.0F;
  const int exponent = static_cast<int>(__float_as_uint(absolute_max) >> 23);  // 0 for subnormals
  return __uint_as_float(static_cast<unsigned>(min(127 + 14 - (exponent - 127), 253)) << 23);
}
// 1 / x for a power of 2.
__device__ __forceinline__ float inverse_of(float power) {
  return __uint_as_float((254U << 23) - __float_as_uint(power));
}
__device__ __forceinline__ float finite_or_zero(float x) {
  return fabsf(x) <= 3.402823466e38F ? x : 0.0F;
}

// hi and lo parts of two numbers, packed. What is not finite has no lo part.
struct Parts {
  unsigned hi, lo;
};
__device__ __forceinline__ Parts split(float low, float high) {
  const unsigned hi = ptx::cvt_rn_f16x2(high, low);
  const float2 taken = ptx::f16x2_to_f32(hi);
  return {hi, ptx::cvt_rn_f16x2(high - taken.y, low - taken.x)};
}
__device__ __forceinline__ Parts split_any(float low, float high) {
  const Parts parts = split(low, high);
  const unsigned keep = (finite_or_zero(low) == low ? 0x0000ffffU : 0U) | (finite_or_zero(high) == high ? 0xffff0000U : 0U);
  return {parts.hi, parts.lo & keep};
}
// Zeros in the place of inf and NaN.
__device__ __forceinline__ unsigned finite_or_zero16(unsigned pair) {
  constexpr unsigned kExponent = Number16<DType::kFloat16>::kExponent;
  const unsigned low = (pair & kExponent) == kExponent ? 0U : 0x0000ffffU;
  const unsigned high = (pair >> 16 & kExponent) == kExponent ? 0U : 0xffff0000U;
  return pair & (low | high);
}

constexpr int kSplitThreads = 256;

// One block splits one tile of K (blockIdx.y = 0) or of V.
template <class T>
__global__ void __launch_bounds__(kSplitThreads, T::kHeadDim == 64 ? 8 : 4)
    split_kernel(const __grid_constant__ Call call) {
  using Tile = Tile16<T::kHeadDim>;
  constexpr int kBlockKV = T::kBlockKV, kRowStep = kSplitThreads / Tile::kChunks;
  constexpr int kPasses = (kBlockKV + kRowStep - 1) / kRowStep;
  constexpr int kWarps = kSplitThreads / 32;
  __shared__ float sLargest[kWarps], sSmallest[kWarps];  // absolute maxima of rows; the least not 0

  const ForwardParams& p = call.p;
  const bool is_v = blockIdx.x % 2 == 1;
  const std::int64_t index = blockIdx.x / 2;  // of the tile, over all heads
  const std::int64_t head_index = index / call.kv.tiles;
  const int first_row =
      (call.kv.first_tile + static_cast<int>(index % call.kv.tiles)) * kBlockKV;
  const Strides& stride = is_v ? p.v_stride : p.k_stride;
  const int dim = is_v ? p.head_dim_v : p.head_dim;
  const HeadView g = head_view(is_v ? p.v : p.k, stride, head_index / p.heads_kv, head_index % p.heads_kv, p.len_kv, dim);
  const int r = static_cast<int>(threadIdx.x) / Tile::kChunks;
  const int c = static_cast<int>(threadIdx.x) % Tile::kChunks;

  const bool is_aligned = reinterpret_cast<std::uintptr_t>(g.data) % 16 == 0 && g.row_stride % 4 == 0;
  float x[kPasses][8];
  float row_max[kPasses];
  float largest = 0.0F, smallest = INFINITY;
  bool wild = false;
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int row = first_row + r + i * kRowStep;
    const float* source = g.data + row * g.row_stride + 8 * c;
    const int columns = row < g.length && r + i * kRowStep < kBlockKV ? min(max(dim - 8 * c, 0), 8) : 0;
    if (is_aligned && columns == 8) {
      const float4 a = load4(source), b = load4(source + 4);
      x[i][0] = a.x, x[i][1] = a.y, x[i][2] = a.z, x[i][3] = a.w;
      x[i][4] = b.x, x[i][5] = b.y, x[i][6] = b.z, x[i][7] = b.w;
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) x[i][e] = e < columns ? source[e] : 0.0F;
    }
    row_max[i] = 0.0F;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float finite = finite_or_zero(x[i][e]);
      wild = wild || finite != x[i][e];
      row_max[i] = fmaxf(row_max[i], fabsf(finite));
    }
    row_max[i] = max_of_lanes<Tile::kChunks>(row_max[i]);
    largest = fmaxf(largest, row_max[i]);
    if (row_max[i] != 0.0F) smallest = fminf(smallest, row_max[i]);
  }
  largest = max_of_lanes<32>(largest);
  smallest = -max_of_lanes<32>(-smallest);
  if (threadIdx.x % 32 == 0) {
    sLargest[threadIdx.x / 32] = largest;
    sSmallest[threadIdx.x / 32] = smallest;
  }
  wild = __syncthreads_or(wild) != 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    largest = fmaxf(largest, sLargest[w]);
    smallest = fminf(smallest, sSmallest[w]);
  }

  // Rows 2^16 apart and more would lose digits under one scale.
  const bool is_uneven = wild || smallest * 65536.0F < largest;
  const float tile_scale = scale_of(largest);
  char* hi = reinterpret_cast<char*>(call.kv.parts) + index * T::kTileBytes + (is_v ? 2 * T::kPartBytes : 0);
  float* factors = call.kv.factors + (2 * index + (is_v ? 1 : 0)) * kBlockKV;
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int row = r + i * kRowStep;
    if (row >= kBlockKV) continue;
    const float scale = is_uneven ? scale_of(row_max[i]) : tile_scale;
    if (c == 0) factors[row] = inverse_of(scale);
    Parts parts[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) parts[e] = split_any(x[i][2 * e] * scale, x[i][2 * e + 1] * scale);
    char* target = hi + Tile::offset(row, c);
    *reinterpret_cast<uint4*>(target) = make_uint4(parts[0].hi, parts[1].hi, parts[2].hi, parts[3].hi);
    *reinterpret_cast<uint4*>(target + T::kPartBytes) = make_uint4(parts[0].lo, parts[1].lo, parts[2].lo, parts[3].lo);
  }
  if (threadIdx.x == 0) {
    TileHead& tile_head = call.kv.heads[index];
    (is_v ? tile_head.v_factor : tile_head.k_factor) = inverse_of(tile_scale);
    (is_v ? tile_head.v_is_uneven : tile_head.k_is_uneven) = is_uneven ? 1 : 0;
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kBlocksPerSM)
    attention_kernel(const __grid_constant__ Call call) {
  using Number = Number16<DType::kFloat16>;
  using Tile = Tile16<T::kHeadDim>;
  constexpr int kHeadDim = T::kHeadDim, kBlockKV = T::kBlockKV, kThreads = T::kThreads;
  constexpr int kRowTiles = T::kRowTiles, kStages = T::kStages, kPart = T::kPartBytes;
  constexpr int kKeyTiles = kBlockKV / 8, kColumnTiles = kHeadDim / 8, kSteps = kHeadDim / 16;
  constexpr int kPvSteps = kBlockKV / 16, kRows = 2 * kRowTiles;

  char* sQ = dynamic_shared<char>();  // [2][kBlockQ, kHeadDim], where Q is not kept in registers
  char* sKV = sQ + T::kQBytes;        // [kStages][4][kBlockKV, kHeadDim]
  TileHead* sHeads = reinterpret_cast<TileHead*>(sKV + kStages * T::kTileBytes);  // [kStages]

  const ForwardParams& p = call.p;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
  const QueryTile tile = query_tile(p, T::kBlockQ, call.heads_together);
  const std::int64_t kv_head =
      static_cast<std::int64_t>(tile.batch) * p.heads_kv + tile.head / (p.heads_q / p.heads_kv);
  const KeyTiles tiles = key_tiles(p, tile.first_row, min(tile.first_row + T::kBlockQ, p.len_q) - 1, kBlockKV);
  const std::int64_t first_tile = kv_head * call.kv.tiles - call.kv.first_tile;
  const int warp_row = warp * T::kWarpRows;
  const auto row_of = [&](int r) { return tile.first_row + warp_row + 8 * r + g; };

  const auto start_tile = [&](int visit, int stage) {
    if (visit < tiles.count()) {
      const std::int64_t index = first_tile + tiles.at(visit);
      const char* source = reinterpret_cast<const char*>(call.kv.parts) + index * T::kTileBytes + 16 * threadIdx.x;
      char* target = sKV + stage * T::kTileBytes + 16 * threadIdx.x;
#pragma unroll
      for (int i = 0; i < T::kTileBytes / 16 / kThreads; ++i) {
        ptx::cp_async<16>(target + i * 16 * kThreads, source + i * 16 * kThreads, 16);
      }
      if (threadIdx.x == 0) {
        ptx::cp_async<16>(sHeads + stage, call.kv.heads + index, 16);
      }
    }
    ptx::cp_async_commit_group();
  };
  for (int i = 0; i < kStages - 1; ++i) start_tile(i, i);

  // Q, each row under its own scale; the sign of the softmax's scale goes into it, or its being 0.
  const float sign = sign_of_scale(p.scale), scale_log2 = scale_log2_of(p.scale);
  const HeadView gQ = head_view(p.q, p.q_stride, tile.batch, tile.head, p.len_q, p.head_dim);
  const auto load_q = [&](int row, int column) {
    return row < p.len_q && column < p.head_dim ? gQ.data[row * gQ.row_stride + column] * sign : 0.0F;
  };
  unsigned rQ[T::kQInRegisters ? kSteps : 1][2][kRowTiles][4];  // [..][hi, lo]
  float factor[kRows];  // of this thread's rows: what makes an integer product a score, but for K's factor
  bool q_is_wild = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float row_max = 0.0F;
#pragma unroll 4
    for (int i = 0; i < kHeadDim / 4; ++i) {
      const float x = load_q(row_of(r), i / 2 * 8 + 2 * t + i % 2);
      const float finite = finite_or_zero(x);
      if (finite != x) q_is_wild = true;
      row_max = fmaxf(row_max, fabsf(finite));
    }
    const float scale = scale_of(max_of_lanes<4>(row_max));
    factor[r] = scale_log2 * inverse_of(scale);
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
      const int column = 8 * i + 2 * t;
      const Parts parts = split_any(load_q(row_of(r), column) * scale, load_q(row_of(r), column + 1) * scale);
      if constexpr (T::kQInRegisters) {
        rQ[i / 2][0][r / 2][i % 2 * 2 + r % 2] = parts.hi;
        rQ[i / 2][1][r / 2][i % 2 * 2 + r % 2] = parts.lo;
      } else {
        char* target = sQ + Tile::offset(warp_row + 8 * r + g, i) + 4 * t;
        *reinterpret_cast<unsigned*>(target) = parts.hi;
        *reinterpret_cast<unsigned*>(target + T::kQBytes / 2) = parts.lo;
      }
    }
  }
  q_is_wild = __any_sync(0xffffffffU, q_is_wild) != 0;

  const int q_offset = Tile::offset(warp_row + lane % 16, lane / 16);
  const int k_offset = Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const int v_offset = Tile::offset(lane % 16, lane / 16);

  References<kRows> reference;
  float rO[kRowTiles][kColumnTiles][4] = {};

  // kCareful: the mask cuts through the tile, or it or Q holds numbers that need care.
  const auto step = [&](int kv_tile, int tile_at, const TileHead& head, auto is_careful) {
    constexpr bool kCareful = decltype(is_careful)::value;
    const int kv_start = kv_tile * kBlockKV;
    int q_at = q_offset, k_at = tile_at + k_offset, v_at = tile_at + 2 * kPart + v_offset;
    asm volatile("" : "+r"(q_at), "+r"(k_at), "+r"(v_at));
    const auto finite = [](unsigned x) { return kCareful ? finite_or_zero16(x) : x; };
    const auto corrections = [&](float(&sum)[2][4], const unsigned(&hi)[4], const unsigned(&lo)[4], const unsigned(&b_hi)[4], const unsigned(&b_lo)[4], bool is_first) {
      const unsigned a_hi[4] = {finite(hi[0]), finite(hi[1]), finite(hi[2]), finite(hi[3])};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (is_first) {
          Number::mma_zero(sum[h], lo, finite(b_hi[2 * h]), finite(b_hi[2 * h + 1]));
        } else {
          Number::mma(sum[h], lo, finite(b_hi[2 * h]), finite(b_hi[2 * h + 1]));
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) Number::mma(sum[h], a_hi, b_lo[2 * h], b_lo[2 * h + 1]);
    };

    // S = Q K^T, 16 keys at a time.
    float rS[kRowTiles][kKeyTiles][4];
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += 2) {
      unsigned k_hi[T::kKeepK ? kSteps : 1][4];
      const auto read_q = [&](unsigned(&q)[4], int kk, int part, int m) {
        if constexpr (T::kQInRegisters) {
#pragma unroll
          for (int e = 0; e < 4; ++e) q[e] = rQ[kk][part][m][e];
        } else {
          ptx::ldmatrix_x4(q, sQ + (q_at ^ (32 * kk)) + part * (T::kQBytes / 2) + m * 16 * Tile::kRowBytes);
        }
      };
      const auto read_k = [&](unsigned(&k)[4], int kk, int part) {
        ptx::ldmatrix_x4(k, sQ + (k_at ^ (32 * kk)) + part * kPart + n * 8 * Tile::kRowBytes);
      };
      float sum[kRowTiles][2][4];
#pragma unroll
      for (int kk = 0; kk < kSteps; ++kk) {
        unsigned k_lo[4];
        auto& hi = k_hi[T::kKeepK ? kk : 0];
        read_k(hi, kk, 0);
        read_k(k_lo, kk, 1);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          unsigned q_hi[4], q_lo[4];
          read_q(q_hi, kk, 0, m);
          read_q(q_lo, kk, 1, m);
          corrections(sum[m], q_hi, q_lo, hi, k_lo, kk == 0);
        }
      }
#pragma unroll
      for (int kk = 0; kk < kSteps; ++kk) {
        auto& hi = k_hi[T::kKeepK ? kk : 0];
        if constexpr (!T::kKeepK) read_k(hi, kk, 0);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          unsigned q_hi[4];
          read_q(q_hi, kk, 0, m);
          Number::mma(sum[m][0], q_hi, hi[0], hi[1]);
          Number::mma(sum[m][1], q_hi, hi[2], hi[3]);
        }
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int e = 0; e < 8; ++e) rS[m][n + e / 4][e % 4] = sum[m][e / 4][e % 4];
      }
    }

    // The product is rounded, so that equal scores stay equal.
    const float* gFactors = call.kv.factors + 2 * (first_tile + kv_tile) * kBlockKV + 2 * t;
    float largest[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const KeyRange seen = kCareful ? visible_keys(p, row_of(r)) : KeyRange{};
      const int begin = seen.begin - kv_start - 2 * t, end = seen.end - kv_start - 2 * t;
      const float row_factor = kCareful ? factor[r] : factor[r] * head.k_factor;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& s = rS[r / 2][n][2 * (r % 2) + e];
          s = __fmul_rn(s, kCareful ? row_factor * gFactors[8 * n + e] : row_factor);
          if (kCareful && (8 * n + e < begin || 8 * n + e >= end)) s = -INFINITY;
        }
      }
      largest[r] = largest_of_row(rS, r);
    }
    reference.follow(largest, rO, kWeightStart, kWeightEnd);

    // Weights. In a careful step V's factors go into them, and each row has a scale of its own.
    float v_factor[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      v_factor[r] = head.v_factor * kWeightUnit;
      float weight_max = 0.0F;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& s = rS[r / 2][n][2 * (r % 2) + e];
          s = ptx::ex2_approx_ftz(s - reference.value[r]);
          reference.row_sum[r] += s;
          if constexpr (kCareful) {
            s *= gFactors[kBlockKV + 8 * n + e] * kWeightUnit;
            weight_max = fmaxf(weight_max, s);
          }
        }
      }
      if constexpr (kCareful) {
        const float scale = scale_of(max_of_lanes<4>(weight_max));
        v_factor[r] = inverse_of(scale);
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& s = rS[r / 2][n][2 * (r % 2) + e];
            // Above 0 it stays above 0: times inf it is inf.
            s = s > 0.0F ? fmaxf(s * scale, 5.9604645e-8F) : s;
          }
        }
      }
    }
    unsigned p_hi[kPvSteps][kRowTiles][4], p_lo[kPvSteps][kRowTiles][4];
#pragma unroll
    for (int kk = 0; kk < kPvSteps; ++kk) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 4; ++h) {
          const float* s = rS[m][2 * kk + h / 2] + h % 2 * 2;
          const Parts parts = split(s[0], s[1]);
          p_hi[kk][m][h] = parts.hi;
          p_lo[kk][m][h] = parts.lo;
        }
      }
    }

    // O += P V, 16 columns at a time. 0 times NaN is NaN: where V has such numbers and the mask hides
    // some, each row is multiplied by itself, with zeros for the keys that it does not see.
    const int row_passes = kCareful && head.v_is_uneven != 0 ? 16 : 1;
    const auto add_product = [&](int only_row) {
#pragma unroll
      for (int n = 0; n < kColumnTiles; n += 2) {
        float sum[kRowTiles][2][4];
        unsigned v_hi[kPvSteps][4];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          int begin = 0, end = kBlockKV;
          if (kCareful && only_row >= 0) {
            const KeyRange seen = visible_keys(p, tile.first_row + warp_row + 16 * m + only_row);
            begin = seen.begin - kv_start - 2 * t;
            end = seen.end - kv_start - 2 * t;
          }
#pragma unroll
          for (int kk = 0; kk < kPvSteps; ++kk) {
            unsigned v_lo[4];
            if (m == 0 || kCareful) ptx::ldmatrix_x4_trans(v_hi[kk], sQ + (v_at ^ (16 * n)) + kk * 16 * Tile::kRowBytes);
            ptx::ldmatrix_x4_trans(v_lo, sQ + (v_at ^ (16 * n)) + kPart + kk * 16 * Tile::kRowBytes);
            if (kCareful && only_row >= 0) {
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                const int key = 16 * kk + e % 2 * 8;
                const unsigned keep = (key >= begin && key < end ? 0x0000ffffU : 0U) | (key + 1 >= begin && key + 1 < end ? 0xffff0000U : 0U);
                v_hi[kk][e] &= keep;
                v_lo[e] &= keep;
              }
            }
            corrections(sum[m], p_hi[kk][m], p_lo[kk][m], v_hi[kk], v_lo, kk == 0);
          }
#pragma unroll
          for (int kk = 0; kk < kPvSteps; ++kk) {
            Number::mma(sum[m][0], p_hi[kk][m], v_hi[kk][0], v_hi[kk][1]);
            Number::mma(sum[m][1], p_hi[kk][m], v_hi[kk][2], v_hi[kk][3]);
          }
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            if (kCareful && only_row >= 0 && g + e % 4 / 2 * 8 != only_row) continue;
            float& o = rO[m][n + e / 4][e % 4];
            o = __fmaf_rn(sum[m][e / 4][e % 4], v_factor[2 * m + e % 4 / 2], o);
          }
        }
      }
    };
    if (row_passes == 1) {
      add_product(-1);
    } else {
#pragma unroll 1
      for (int row = 0; row < 16; ++row) add_product(row);
    }
  };

  // Tiles of one kind in a row, so that the loop over the plain ones has the registers for itself.
  int visit = 0, stage = 0;
  const auto await_tile = [&] {
    ptx::cp_async_wait_group<kStages - 2>();
    __syncthreads();
    start_tile(visit + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
  };
  const auto step_while = [&](auto is_careful) {
    while (visit < tiles.count()) {
      const TileHead head = sHeads[stage];
      const bool needs_care = visit < tiles.masked() || q_is_wild || head.k_is_uneven != 0 || head.v_is_uneven != 0;
      if (needs_care != decltype(is_careful)::value) return;
      step(tiles.at(visit), T::kQBytes + stage * T::kTileBytes, head, is_careful);
      ++visit;
      stage = stage + 1 == kStages ? 0 : stage + 1;
      await_tile();
    }
  };
  await_tile();
  while (visit < tiles.count()) {
    step_while(std::true_type{});
    step_while(std::false_type{});
  }

  // The one division; a row with no weight at all saw no key.
  float* gO = static_cast<float*>(p.out) + tile.batch * p.out_stride.batch + tile.head * p.out_stride.head;
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(gO) % 8 == 0 && p.out_stride.row % 2 == 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float sum = sum_of_lanes<4>(reference.row_sum[r]);
    const int row = row_of(r);
    if (row >= p.len_q) continue;
    const float inverse = sum == 0.0F ? 0.0F : 1.0F / (sum * kWeightUnit);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const int column = 8 * n + 2 * t;
      float* target = gO + row * p.out_stride.row + column;
      const float2 o = make_float2(rO[r / 2][n][2 * (r % 2)] * inverse, rO[r / 2][n][2 * (r % 2) + 1] * inverse);
      if (is_aligned && column + 1 < p.head_dim_v) {
        *reinterpret_cast<float2*>(target) = o;
      } else {
        if (column < p.head_dim_v) target[0] = o.x;
        if (column + 1 < p.head_dim_v) target[1] = o.y;
      }
    }
    if (p.lse != nullptr && t == 0) {
      const std::int64_t head_index = static_cast<std::int64_t>(tile.batch) * p.heads_q + tile.head;
      p.lse[head_index * p.len_q + row] = sum == 0.0F ? -INFINITY : (reference.value[r] + log2f(sum)) * kLn2;
    }
  }
}

template <int kHeadDim>
LaunchPlan Instance<kHeadDim>::plan(const ForwardParams& p) {
  using T = Traits<kHeadDim>;
  return {.blocks = static_cast<std::int64_t>(p.batch) * p.heads_q * ceil_div(p.len_q, T::kBlockQ),
          .threads = T::kThreads,
          .dynamic_shared_bytes = T::kSharedBytes,
          .workspace_bytes = T::scratch_bytes(p)};
}

template <int kHeadDim>
void Instance<kHeadDim>::run(const ForwardParams& p, void* stream) {
  using T = Traits<kHeadDim>;
  const LaunchPlan launch_plan = plan(p);
  const Scratch scratch(std::max<std::size_t>(launch_plan.workspace_bytes, 16), stream, "the parts of k and v");
  const Call call{.p = p,
                  .kv = T::layout(p, scratch.data()),
                  .heads_together = heads_together(p, 8)};
  const std::int64_t split_blocks = 2LL * call.kv.tiles * p.batch * p.heads_kv;
  if (split_blocks > 0) {
    launch<split_kernel<T>>({.blocks = split_blocks, .threads = kSplitThreads}, stream, call);
  }
  launch<attention_kernel<T>>(launch_plan, stream, call);
}

#define FASTATTN_INSTANTIATE_split(...) template struct v6::split::Instance<__VA_ARGS__>;

}  // namespace fastattn::cuda::v6::split
