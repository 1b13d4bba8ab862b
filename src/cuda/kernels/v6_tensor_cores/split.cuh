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
#include "cuda/kernels/v6_tensor_cores/split_kv.cuh"
#include "cuda/launch/launch.cuh"
#include "cuda/launch/scratch.cuh"
#include "cuda/launch/shared.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ex2.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/tile/lanes.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/number16.cuh"
#include "cuda/tile/schedule.cuh"
#include "cuda/tile/softmax.cuh"
#include "fastattn/fastattn.h"

namespace fastattn::cuda::v6::split {

// spills allowed: a few values that are read once a tile of keys, and more in careful steps, which are
// few. Q's parts, the output and the scores of a warp's rows take 160 to 190 of a thread's registers.

// Weights are at most 2^15, which float16 holds. When a reference moves, the largest one so far gets
// 2^7: so that lo parts of those that matter are no subnormals.
constexpr int kWeightStart = 7;
constexpr float kWeightEnd = 15.0F;
// What rows start with: ordinary scores, some units from 0, then have such weights as well.
constexpr float kFirstReference = -4.0F;
// A plain step takes sums of a thread's weights, 4 or 8 of a row, in this range: the largest of them
// is 2^-3 or more.
constexpr float kLeastSum = 1.0F, kMostSum = 0x1p15F, kLeastAhead = -3.0F;
constexpr float kWeightUnit = 0x1p-15F;
constexpr int kWeightUnitExponent = -15;

// Tensor cores cut off what their sums can't hold: a score's sum goes on outside after 32 columns,
// in all steps, so that a row has the same bits whichever kind it gets.
constexpr int kScoreRun = 32 / 16;

// How a warp works on a tile of keys.
enum class Mode {
  kPlain,
  kMasked,   // the mask cuts through the tile, or a row's weights are far from its reference
  kCareful,  // K, V or Q hold inf, NaN, or numbers far from 1 or from each other
};
template <Mode kMode>
using ModeConstant = std::integral_constant<Mode, kMode>;

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kBlocksPerSM)
    attention_kernel(const __grid_constant__ Call call) {
  if constexpr (!compiled_for_kb(T::kMinKb, 227)) return;
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
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int g = lane / 4, t = lane % 4;
  const QueryTile tile = call.tiles.at(static_cast<int>(blockIdx.x));
  const std::int64_t kv_head = static_cast<std::int64_t>(tile.batch) * p.heads_kv + tile.kv_head;
  const KeyTiles tiles =
      key_tiles(p, tile.first_row, min(tile.first_row + T::kBlockQ, p.len_q) - 1, kBlockKV);
  const std::int64_t first_tile = kv_head * call.kv.tiles - call.kv.first_tile;
  const int warp_row = warp * T::kWarpRows;
  const auto row_of = [&](int r) { return tile.first_row + warp_row + 8 * r + g; };

  const auto start_tile = [&](int visit, int stage, auto mode) {
    if (visit < tiles.count()) {
      constexpr bool kIsPlain = decltype(mode)::value == Mode::kPlain;
      const std::int64_t index = first_tile + (kIsPlain ? tiles.at_full(visit) : tiles.at(visit));
      const char* source =
          reinterpret_cast<const char*>(call.kv.parts) + index * T::kTileBytes + 16 * threadIdx.x;
      char* target = sKV + stage * T::kTileBytes + 16 * threadIdx.x;
#pragma unroll
      for (int i = 0; i < T::kTileBytes / 16 / kThreads; ++i) {
        ptx::cp_async<16>(target + i * 16 * kThreads, source + i * 16 * kThreads);
      }
      if (threadIdx.x == 0) {
        ptx::cp_async<16>(sHeads + stage, call.kv.heads + index);
      }
    }
    ptx::cp_async_commit_group();
  };
  for (int i = 0; i < kStages - 1; ++i) start_tile(i, i, ModeConstant<Mode::kMasked>{});

  // Q, each row under its own scale. The softmax's scale goes into it, but for a power of 2: so all
  // factors of a score are powers of 2, and round nothing. Beside a scale far from 1 the digits of a
  // Q of subnormals may count, so there it is left to the scores.
  int scale_exponent;
  const float scale_mantissa = frexpf(scale_log2_of(p.scale), &scale_exponent);
  const bool scale_is_near_1 = abs(scale_exponent) <= kNear1;
  // Worked out again where it is needed: one register less in plain steps.
  const auto late_scale = [&] {
    int exponent;
    const float mantissa = frexpf(scale_log2_of(p.scale), &exponent);
    return abs(exponent) > kNear1 ? mantissa : 1.0F;
  };
  const float q_scale = sign_of_scale(p.scale) * (scale_is_near_1 ? scale_mantissa : 1.0F);
  bool q_needs_care = !scale_is_near_1;
  const auto gQ = head_view(p.q, p.q_stride, tile.batch, tile.head, p.len_q, p.head_dim);
  unsigned rQ[T::kQInRegisters ? kSteps : 1][2][kRowTiles][4];  // [..][hi, lo]
  float factor[kRows];  // of a row: what its split numbers are to be multiplied by
  const bool q_is_plain = tile.first_row + T::kBlockQ <= p.len_q && p.head_dim == kHeadDim &&
                          reinterpret_cast<std::uintptr_t>(gQ.data) % 8 == 0 &&
                          gQ.row_stride % 2 == 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float* gRow = gQ.data + row_of(r) * gQ.row_stride + 2 * t;
    const int columns = row_of(r) < p.len_q ? p.head_dim - 2 * t : 0;
    float2 x[kColumnTiles];
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
      if (q_is_plain) {
        x[i] = *reinterpret_cast<const float2*>(gRow + 8 * i);
      } else {
        x[i].x = 8 * i < columns ? gRow[8 * i] : 0.0F;
        x[i].y = 8 * i + 1 < columns ? gRow[8 * i + 1] : 0.0F;
      }
    }
    float row_max = 0.0F, nan_if_wild = 0.0F;
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
      row_max = fmaxf(row_max, fmaxf(fabsf(x[i].x), fabsf(x[i].y)));
      nan_if_wild = fmaf(x[i].x, 0.0F, fmaf(x[i].y, 0.0F, nan_if_wild));
    }
    const bool is_wild = nan_if_wild != 0.0F;
    if (is_wild) {
      row_max = 0.0F;
#pragma unroll
      for (int i = 0; i < kColumnTiles; ++i) {
        const float2 finite = make_float2(finite_or_zero(x[i].x), finite_or_zero(x[i].y));
        row_max = fmaxf(row_max, fmaxf(fabsf(finite.x), fabsf(finite.y)));
      }
    }
    const float scale = scale_of(max_of_lanes<4>(row_max));
    factor[r] = inverse_of(scale);
    q_needs_care = q_needs_care || is_wild || !is_near_1(factor[r]);
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
      const float low = x[i].x * (scale * q_scale), high = x[i].y * (scale * q_scale);
      const Parts parts = is_wild ? split_wild(low, high) : split(low, high);
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
  q_needs_care = __any_sync(0xffffffffU, q_needs_care) != 0;

  const int q_offset = Tile::offset(warp_row + lane % 16, lane / 16);
  const int k_offset = Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const int v_offset = Tile::offset(lane % 16, lane / 16);

  References<kRows, kWeightStart> reference;
  // Scores of the references, before these were rounded: for lse alone, so not in registers.
  volatile float reference_score[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    reference.value[r] = kFirstReference;
    reference_score[r] = kFirstReference + kWeightStart;
  }
  float rO[kRowTiles][kColumnTiles][4] = {};

  // Returns whether the tile is done. In plain mode it is not if weights turn out to be out of range.
  bool is_behind = false;
  int visit = 0;
  const auto step = [&](int kv_tile, int tile_at, const TileHead& head, auto mode) {
    constexpr bool kIsPlain = decltype(mode)::value == Mode::kPlain;
    constexpr bool kMasked = decltype(mode)::value == Mode::kMasked;
    constexpr bool kCareful = decltype(mode)::value == Mode::kCareful;
    const int kv_start = kv_tile * kBlockKV;
    int q_at = q_offset, k_at = tile_at + k_offset, v_at = tile_at + 2 * kPart + v_offset;
    hide_origin(q_at);
    hide_origin(k_at);
    hide_origin(v_at);
    const auto finite = [](unsigned x) { return kCareful ? finite_or_zero16(x) : x; };
    const auto corrections = [&](float (&sum)[2][4], const unsigned (&hi)[4],
                                 const unsigned (&lo)[4], const unsigned (&b_hi)[4],
                                 const unsigned (&b_lo)[4], bool is_first) {
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

    float rS[kRowTiles][kKeyTiles][4];
    float tile_sum[kRows] = {};  // a tile by itself: small weights count
    const auto weigh = [&](int r, float& s, float score_factor) {
      s = ptx::ex2_approx_ftz(__fmaf_rn(s, score_factor, -reference.value[r]));
      tile_sum[r] += s;
    };
    unsigned p_hi[kPvSteps][kRowTiles][4], p_lo[kPvSteps][kRowTiles][4];
    const auto split_weights = [&](int kk) {
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
    };

    // S = Q K^T, 16 keys at a time. A plain step goes on to their weights at once, and looks at the
    // sums of these later: so nothing waits between one tile's products.
    const float tile_factor = power_of_2(scale_exponent) * head.k_factor;
    const auto read_q = [&](unsigned (&q)[4], int kk, int part, int m) {
      if constexpr (T::kQInRegisters) {
#pragma unroll
        for (int e = 0; e < 4; ++e) q[e] = rQ[kk][part][m][e];
      } else {
        ptx::ldmatrix_x4(q, sQ + Tile::advance(q_at, 2 * kk) + part * (T::kQBytes / 2) +
                                m * 16 * Tile::kRowBytes);
      }
    };
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += 2) {
      const auto read_k = [&](unsigned (&k)[4], int kk, int part) {
        ptx::ldmatrix_x4(k,
                         sQ + Tile::advance(k_at, 2 * kk) + part * kPart + n * 8 * Tile::kRowBytes);
      };
#pragma unroll
      for (int run = 0; run < kSteps; run += kScoreRun) {
        unsigned k_hi[T::kKeepK ? kScoreRun : 1][4];
        float sum[kRowTiles][2][4];
#pragma unroll
        for (int kk = run; kk < run + kScoreRun; ++kk) {
          unsigned k_lo[4];
          auto& hi = k_hi[T::kKeepK ? kk - run : 0];
          read_k(hi, kk, 0);
          read_k(k_lo, kk, 1);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            unsigned q_hi[4], q_lo[4];
            read_q(q_hi, kk, 0, m);
            read_q(q_lo, kk, 1, m);
            corrections(sum[m], q_hi, q_lo, hi, k_lo, kk == run);
          }
        }
#pragma unroll
        for (int kk = run; kk < run + kScoreRun; ++kk) {
          auto& hi = k_hi[T::kKeepK ? kk - run : 0];
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
          for (int e = 0; e < 8; ++e) {
            float& score = rS[m][n + e / 4][e % 4];
            score = run == 0 ? sum[m][e / 4][e % 4] : score + sum[m][e / 4][e % 4];
          }
        }
      }
      if constexpr (kIsPlain) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            const int r = 2 * m + e % 4 / 2;
            weigh(r, rS[m][n + e / 4][e % 4], factor[r] * tile_factor);
          }
        }
        split_weights(n / 2);
      }
    }

    const float* gFactors = call.kv.factors + 2 * (first_tile + kv_tile) * kBlockKV + 2 * t;
    const auto k_factor_of = [&](int key) {
      return head.k_kind != TileKind::kEven ? gFactors[key] : head.k_factor;
    };
    const auto v_factor_of = [&](int key) {
      return head.v_kind != TileKind::kEven ? gFactors[kBlockKV + key] : head.v_factor;
    };
    float largest[kRows];
    if constexpr (!kIsPlain) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const KeyRange seen = visible_keys(p, min(row_of(r), p.len_q - 1));
        const int begin = seen.begin - kv_start - 2 * t, end = seen.end - kv_start - 2 * t;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& s = rS[r / 2][n][2 * (r % 2) + e];
            // The factors alone may be out of float32's range, where care is taken.
            s = kCareful ? times_power_of_2(s, scale_exponent + exponent_of(factor[r]) +
                                                   exponent_of(k_factor_of(8 * n + e))) *
                               late_scale()
                         : s * (factor[r] * tile_factor);
            const bool is_seen = 8 * n + e >= begin && 8 * n + e < end;
            if (!is_seen) s = -INFINITY;
          }
        }
        largest[r] = largest_of_row(rS, r);
      }
      // A row's bits are not to depend on other rows, for which a step may not be plain: a reference
      // that a plain step would keep stays. Where the mask cuts, or the scale is far, none is plain.
      reference.follow(largest, rO, kWeightEnd,
                       visit < tiles.masked() || !scale_is_near_1 ? INFINITY : kLeastAhead,
                       [&](int r, float score) { reference_score[r] = score; });
