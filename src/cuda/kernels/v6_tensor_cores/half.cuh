// V6 for float16 and bfloat16: FlashAttention-2 on mma.sync.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/v6_tensor_cores/instances.cuh"
#include "cuda/kernels/v6_tensor_cores/pack.cuh"
#include "cuda/launch/launch.cuh"
#include "cuda/launch/scratch.cuh"
#include "cuda/launch/shared.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ex2.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/rcp.cuh"
#include "cuda/tile/lanes.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/number16.cuh"
#include "cuda/tile/schedule.cuh"
#include "cuda/tile/softmax.cuh"
#include "fastattn/fastattn.h"

namespace fastattn::cuda::v6::half {

// Weights stay below 2^8: float16 holds them, and O is seldom rescaled.
constexpr int kWeightStart = 0;
constexpr float kWeightEnd = 8.0F;

// spills allowed: a few values that are read once a tile of keys. The output and the scores of a
// warp's rows take 160 to 192 of a thread's registers, and smaller tiles are slower.

// kRowTiles: of 16 rows, a warp's. With two of them each fragment of K and V that a warp reads from
// shared memory serves two multiplications.
template <int kHeadDim>
struct Shape;
template <>
struct Shape<64> {
  static constexpr int kWarps = 4, kRowTiles = 2, kBlockKV = 64, kBlocksPerSM = 2;
  static constexpr bool kQInRegisters = true, kSkipsKeys = false;
};
// O takes half of the registers: Q is read again for each tile of keys, and those are short.
template <>
struct Shape<128> {
  static constexpr int kWarps = 4, kRowTiles = 2, kBlockKV = 32, kBlocksPerSM = 2;
  static constexpr bool kQInRegisters = false, kSkipsKeys = false;
};
// One row tile is all that the registers hold. With 64 keys eight multiplications at a time do not
// wait for each other; 98,304 bytes of shared memory fit every GPU. Of a tile that the mask cuts
// through, 16 rows see few keys: the others are skipped, where wider warps only lose by it.
template <>
struct Shape<256> {
  static constexpr int kWarps = 4, kRowTiles = 1, kBlockKV = 64, kBlocksPerSM = 2;
  static constexpr bool kQInRegisters = false, kSkipsKeys = true;
};

template <DType kType_, int kHeadDim_>
struct Traits : Shape<kHeadDim_> {
  using S = Shape<kHeadDim_>;
  static constexpr DType kType = kType_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kThreads = S::kWarps * 32;
  static constexpr int kWarpRows = S::kRowTiles * 16;
  static constexpr int kBlockQ = S::kWarps * kWarpRows;
  static constexpr int kQBytes = kBlockQ * kHeadDim * 2;
  static constexpr int kKVBytes = S::kBlockKV * kHeadDim * 2;
  static constexpr std::size_t kSharedBytes = kQBytes + 2 * kKVBytes;
  static constexpr int kMinKb = kb_that_hold(kSharedBytes);
};

// What the host works out for a call.
struct Call {
  ForwardParams p;
  QueryTiles tiles;
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kBlocksPerSM)
    attention_kernel(const __grid_constant__ Call call) {
  if constexpr (!compiled_for_kb(T::kMinKb, 227)) return;
  using Number = Number16<T::kType>;
  using Tile = Tile16<T::kHeadDim>;
  constexpr int kHeadDim = T::kHeadDim, kBlockQ = T::kBlockQ, kBlockKV = T::kBlockKV;
  constexpr int kRowTiles = T::kRowTiles, kThreads = T::kThreads;
  constexpr int kKeyTiles = kBlockKV / 8, kColumnTiles = kHeadDim / 8;
  constexpr int kRows = 2 * kRowTiles;  // of a thread

  char* sQ = dynamic_shared<char>();  // [kBlockQ, kHeadDim]
  char* sK = sQ + T::kQBytes;         // [kBlockKV, kHeadDim]
  char* sV = sK + T::kKVBytes;        // [kBlockKV, kHeadDim]

  const ForwardParams& p = call.p;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const QueryTile tile = call.tiles.at(static_cast<int>(blockIdx.x));
  const auto gQ =
      head_view<std::uint16_t>(p.q, p.q_stride, tile.batch, tile.head, p.len_q, p.head_dim);
  using QCopy = TileCopy<kBlockQ, kHeadDim, kThreads>;
  using KVCopy = TileCopy<kBlockKV, kHeadDim, kThreads>;
  QCopy(gQ).start(sQ, tile.first_row);
  ptx::cp_async_commit_group();

  const auto gK =
      head_view<std::uint16_t>(p.k, p.k_stride, tile.batch, tile.kv_head, p.len_kv, p.head_dim);
  const auto gV =
      head_view<std::uint16_t>(p.v, p.v_stride, tile.batch, tile.kv_head, p.len_kv, p.head_dim_v);
  const KeyTiles tiles =
      key_tiles(p, tile.first_row, min(tile.first_row + kBlockQ, p.len_q) - 1, kBlockKV);
  const KVCopy copy_k(gK), copy_v(gV);
  const auto start_tile = [&](const KVCopy& copy, char* sTile, int visit, auto is_masked) {
    if (visit >= tiles.count()) return;
    if constexpr (decltype(is_masked)::value) {
      copy.start(sTile, tiles.at(visit) * kBlockKV);
    } else {
      copy.template start<true>(sTile, tiles.at_full(visit) * kBlockKV);
    }
    ptx::cp_async_commit_group();
  };
  start_tile(copy_k, sK, 0, std::true_type{});

  // Where a lane's row of a fragment starts, in bytes; further columns are reached by xor.
  const int warp_row = warp * T::kWarpRows;
  const int q_offset = Tile::offset(warp_row + lane % 16, lane / 16);
  const int k_offset = Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const int v_offset = Tile::offset(lane % 16, lane / 16);
  // Of a result's fragment a lane holds rows g and g + 8, columns 2 t and 2 t + 1.
  const int g = lane / 4, t = lane % 4;
  const auto row_of = [&](int r) { return tile.first_row + warp_row + 8 * r + g; };

  const float scale_log2 = scale_log2_of(p.scale);
  if (p.scale <= 0.0F) {
    ptx::cp_async_wait_group<0>();
    times_own_chunks<T::kType, QCopy>(sQ, sign_of_scale(p.scale));
  }

  References<kRows, kWeightStart> reference;
  float rO[kRowTiles][kColumnTiles][4] = {};

  const auto hide = [&](float (&rS)[kRowTiles][kKeyTiles][4], int kv_start) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const KeyRange seen = visible_keys(p, row_of(r));
      const int begin = seen.begin - kv_start - 2 * t, end = seen.end - kv_start - 2 * t;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool is_seen = 8 * n + e >= begin && 8 * n + e < end;
          if (!is_seen) rS[r / 2][n][2 * (r % 2) + e] = -INFINITY;
        }
      }
    }
  };
  // Fragments are read from shared memory one step ahead of their use.
  constexpr int kSteps = kHeadDim / 16;
  unsigned rQ[T::kQInRegisters ? kSteps : 2][kRowTiles][4];

  // K's next tile comes in while O += P V is worked out, V's during S = Q K^T.
  bool row_by_row = false;
  const auto step = [&](int visit, auto is_masked) {
    constexpr bool kMasked = decltype(is_masked)::value;
    int q_at = q_offset, k_at = T::kQBytes + k_offset, v_at = T::kQBytes + T::kKVBytes + v_offset;
    hide_origin(q_at);
    hide_origin(k_at);
    hide_origin(v_at);
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // K is there, and all warps are done with V
    start_tile(copy_v, sV, visit, is_masked);
    const auto read_q = [&](unsigned (&a)[kRowTiles][4], int kk) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::ldmatrix_x4(a[m], sQ + Tile::advance(q_at, 2 * kk) + m * 16 * Tile::kRowBytes);
      }
    };
    if constexpr (T::kQInRegisters) {
      if (visit == 0) {
#pragma unroll
        for (int kk = 0; kk < kSteps; ++kk) read_q(rQ[kk], kk);
      }
    }

    const auto await_v = [&] {
      ptx::cp_async_wait_group<0>();
      __syncthreads();  // V is there, and all warps are done with K
      start_tile(copy_k, sK, visit + 1, is_masked);
    };
    // Of a tile that the mask cuts through, this warp's rows may see nothing, all, or no late keys.
    constexpr bool kSkips = kMasked && T::kSkipsKeys;
    bool hides = kMasked;
    int keys_end = kBlockKV;
    if constexpr (kMasked) {
      const int kv_start = tiles.at(visit) * kBlockKV;
      const int first_row = tile.first_row + warp_row;
      const KeyRange top = visible_keys(p, first_row);
      const KeyRange bottom = visible_keys(p, min(first_row + T::kWarpRows, p.len_q) - 1);
      if (first_row >= p.len_q || bottom.end <= kv_start || top.begin >= kv_start + kBlockKV) {
        await_v();
        return;
      }
      hides = bottom.begin > kv_start || top.end < kv_start + kBlockKV;
      keys_end = bottom.end - kv_start;
    }

    // S = Q K^T.
    float rS[kRowTiles][kKeyTiles][4];
    const auto skips = [&](int n) {
      return kSkips && n >= kKeyTiles / 2 && keys_end <= kBlockKV / 2;
    };
    if constexpr (kSkips) {  // what is skipped is hidden later, but has to be a number first
#pragma unroll
      for (int i = 0; i < kRowTiles * kKeyTiles * 4; ++i) {
        rS[i / 4 / kKeyTiles][i / 4 % kKeyTiles][i % 4] = 0.0F;
      }
    }
    unsigned rK[2][kKeyTiles / 2][4];
    const auto read_qk = [&](int kk) {
      if constexpr (!T::kQInRegisters) read_q(rQ[kk % 2], kk);
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        if (skips(n)) break;
        ptx::ldmatrix_x4(rK[kk % 2][n / 2],
                         sQ + Tile::advance(k_at, 2 * kk) + n * 8 * Tile::kRowBytes);
      }
    };
    read_qk(0);
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
      if (kk + 1 < kSteps) read_qk(kk + 1);
      const auto& a = rQ[T::kQInRegisters ? kk : kk % 2];
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        if (skips(n)) break;
        const unsigned* b = rK[kk % 2][n / 2] + n % 2 * 2;
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          if (kk == 0) {
            Number::mma_zero(rS[m][n], a[m], b[0], b[1]);
          } else {
            Number::mma(rS[m][n], a[m], b[0], b[1]);
          }
        }
      }
    }

    if (kMasked && hides) hide(rS, tiles.at(visit) * kBlockKV);
    // The product is rounded, so that equal scores stay equal.
    float largest[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        float* s = rS[r / 2][n] + 2 * (r % 2);
        s[0] = __fmul_rn(s[0], scale_log2);
        s[1] = __fmul_rn(s[1], scale_log2);
      }
      largest[r] = largest_of_row(rS, r);
    }
    reference.follow(largest, rO, kWeightEnd, INFINITY, [](int, float) {});
    await_v();

    // P = exp(S), and O += P V.
    unsigned rP[kBlockKV / 16][kRowTiles][4];
    const auto weigh = [&](int kk) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 4; ++h) {
          float* s = rS[m][2 * kk + h / 2] + h % 2 * 2;
          const int r = 2 * m + h % 2;
          s[0] = ptx::ex2_approx_ftz(s[0] - reference.value[r]);
          s[1] = ptx::ex2_approx_ftz(s[1] - reference.value[r]);
          reference.row_sum[r] += s[0] + s[1];
          rP[kk][m][h] = Number::pack(s[0], s[1]);
        }
      }
    };
    constexpr int kColumnPairs = kColumnTiles / 2, kPvSteps = kBlockKV / 16 * kColumnPairs;
    constexpr int kAhead = 2;
    unsigned rV[kAhead + 1][4];
    const auto read_v = [&](int i) {
      ptx::ldmatrix_x4_trans(rV[i % (kAhead + 1)], sQ + Tile::advance(v_at, i % kColumnPairs * 2) +
                                                       i / kColumnPairs * 16 * Tile::kRowBytes);
    };
    if (!kMasked || !row_by_row) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) read_v(i);
      weigh(0);
