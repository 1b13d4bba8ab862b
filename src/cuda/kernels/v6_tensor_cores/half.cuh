// V6 for float16 and bfloat16: FlashAttention-2 on mma.sync.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/launch/launch.cuh"
#include "cuda/launch/shared.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ex2.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/tile/lanes.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/number16.cuh"
#include "cuda/tile/schedule.cuh"
#include "fastattn/fastattn.h"

namespace fastattn::cuda::v6 {

constexpr float kLn2 = 0.69314718056F;
constexpr double kLog2E = 1.4426950408889634;

// A row's exponents are taken relative to a score of its own, its reference, which follows the
// largest one only once that is this much ahead: weights stay below 2^8, and O is seldom rescaled.
constexpr float kSlack = 8.0F;

// kRowTiles: of 16 rows, a warp's. With two of them each fragment of K and V that a warp reads from
// shared memory serves two multiplications.
template <int kHeadDim>
struct HalfShape;
#ifndef PF
#define PF 1
#endif
#ifndef AHEAD
#define AHEAD 2
#endif
#ifndef OPAQUE
#define OPAQUE 1
#endif
#ifndef SH64
#define SH64 kWarps = 4, kRowTiles = 2, kBlockKV = 64, kStages = 2, kBlocksPerSM = 2; static constexpr bool kQInRegisters = true
#endif
#ifndef SH128
#define SH128 kWarps = 4, kRowTiles = 2, kBlockKV = 32, kStages = 3, kBlocksPerSM = 2; static constexpr bool kQInRegisters = false
#endif
#ifndef SH256
#define SH256 kWarps = 8, kRowTiles = 1, kBlockKV = 64, kStages = 2, kBlocksPerSM = 1; static constexpr bool kQInRegisters = false
#endif
template <>
struct HalfShape<64> {
  static constexpr int SH64;
};
template <>
struct HalfShape<128> {
  static constexpr int SH128;
};
template <>
struct HalfShape<256> {
  static constexpr int SH256;
};

template <DType kType_, int kHeadDim_>
struct HalfTraits : HalfShape<kHeadDim_> {
  using Shape = HalfShape<kHeadDim_>;
  static constexpr DType kType = kType_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kThreads = Shape::kWarps * 32;
  static constexpr int kWarpRows = Shape::kRowTiles * 16;
  static constexpr int kBlockQ = Shape::kWarps * kWarpRows;
  static constexpr int kQBytes = kBlockQ * kHeadDim * 2;
  static constexpr int kKVBytes = Shape::kBlockKV * kHeadDim * 2;
  static constexpr std::size_t kSharedBytes = kQBytes + 2 * Shape::kStages * kKVBytes;
};

// What the host works out for a call.
struct HalfCall {
  ForwardParams p;
  int heads_together;  // see query_tile()
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kBlocksPerSM)
    half_kernel(const __grid_constant__ HalfCall call) {
  using Number = Number16<T::kType>;
  using Tile = Tile16<T::kHeadDim>;
  constexpr int kHeadDim = T::kHeadDim, kBlockQ = T::kBlockQ, kBlockKV = T::kBlockKV;
  constexpr int kRowTiles = T::kRowTiles, kStages = T::kStages, kThreads = T::kThreads;
  constexpr int kKeyTiles = kBlockKV / 8, kColumnTiles = kHeadDim / 8;
  constexpr int kRows = 2 * kRowTiles;  // of a thread

  char* sQ = dynamic_shared<char>();      // [kBlockQ, kHeadDim]
  char* sK = sQ + T::kQBytes;             // [kStages][kBlockKV, kHeadDim]
  char* sV = sK + kStages * T::kKVBytes;  // [kStages][kBlockKV, kHeadDim]

  const ForwardParams& p = call.p;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const QueryTile tile = query_tile(p, kBlockQ, call.heads_together);
  const int kv_head = tile.head / (p.heads_q / p.heads_kv);
  const HeadView16 gQ = head_view16(p.q, p.q_stride, tile.batch, tile.head, p.len_q, p.head_dim);
  const HeadView16 gK = head_view16(p.k, p.k_stride, tile.batch, kv_head, p.len_kv, p.head_dim);
  const HeadView16 gV = head_view16(p.v, p.v_stride, tile.batch, kv_head, p.len_kv, p.head_dim_v);
  const KeyTiles tiles =
      key_tiles(p, tile.first_row, min(tile.first_row + kBlockQ, p.len_q) - 1, kBlockKV);

  using QCopy = TileCopy<kBlockQ, kHeadDim, kThreads>;
  using KVCopy = TileCopy<kBlockKV, kHeadDim, kThreads>;
  const KVCopy copy_k(gK), copy_v(gV);
  const auto start_tile = [&](int visit, int stage, auto is_inside) {
    if (visit < tiles.count()) {
      constexpr bool kInside = decltype(is_inside)::value;
      const int kv_start = (kInside ? tiles.at_full(visit) : tiles.at(visit)) * kBlockKV;
      copy_k.template start<kInside>(sK + stage * T::kKVBytes, kv_start);
      if (visit == 0) ptx::cp_async_commit_group();
      copy_v.template start<kInside>(sV + stage * T::kKVBytes, kv_start);
    }
    ptx::cp_async_commit_group();
  };
  QCopy(gQ).template start<false>(sQ, tile.first_row);
  for (int i = 0; i < kStages - 1; ++i) start_tile(i, i, std::false_type{});

  // Where a lane's row of a fragment starts, in bytes; further columns are reached by xor.
  const int warp_row = warp * T::kWarpRows;
  const int q_offset = Tile::offset(warp_row + lane % 16, lane / 16);
  const int k_offset = Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const int v_offset = Tile::offset(lane % 16, lane / 16);
  // Of a result's fragment a lane holds rows g and g + 8, columns 2 t and 2 t + 1.
  const int g = lane / 4, t = lane % 4;
  const auto row_of = [&](int r) { return tile.first_row + warp_row + 8 * r + g; };

  // The scale's sign, or its being 0, goes into Q.
  const float scale_log2 =
      p.scale == 0.0F ? 1.0F : static_cast<float>(fabs(static_cast<double>(p.scale)) * kLog2E);
  if (p.scale <= 0.0F) {
    ptx::cp_async_wait_group<0>();
    times_sign_own_chunks<T::kType, QCopy>(sQ, p.scale);
  }

  float reference[kRows] = {};  // in scaled scores
  float row_sum[kRows] = {};    // of this thread's keys
  bool all_have_reference = false;
  float rO[kRowTiles][kColumnTiles][4] = {};

  const auto hide = [&](float(&rS)[kRowTiles][kKeyTiles][4], int kv_start) {
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
  // Scores of 8 keys, scaled and relative to the reference; the product is rounded, so that equal
  // scores stay equal. Returns the largest.
  const auto scale_scores = [&](float(&rS)[kRowTiles][kKeyTiles][4], int unit, float largest) {
    float(&s)[4] = rS[unit % kRowTiles][unit / kRowTiles];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[e] = __fmul_rn(s[e], scale_log2) - reference[unit % kRowTiles * 2 + e / 2];
      largest = fmaxf(largest, s[e]);
    }
    return largest;
  };
  // Moves the references of rows that a score is too far ahead of, or that have none yet.
  const auto move_references = [&](float(&rS)[kRowTiles][kKeyTiles][4], float largest) {
    if (!__any_sync(0xffffffffU, largest > kSlack || !all_have_reference)) return;
    bool has_all = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float ahead = -INFINITY;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        ahead = fmaxf(ahead, fmaxf(rS[r / 2][n][2 * (r % 2)], rS[r / 2][n][2 * (r % 2) + 1]));
      }
      ahead = max_of_lanes<4>(ahead);
      const bool has_reference = sum_of_lanes<4>(row_sum[r]) != 0.0F;
      if (has_reference ? ahead <= kSlack : ahead == -INFINITY) {
        has_all = has_all && has_reference;
        continue;
      }
      const float rescale = has_reference ? ptx::ex2_approx_ftz(-ahead) : 0.0F;
      reference[r] += ahead;
      row_sum[r] *= rescale;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        rO[r / 2][n][2 * (r % 2)] *= rescale;
        rO[r / 2][n][2 * (r % 2) + 1] *= rescale;
      }
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        rS[r / 2][n][2 * (r % 2)] -= ahead;
        rS[r / 2][n][2 * (r % 2) + 1] -= ahead;
      }
    }
    all_have_reference = has_all;
  };

  // Fragments are read from shared memory one step ahead of their use.
  constexpr int kSteps = kHeadDim / 16;
  unsigned rQ[T::kQInRegisters ? kSteps : 2][kRowTiles][4];

  int stage = 0;
  const auto step = [&](int visit, auto is_masked) {
    constexpr bool kMasked = decltype(is_masked)::value;
    const char* sVTile = sV + stage * T::kKVBytes;
    int q_at = q_offset, k_at = T::kQBytes + stage * T::kKVBytes + k_offset;
    int v_at = T::kQBytes + (kStages + stage) * T::kKVBytes + v_offset;
#if OPAQUE
    asm volatile("" : "+r"(q_at), "+r"(k_at), "+r"(v_at));
#endif
    bool v_is_wild = false;
    if (visit == 0) {
      ptx::cp_async_wait_group<kStages - 1>();
      __syncthreads();
    } else {
      ptx::cp_async_wait_group<kStages - 2>();
      if constexpr (kMasked) {
        v_is_wild = __syncthreads_or(own_chunks_not_finite<T::kType, KVCopy>(sVTile)) != 0;
      } else {
        __syncthreads();
      }
    }
    start_tile(visit + kStages - 1, stage == 0 ? kStages - 1 : stage - 1,
               std::bool_constant<!kMasked>{});  // after a tile without a mask comes no other kind
    stage = stage + 1 == kStages ? 0 : stage + 1;
    const auto read_q = [&](unsigned(&a)[kRowTiles][4], int kk) {
  #pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::ldmatrix_x4(a[m], sQ + (q_at ^ (32 * kk)) + m * 16 * Tile::kRowBytes);
      }
    };
    if constexpr (T::kQInRegisters) {
      if (visit == 0) {
#pragma unroll
        for (int kk = 0; kk < kSteps; ++kk) read_q(rQ[kk], kk);
      }
    }

    // Of a tile that the mask cuts through, this warp's rows may see nothing, or all.
    const auto v_arrives = [&] {
      if (visit > 0) return;
      ptx::cp_async_wait_group<kStages - 1>();
      if constexpr (kMasked) {
        v_is_wild = __syncthreads_or(own_chunks_not_finite<T::kType, KVCopy>(sVTile)) != 0;
      } else {
        __syncthreads();
      }
    };
    bool hides = kMasked;
    if constexpr (kMasked) {
      const int kv_start = tiles.at(visit) * kBlockKV;
      const int first_row = tile.first_row + warp_row;
      const KeyRange top = visible_keys(p, first_row);
      const KeyRange bottom = visible_keys(p, min(first_row + T::kWarpRows, p.len_q) - 1);
      if (first_row >= p.len_q || bottom.end <= kv_start || top.begin >= kv_start + kBlockKV) {
        v_arrives();
        return;
      }
      hides = bottom.begin > kv_start || top.end < kv_start + kBlockKV;
    }

    // S = Q K^T.
    float rS[kRowTiles][kKeyTiles][4];
    unsigned rK[2][kKeyTiles / 2][4];
    const auto read_qk = [&](int kk) {
      if constexpr (!T::kQInRegisters) read_q(rQ[kk % 2], kk);
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        ptx::ldmatrix_x4(rK[kk % 2][n / 2], sQ + (k_at ^ (32 * kk)) + n * 8 * Tile::kRowBytes);
      }
    };
    if (PF) read_qk(0);
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
      if (PF) { if (kk + 1 < kSteps) read_qk(kk + 1); } else read_qk(kk);
      const auto& a = rQ[T::kQInRegisters ? kk : kk % 2];
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
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
    float largest = -INFINITY;
