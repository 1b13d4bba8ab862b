// Float32 as float16 parts, and the kernel that splits K and V before the attention of split.cuh.
//
// x = (hi + lo) / scale, where the scale is a power of 2 that brings the largest number of a tile of
// keys (of a row, for Q) to 2^14 or more: hi and lo then hold 22 bits of all numbers down to 2^-17
// of the largest. What is smaller loses digits, but none that matter beside the largest.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "cuda/launch/launch.cuh"
#include "cuda/tile/copy.cuh"
#include "cuda/tile/lanes.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/number16.cuh"
#include "cuda/tile/schedule.cuh"
#include "fastattn/fastattn.h"

namespace fastattn::cuda::v6::split {

// kRowTiles: of 16 rows, a warp's. kKeepK: K's hi parts of 16 keys stay in registers between their
// two products.
template <int kHeadDim>
struct Shape;
template <>
struct Shape<64> {
  static constexpr int kWarps = 4, kRowTiles = 2, kBlockKV = 32, kStages = 3, kBlocksPerSM = 2;
  static constexpr bool kQInRegisters = true, kKeepK = true;
};
// 128 rows share a tile of keys, whose parts are twice its size: fewer would wait for the L2 cache.
template <>
struct Shape<128> {
  static constexpr int kWarps = 8, kRowTiles = 1, kBlockKV = 32, kStages = 3, kBlocksPerSM = 1;
  static constexpr bool kQInRegisters = true, kKeepK = true;
};
template <>
struct Shape<256> {
  static constexpr int kWarps = 8, kRowTiles = 1, kBlockKV = 16, kStages = 2, kBlocksPerSM = 1;
  static constexpr bool kQInRegisters = false, kKeepK = false;
};

// What the pre-pass tells of a tile of keys. Rows of a tile that is not even have factors of their
// own; a wild one holds an inf or a NaN besides.
enum class TileKind : int { kEven, kUneven, kWild };
struct alignas(16) TileHead {
  float k_factor, v_factor;  // what a split number is to be multiplied by
  TileKind k_kind, v_kind;

  [[nodiscard]] __device__ __forceinline__ bool is_even() const {
    return k_kind == TileKind::kEven && v_kind == TileKind::kEven;
  }
};

// Scratch memory: for each tile of each head, [4][kBlockKV, kHeadDim] of float16 (K hi, K lo, V hi,
// V lo, in Tile16's order), then the factors of its rows, [2][kBlockKV], then all heads.
struct SplitKV {
  std::uint16_t* parts;
  float* factors;
  TileHead* heads;
  int tiles;       // of a head
  int first_tile;  // of those that some row sees
  Divider by_tiles, by_heads;
};

struct Call {
  ForwardParams p;
  SplitKV kv;
  QueryTiles tiles;
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
  static constexpr int kMinKb = kb_that_hold(kSharedBytes);