#pragma unroll
      for (int i = 0; i < kPvSteps; ++i) {
        const int kk = i / kColumnPairs, n = i % kColumnPairs * 2;
        if (kSkips && n == 0 && 16 * kk >= keys_end) break;
        if (i + kAhead < kPvSteps) read_v(i + kAhead);
        if (n == 0 && kk + 1 < kBlockKV / 16) weigh(kk + 1);
        const auto& b = rV[i % (kAhead + 1)];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          Number::mma(rO[m][n], rP[kk][m], b[0], b[1]);
          Number::mma(rO[m][n + 1], rP[kk][m], b[2], b[3]);
        }
      }
    } else {
      // Each row is multiplied by itself, with zeros for the keys that it does not see.
      const int kv_start = tiles.at(visit) * kBlockKV;
#pragma unroll
      for (int kk = 0; kk < kBlockKV / 16; ++kk) weigh(kk);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll 1
        for (int row = 0; row < 16; ++row) {
          const KeyRange seen = visible_keys(p, tile.first_row + warp_row + 16 * m + row);
          const int begin = seen.begin - kv_start - 2 * t, end = seen.end - kv_start - 2 * t;
#pragma unroll
          for (int n = 0; n < kColumnTiles; n += 2) {
            float sum[2][4];
#pragma unroll
            for (int e = 0; e < 8; ++e) sum[e / 4][e % 4] = rO[m][n + e / 4][e % 4];
#pragma unroll
            for (int kk = 0; kk < kBlockKV / 16; ++kk) {
              unsigned b[4];
              ptx::ldmatrix_x4_trans(b,
                                     sV + Tile::advance(v_offset, n) + kk * 16 * Tile::kRowBytes);
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                const int key = 16 * kk + e % 2 * 8;
                if (key < begin || key >= end) b[e] &= 0xffff0000U;
                if (key + 1 < begin || key + 1 >= end) b[e] &= 0x0000ffffU;
              }
              Number::mma(sum[0], rP[kk][m], b[0], b[1]);
              Number::mma(sum[1], rP[kk][m], b[2], b[3]);
            }
#pragma unroll
            for (int e = 0; e < 8; ++e) {
              if (g + e % 4 / 2 * 8 == row) rO[m][n + e / 4][e % 4] = sum[e / 4][e % 4];
            }
          }
        }
      }
    }
  };

  for (;;) {
    int visit = 0;
    for (; visit < tiles.masked(); ++visit) step(visit, std::true_type{});
    for (; visit < tiles.count(); ++visit) step(visit, std::false_type{});
    // 0 times NaN is NaN: an inf or NaN that the mask hides may be in O now. Then once more, with care.
    if (row_by_row || tiles.masked() == 0) break;
    float nan_if_any = 0.0F;
#pragma unroll
    for (int i = 0; i < kRowTiles * kColumnTiles * 4; ++i) {
      float& o = rO[i / 4 / kColumnTiles][i / 4 % kColumnTiles][i % 4];
      nan_if_any = fmaf(o, 0.0F, nan_if_any);
    }
    row_by_row = __syncthreads_or(nan_if_any != 0.0F) != 0;
    if (!row_by_row) break;
    reference = {};
#pragma unroll
    for (int i = 0; i < kRowTiles * kColumnTiles * 4; ++i) {
      rO[i / 4 / kColumnTiles][i / 4 % kColumnTiles][i % 4] = 0.0F;
    }
    start_tile(copy_k, sK, 0, std::true_type{});
  }
  if (tiles.count() == 0) {  // Q is still on its way to where the output goes
    ptx::cp_async_wait_group<0>();
    __syncthreads();
  }

  // The one division; a row with no weight at all saw no key. Through shared memory, each warp in
  // the place of its own rows of Q, so that whole rows are written.
  reference.add_lanes();
  __syncwarp();  // other lanes have read Q
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float sum = reference.row_sum[r];
    const float inverse = sum == 0.0F ? 0.0F : ptx::rcp_approx_ftz(sum);
    char* sRow = sQ + (warp_row + 8 * r + g) * Tile::kRowBytes + 4 * t;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const float* o = rO[r / 2][n] + 2 * (r % 2);
      *reinterpret_cast<unsigned*>(sRow + 16 * (n ^ g)) =
          Number::pack(o[0] * inverse, o[1] * inverse);
    }
  }
  __syncwarp();
  write_rows16<T::kWarpRows, kHeadDim>(sQ, warp_row, p, tile, lane);
  if (p.lse != nullptr && t < kRows && row_of(t) < p.len_q) {
    const std::int64_t head_index = static_cast<std::int64_t>(tile.batch) * p.heads_q + tile.head;
    p.lse[head_index * p.len_q + row_of(t)] =
        reference.log_sum(t, p.scale, [&](int r) { return reference.value[r]; });
  }
}