#pragma unroll
    for (int unit = 0; unit < kKeyTiles * kRowTiles; ++unit) {
      largest = scale_scores(rS, unit, largest);
    }
    move_references(rS, largest);
    v_arrives();

    // P = exp(S), and O += P V.
    unsigned rP[kBlockKV / 16][kRowTiles][4];
    const auto weigh = [&](int kk) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 4; ++h) {
          float* s = rS[m][2 * kk + h / 2] + h % 2 * 2;
          s[0] = ptx::ex2_approx_ftz(s[0]);
          s[1] = ptx::ex2_approx_ftz(s[1]);
          row_sum[2 * m + h % 2] += s[0] + s[1];
          rP[kk][m][h] = Number::pack(s[0], s[1]);
        }
      }
    };
    constexpr int kColumnPairs = kColumnTiles / 2, kPvSteps = kBlockKV / 16 * kColumnPairs;
    constexpr int kAhead = AHEAD;
    unsigned rV[kAhead + 1][4];
    const auto read_v = [&](int i) {
      ptx::ldmatrix_x4_trans(rV[i % (kAhead + 1)], sQ + (v_at ^ (i % kColumnPairs * 32)) +
                                         i / kColumnPairs * 16 * Tile::kRowBytes);
    };
    if (!kMasked || !v_is_wild) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) read_v(i);
      weigh(0);