#pragma unroll
      for (int kk = 0; kk < kPvSteps; ++kk) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int e = 0; e < 8; ++e) weigh(2 * m + e % 4 / 2, rS[m][2 * kk + e / 4][e % 4], 1.0F);
        }
      }
    }
    const auto are_near = [](float least, float most) {
      return least >= kLeastSum && most <= kMostSum;
    };
    bool is_near = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) is_near = is_near && are_near(tile_sum[r], tile_sum[r]);
    is_behind = __all_sync(0xffffffffU, is_near) == 0;
    if (kIsPlain && is_behind) return false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) reference.row_sum[r] += tile_sum[r];

    // What v holds under the key of the reference may be small, or 0. So where the weights of a row
    // are behind, they get a factor of their own, a power of 2, and with it all digits; not where a
    // plain step would take them as they are.
    int shift[kRows] = {};
    if constexpr (!kIsPlain) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float behind = reference.value[r] - max_of_lanes<4>(largest[r]);
        const float least = -max_of_lanes<4>(-tile_sum[r]), most = max_of_lanes<4>(tile_sum[r]);
        const bool is_far = visit < tiles.masked() || !are_near(least, most);
        shift[r] = is_far ? static_cast<int>(fminf(fmaxf(behind + 14.0F, 0.0F), 126.0F)) : 0;
      }
    }
    if constexpr (kMasked) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          rS[r / 2][n][2 * (r % 2)] *= power_of_2(shift[r]);
          rS[r / 2][n][2 * (r % 2) + 1] *= power_of_2(shift[r]);
        }
      }
    }
    // In a careful step V's factors go into the weights. If they differ, each row's largest product
    // becomes 2^14.
    if constexpr (kCareful) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        int top = kLeastExponent;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float weight = rS[r / 2][n][2 * (r % 2) + e], of_v = v_factor_of(8 * n + e);
            if (weight > 0.0F && of_v > 0.0F)
              top = max(top, exponent_of(weight) + exponent_of(of_v));
          }
        }
        const int row_top = static_cast<int>(max_of_lanes<4>(static_cast<float>(top)));
        shift[r] =
            head.v_kind == TileKind::kEven ? shift[r] - exponent_of(head.v_factor) : 14 - row_top;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& s = rS[r / 2][n][2 * (r % 2) + e];
            const float of_v = v_factor_of(8 * n + e);
            const float product = times_power_of_2(s, exponent_of(of_v) + shift[r]);
            // Above 0 it stays above 0, where it may meet an inf.
            const float least = head.v_kind == TileKind::kWild ? 0x1p-24F : 0.0F;
            s = s > 0.0F && of_v > 0.0F ? fmaxf(product, least) : s * of_v;
          }
        }
      }
    }
    if constexpr (!kIsPlain) {
#pragma unroll
      for (int kk = 0; kk < kPvSteps; ++kk) split_weights(kk);
    }

    // O += P V, 16 columns at a time. 0 times NaN is NaN: where V has such numbers and the mask hides
    // some, each row is multiplied by itself, with zeros for the keys that it does not see.
    const float v_factor = head.v_factor * kWeightUnit;
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
            if (m == 0 || kCareful)
              ptx::ldmatrix_x4_trans(v_hi[kk],
                                     sQ + Tile::advance(v_at, n) + kk * 16 * Tile::kRowBytes);
            ptx::ldmatrix_x4_trans(v_lo,
                                   sQ + Tile::advance(v_at, n) + kPart + kk * 16 * Tile::kRowBytes);
            if (kCareful && only_row >= 0) {
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                const int key = 16 * kk + e % 2 * 8;
                const unsigned keep = (key >= begin && key < end ? 0x0000ffffU : 0U) |
                                      (key + 1 >= begin && key + 1 < end ? 0xffff0000U : 0U);
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
            const int r = 2 * m + e % 4 / 2;
            const float x = sum[m][e / 4][e % 4];
            o = kCareful ? o + times_power_of_2(x, kWeightUnitExponent - shift[r])
                         : __fmaf_rn(x * power_of_2(-shift[r]), v_factor, o);
          }
        }
      }
    };
    if constexpr (kCareful) {
      const bool row_by_row = head.v_kind == TileKind::kWild;
#pragma unroll 1
      for (int row = row_by_row ? 0 : -1; row < (row_by_row ? 16 : 0); ++row) add_product(row);
    } else {
      add_product(-1);
    }
    return true;
  };

  // Whether this warp's rows see a key of a tile.
  const auto is_seen = [&](int kv_tile) {
    const int first_row = tile.first_row + warp_row;
    if (first_row >= p.len_q) return false;
    const int last_row = min(first_row + T::kWarpRows, p.len_q) - 1;
    return visible_keys(p, last_row).end > kv_tile * kBlockKV &&
           visible_keys(p, first_row).begin < (kv_tile + 1) * kBlockKV;
  };

  // Tiles of one mode in a row, so that the loop over the plain ones has the registers for itself.
  int stage = 0;
  const auto await_tile = [] {  // warps meet here, whatever their modes
    ptx::cp_async_wait_group<kStages - 2>();
    __syncthreads();
  };
  const auto next_tile = [&](auto mode) {
    await_tile();
    start_tile(visit + kStages - 1, stage == 0 ? kStages - 1 : stage - 1, mode);
  };
  const auto mode_of = [&](const TileHead& head) {
    if (q_needs_care || !head.is_even()) return Mode::kCareful;
    return visit < tiles.masked() || is_behind ? Mode::kMasked : Mode::kPlain;
  };
  const auto step_while = [&](auto mode) {
    constexpr Mode kMode = decltype(mode)::value;
    while (visit < tiles.count()) {
      const TileHead head = sHeads[stage];
      // After a plain tile comes no masked one.
      if (kMode == Mode::kPlain ? !head.is_even() : mode_of(head) != kMode) return;
      const int kv_tile = kMode == Mode::kPlain ? tiles.at_full(visit) : tiles.at(visit);
      if (kMode == Mode::kPlain || is_seen(kv_tile)) {
        if (!step(kv_tile, T::kQBytes + stage * T::kTileBytes, head, mode)) return;
      }
      if (visit < tiles.masked()) is_behind = false;  // by what the mask hides
      ++visit;
      stage = stage + 1 == kStages ? 0 : stage + 1;
      next_tile(mode);
    }
  };
  next_tile(ModeConstant<Mode::kMasked>{});
  while (visit < tiles.count()) {
    step_while(ModeConstant<Mode::kCareful>{});
    step_while(ModeConstant<Mode::kMasked>{});
    if (visit < tiles.count() && mode_of(sHeads[stage]) == Mode::kPlain)
      step_while(ModeConstant<Mode::kPlain>{});
  }

  // The one division; a row with no weight at all saw no key.
  float* gO =
      static_cast<float*>(p.out) + tile.batch * p.out_stride.batch + tile.head * p.out_stride.head;
  const bool is_aligned =
      reinterpret_cast<std::uintptr_t>(gO) % 8 == 0 && p.out_stride.row % 2 == 0;
  const bool is_plain = is_aligned && p.head_dim_v == kHeadDim;
  reference.add_lanes();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float sum = reference.row_sum[r];
    if (row_of(r) >= p.len_q) continue;
    const float inverse = sum == 0.0F ? 0.0F : 1.0F / (sum * kWeightUnit);
    float* target = gO + row_of(r) * p.out_stride.row + 2 * t;
    const int columns = p.head_dim_v - 2 * t;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const float* o = rO[r / 2][n] + 2 * (r % 2);
      if (is_plain) {
        *reinterpret_cast<float2*>(target + 8 * n) = make_float2(o[0] * inverse, o[1] * inverse);
      } else {
        if (8 * n < columns) target[8 * n] = o[0] * inverse;
        if (8 * n + 1 < columns) target[8 * n + 1] = o[1] * inverse;
      }
    }
  }
  if (p.lse != nullptr && t < kRows && row_of(t) < p.len_q) {
    const std::int64_t head_index = static_cast<std::int64_t>(tile.batch) * p.heads_q + tile.head;
    p.lse[head_index * p.len_q + row_of(t)] =
        reference.log_sum(t, p.scale, [&](int r) { return reference_score[r]; });
  }
}