template <DType kType, int kHeadDim>
LaunchPlan Instance<kType, kHeadDim>::plan(const ForwardParams& p) {
  using T = Traits<kType, kHeadDim>;
  ForwardParams packed = p;
  return {.blocks = static_cast<std::int64_t>(p.batch) * p.heads_q * ceil_div(p.len_q, T::kBlockQ),
          .threads = T::kThreads,
          .dynamic_shared_bytes = T::kSharedBytes,
          .workspace_bytes = pack(packed, T::kBlockKV, nullptr, nullptr),
          .compiled = shared_memory<attention_kernel<T>>().code_kb >= T::kMinKb};
}

template <DType kType, int kHeadDim>
void Instance<kType, kHeadDim>::run(const ForwardParams& p, void* stream) {
  const LaunchPlan launch_plan = plan(p);
  Call call{.p = p, .tiles = {p, Traits<kType, kHeadDim>::kBlockQ, 2}};
  const auto enqueue = [&] {
    launch<attention_kernel<Traits<kType, kHeadDim>>>(launch_plan, stream, call);
  };
  if (launch_plan.workspace_bytes == 0) {
    enqueue();
    return;
  }
  const Scratch scratch(launch_plan.workspace_bytes, stream, "aligned copies of q, k and v");
  pack(call.p, Traits<kType, kHeadDim>::kBlockKV, static_cast<char*>(scratch.data()), stream);
  enqueue();
}

#define FASTATTN_INSTANTIATE_half(...) template struct v6::half::Instance<__VA_ARGS__>;

}  // namespace fastattn::cuda::v6::half