#pragma unroll
      for (int i = 0; i < kPvSteps; ++i) {
        const int kk = i / kColumnPairs, n = i % kColumnPairs * 2;
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
      // 0 times NaN is NaN: each row is multiplied by itself, with zeros for keys it does not see.
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
            float sum[2][4] = {};
#pragma unroll
            for (int kk = 0; kk < kBlockKV / 16; ++kk) {
              unsigned b[4];
              ptx::ldmatrix_x4_trans(b, sVTile + (v_offset ^ (16 * n)) + kk * 16 * Tile::kRowBytes);
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
              if (g + e % 4 / 2 * 8 == row) rO[m][n + e / 4][e % 4] += sum[e / 4][e % 4];
            }
          }
        }
      }
    }
  };

  int visit = 0;
  for (; visit < tiles.masked(); ++visit) step(visit, std::true_type{});
  for (; visit < tiles.count(); ++visit) step(visit, std::false_type{});
  if (tiles.count() == 0) {  // Q is still on its way to where the output goes
    ptx::cp_async_wait_group<0>();
    __syncthreads();
  }

  // The one division; a row with no weight at all saw no key. Through shared memory, each warp in
  // the place of its own rows of Q, so that whole rows are written.
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float sum = sum_of_lanes<4>(row_sum[r]);
    const float inverse = sum == 0.0F ? 0.0F : 1.0F / sum;
    char* sRow = sQ + (warp_row + 8 * r + g) * Tile::kRowBytes + 4 * t;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const float* o = rO[r / 2][n] + 2 * (r % 2);
      *reinterpret_cast<unsigned*>(sRow + 16 * (n ^ g)) =
          Number::pack(o[0] * inverse, o[1] * inverse);
    }
    if (p.lse != nullptr && t == 0 && row_of(r) < p.len_q) {
      const std::int64_t head_index = static_cast<std::int64_t>(tile.batch) * p.heads_q + tile.head;
      p.lse[head_index * p.len_q + row_of(r)] =
          sum == 0.0F ? -INFINITY : (reference[r] + log2f(sum)) * kLn2;
    }
  }
  __syncwarp();
  write_rows16<T::kWarpRows, kHeadDim>(sQ, warp_row, p, tile, lane);
}

}  // namespace fastattn::cuda::v6