  static SplitKV layout(const ForwardParams& p, void* memory) {
    const KeyRange tiles = seen_tiles(p, S::kBlockKV);
    const std::int64_t all =
        static_cast<std::int64_t>(tiles.end - tiles.begin) * p.batch * p.heads_kv;
    char* bytes = static_cast<char*>(memory);
    return {.parts = reinterpret_cast<std::uint16_t*>(bytes),
            .factors = reinterpret_cast<float*>(bytes + all * kTileBytes),
            .heads = reinterpret_cast<TileHead*>(bytes + all * (kTileBytes + 2 * S::kBlockKV * 4)),
            .tiles = tiles.end - tiles.begin,
            .first_tile = tiles.begin,
            .by_tiles = Divider(std::max(tiles.end - tiles.begin, 1)),
            .by_heads = Divider(p.heads_kv)};
  }
  static std::size_t scratch_bytes(const ForwardParams& p) {
    const KeyRange tiles = seen_tiles(p, S::kBlockKV);
    constexpr std::size_t kBytes = kTileBytes + 2 * S::kBlockKV * sizeof(float) + sizeof(TileHead);
    return static_cast<std::size_t>(tiles.end - tiles.begin) * p.batch * p.heads_kv * kBytes;
  }
};

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
__device__ __forceinline__ float finite_or_zero(float x) { return fabsf(x) <= FLT_MAX ? x : 0.0F; }

// hi and lo parts of two numbers, packed. In wild ones what is not finite has no lo part.
struct Parts {
  unsigned hi, lo;
};
__device__ __forceinline__ Parts split(float low, float high) {
  const unsigned hi = ptx::cvt_rn_f16x2(high, low);
  const float2 taken = ptx::f16x2_to_f32(hi);
  return {hi, ptx::cvt_rn_f16x2(high - taken.y, low - taken.x)};
}
__device__ __forceinline__ Parts split_wild(float low, float high) {
  const Parts parts = split(low, high);
  const unsigned keep = (finite_or_zero(low) == low ? 0x0000ffffU : 0U) |
                        (finite_or_zero(high) == high ? 0xffff0000U : 0U);
  return {parts.hi, parts.lo & keep};
}
// The least of these is less than the exponent of a product of two floats.
constexpr int kLeastExponent = -512;
__device__ __forceinline__ int exponent_of(float x) {
  return static_cast<int>(__float_as_uint(x) >> 23 & 0xffU) - 127;
}
// 2^exponent; from -126 to 127.
__device__ __forceinline__ float power_of_2(int exponent) {
  return __uint_as_float(static_cast<unsigned>(exponent + 127) << 23);
}
// x 2^exponent, whatever the exponent: in two steps, each in range.
__device__ __forceinline__ float times_power_of_2(float x, int exponent) {
  const int half = min(max(exponent, -252), 252) / 2;
  return x * power_of_2(half) * power_of_2(min(max(exponent, -252), 252) - half);
}
// Whether products of three such factors stay far inside float32's range.
constexpr int kNear1 = 40;
__device__ __forceinline__ bool is_near_1(float factor) {
  return factor >= power_of_2(-kNear1) && factor <= power_of_2(kNear1);
}
// Zeros in the place of inf and NaN.
__device__ __forceinline__ unsigned finite_or_zero16(unsigned pair) {
  constexpr unsigned kExponent = Number16<DType::kFloat16>::kExponent;
  const unsigned low = (pair & kExponent) == kExponent ? 0U : 0x0000ffffU;
  const unsigned high = (pair >> 16 & kExponent) == kExponent ? 0U : 0xffff0000U;
  return pair & (low | high);
}

constexpr int kSplitThreads = 256;

// One block splits one tile of K (even blocks) or of V.
template <class T>
__global__ void __launch_bounds__(kSplitThreads, 4)
    split_kernel(const __grid_constant__ Call call) {
  if constexpr (!compiled_for_kb(T::kMinKb, 227)) return;
  using Tile = Tile16<T::kHeadDim>;
  constexpr int kBlockKV = T::kBlockKV, kRowStep = kSplitThreads / Tile::kChunks;
  constexpr int kPasses = (kBlockKV + kRowStep - 1) / kRowStep;
  constexpr int kWarps = kSplitThreads / 32;
  __shared__ float sLargest[kWarps], sSmallest[kWarps];  // absolute maxima of rows; the least not 0
  __shared__ unsigned sFlags[kWarps];

  const ForwardParams& p = call.p;
  const bool is_v = blockIdx.x % 2 == 1;
  const int tile = static_cast<int>(blockIdx.x / 2);  // over all heads
  const int head_index = call.kv.by_tiles.divide(tile);
  const int first_row = (call.kv.first_tile + call.kv.by_tiles.rest(tile)) * kBlockKV;
  const std::int64_t index = tile;
  const Strides& stride = is_v ? p.v_stride : p.k_stride;
  const int dim = is_v ? p.head_dim_v : p.head_dim;
  const auto g = head_view(is_v ? p.v : p.k, stride, call.kv.by_heads.divide(head_index),
                           call.kv.by_heads.rest(head_index), p.len_kv, dim);
  const int r = static_cast<int>(threadIdx.x / Tile::kChunks);
  const int c = static_cast<int>(threadIdx.x % Tile::kChunks);

  const bool is_aligned =
      reinterpret_cast<std::uintptr_t>(g.data) % 16 == 0 && g.row_stride % 4 == 0;
  float x[kPasses][8];
  float row_max[kPasses];
  float largest = 0.0F, smallest = INFINITY;
  bool row_wild[kPasses];  // of this thread's part
  bool wild = false, has_zeros = false;
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int row = first_row + r + i * kRowStep;
    const float* source = g.data + row * g.row_stride + 8 * c;
    const int columns =
        row < g.length && r + i * kRowStep < kBlockKV ? min(max(dim - 8 * c, 0), 8) : 0;
    if (is_aligned && columns == 8) {
      const float4 a = load4(source), b = load4(source + 4);
      x[i][0] = a.x, x[i][1] = a.y, x[i][2] = a.z, x[i][3] = a.w;
      x[i][4] = b.x, x[i][5] = b.y, x[i][6] = b.z, x[i][7] = b.w;
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) x[i][e] = e < columns ? source[e] : 0.0F;
    }
    float nan_if_wild = 0.0F;
    row_max[i] = 0.0F;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      row_max[i] = fmaxf(row_max[i], fabsf(x[i][e]));
      nan_if_wild = fmaf(x[i][e], 0.0F, nan_if_wild);
    }
    row_wild[i] = nan_if_wild != 0.0F;
    if (row_wild[i]) {
      wild = true;
      row_max[i] = 0.0F;
#pragma unroll
      for (int e = 0; e < 8; ++e) row_max[i] = fmaxf(row_max[i], fabsf(finite_or_zero(x[i][e])));
    }
    row_max[i] = max_of_lanes<Tile::kChunks>(row_max[i]);
    largest = fmaxf(largest, row_max[i]);
    if (row_max[i] != 0.0F) smallest = fminf(smallest, row_max[i]);
    has_zeros = has_zeros || (row_max[i] == 0.0F && row < g.length && r + i * kRowStep < kBlockKV);
  }
  largest = max_of_lanes<32>(largest);
  smallest = -max_of_lanes<32>(-smallest);
  constexpr unsigned kWild = 1, kHasZeros = 2;
  unsigned flags = __any_sync(0xffffffffU, wild) != 0 ? kWild : 0;
  flags |= __any_sync(0xffffffffU, has_zeros) != 0 ? kHasZeros : 0;
  if (threadIdx.x % 32 == 0) {
    sLargest[threadIdx.x / 32] = largest;
    sSmallest[threadIdx.x / 32] = smallest;
    sFlags[threadIdx.x / 32] = flags;
  }
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    flags |= sFlags[w];
    largest = fmaxf(largest, sLargest[w]);
    smallest = fminf(smallest, sSmallest[w]);
  }

  wild = (flags & kWild) != 0;
  has_zeros = (flags & kHasZeros) != 0;
  // Under one scale, rows that are this far apart would lose digits, or feel what hidden ones hold;
  // and so would weights, if the largest one met a row of V that is small, or 0.
  const bool is_uneven = largest != 0.0F && (!is_near_1(inverse_of(scale_of(largest))) ||
                                             smallest * 256.0F < largest || (is_v && has_zeros));
  const bool has_own_factors = wild || is_uneven;
  const float tile_scale = scale_of(largest);
  char* hi = reinterpret_cast<char*>(call.kv.parts) + index * T::kTileBytes +
             (is_v ? 2 * T::kPartBytes : 0);
  float* factors = call.kv.factors + (2 * index + (is_v ? 1 : 0)) * kBlockKV;
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int row = r + i * kRowStep;
    const bool has_inf = wild && max_of_lanes<Tile::kChunks>(row_wild[i] ? 1.0F : 0.0F) != 0.0F;
    if (row >= kBlockKV) continue;
    // A row of zeros has no say in the scale of the weights; one of zeros and inf has the least.
    const bool is_zero = row_max[i] == 0.0F;
    const float scale =
        has_own_factors ? scale_of(is_zero ? fminf(smallest, largest) : row_max[i]) : tile_scale;
    if (c == 0) factors[row] = is_v && is_zero && !has_inf ? 0.0F : inverse_of(scale);
    Parts parts[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float low = x[i][2 * e] * scale, high = x[i][2 * e + 1] * scale;
      parts[e] = wild ? split_wild(low, high) : split(low, high);
    }
    char* target = hi + Tile::offset(row, c);
    *reinterpret_cast<uint4*>(target) =
        make_uint4(parts[0].hi, parts[1].hi, parts[2].hi, parts[3].hi);
    *reinterpret_cast<uint4*>(target + T::kPartBytes) =
        make_uint4(parts[0].lo, parts[1].lo, parts[2].lo, parts[3].lo);
  }
  if (threadIdx.x == 0) {
    TileHead& tile_head = call.kv.heads[index];
    (is_v ? tile_head.v_factor : tile_head.k_factor) = inverse_of(tile_scale);
    (is_v ? tile_head.v_kind : tile_head.k_kind) =
        wild ? TileKind::kWild : (has_own_factors ? TileKind::kUneven : TileKind::kEven);
  }
}

}  // namespace fastattn::cuda::v6::split