template <int kHeadDim>
LaunchPlan Instance<kHeadDim>::plan(const ForwardParams& p) {
  using T = Traits<kHeadDim>;
  return {.blocks = static_cast<std::int64_t>(p.batch) * p.heads_q * ceil_div(p.len_q, T::kBlockQ),
          .threads = T::kThreads,
          .dynamic_shared_bytes = T::kSharedBytes,
          .workspace_bytes = T::scratch_bytes(p),
          .compiled = shared_memory<attention_kernel<T>>().code_kb >= T::kMinKb};
}

template <int kHeadDim>
void Instance<kHeadDim>::run(const ForwardParams& p, void* stream) {
  using T = Traits<kHeadDim>;
  const LaunchPlan launch_plan = plan(p);
  const Scratch scratch(std::max<std::size_t>(launch_plan.workspace_bytes, 16), stream,
                        "the parts of k and v");
  const Call call{.p = p, .kv = T::layout(p, scratch.data()), .tiles = {p, T::kBlockQ, 8}};
  const std::int64_t split_blocks = 2LL * call.kv.tiles * p.batch * p.heads_kv;
  if (split_blocks > 0) {
    launch<split_kernel<T>>({.blocks = split_blocks, .threads = kSplitThreads}, stream, call);
  }
  launch<attention_kernel<T>>(launch_plan, stream, call);
}

#define FASTATTN_INSTANTIATE_split(...) template struct v6::split::Instance<__VA_ARGS__>;

}  // namespace fastattn::cuda::v6::split
