// V5: both products from tiles in registers.
//
// Idea            A value that comes from shared memory should serve eight multiply-adds, not one or
//                 two. A thread owns 8 x 8 scores and 8 x 8 outputs: 16 loads of 16 bytes feed 256
//                 multiply-adds, in Q K^T and in P V alike.
// New since V4    8 x 8 register tiles in both products; 16-byte chunks swizzled instead of padded
//                 rows; K and V stream in by asynchronous copies, two pieces ahead. And what a call
//                 needs: masks, whose tiles are skipped, masked or left alone; any head dims.
// Who owns what   block: 128 query rows of one head (64 for Dv over 128). warp: a band of them
//                 against all keys of a tile. lane (x, y) of X * Y = 32: rows y + Y i, keys x + X j,
//                 output columns 4 x .. 4 x + 3 and those 4 X further on.
// Limit now       Two warps a scheduler are all that the registers hold, and one of six instructions
//                 is no multiply-add; register banks cost the multiply-adds themselves some turns.
// Measured        1.27 ms, 40.5 TFLOP/s, error 3.7e-7 (H200, B=4, H=12, M=N=2048, D=64)
// Read more       docs/ladder/v5.md
//
// spills allowed: a few values that are read once a tile of keys. With fewer unrolled steps nothing
// is spilled, and the kernel reaches 39.1 instead of 40.5 TFLOP/s (H200, the same call).
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/launch/dispatch.cuh"
#include "cuda/launch/launch.cuh"
#include "cuda/launch/shared.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ex2.cuh"
#include "cuda/tile/copy.cuh"
#include "cuda/tile/lanes.cuh"
#include "cuda/tile/mask.cuh"
#include "fastattn/fastattn.h"

namespace fastattn::cuda {
namespace {

constexpr int kWarpSize = 32;
constexpr int kTile = 8;    // rows, keys and columns of a thread
constexpr int kStages = 3;  // pieces in shared memory: one in use, two on their way
constexpr double kLog2E = 1.4426950408889634;
constexpr float kLn2 = 0.69314718056F;

// Sizes that follow from Dv, rounded up to 64, 128 or 256. Keys of a tile are as many as columns of
// the output, so that both products have the same shape. kDepth: of a piece, in values of d of K
// and in keys of V.
template <int kHeadDimV_, int kDepth_>
struct Shape {
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kDepth = kDepth_;
  static constexpr int kX = kHeadDimV / kTile;  // lanes side by side
  static constexpr int kY = kWarpSize / kX;     // and above each other
  static constexpr int kBlockKV = kHeadDimV;
  static constexpr int kWarps = kHeadDimV == 64 ? 4 : 8;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kWarpRows = kTile * kY;
  static constexpr int kBlockQ = kWarps * kWarpRows;
  static constexpr int kBlocksPerSM = kHeadDimV == 64 ? 2 : 1;
  static constexpr int kPieceFloats = kHeadDimV * kDepth;  // K: [keys, kDepth]; V: [kDepth, Dv]

  static constexpr std::size_t shared_floats(int head_dim) {
    return kStages * kPieceFloats + kBlockQ * kBlockKV +
           static_cast<std::size_t>(kBlockQ) * ((head_dim + kDepth - 1) / kDepth * kDepth);
  }
};
static_assert(Shape<64, 64>::shared_floats(64) == 28672);

template <class S, bool kAligned>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerSM)
    register_tiles_kernel(const __grid_constant__ ForwardParams p) {
  constexpr int kHeadDimV = S::kHeadDimV, kDepth = S::kDepth, kX = S::kX, kY = S::kY;
  constexpr int kBlockQ = S::kBlockQ, kBlockKV = S::kBlockKV;
  const int k_pieces = (p.head_dim + kDepth - 1) / kDepth;
  constexpr int kVPieces = kBlockKV / kDepth;

  float* sRing = dynamic_shared<float>();         // [kStages, kPieceFloats]
  float* sP = sRing + kStages * S::kPieceFloats;  // [kBlockQ, kBlockKV]
  float* sQ = sP + kBlockQ * kBlockKV;            // [k_pieces, kBlockQ, kDepth]

  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int x = lane % kX, y = lane / kX;
  const int first_row = warp * S::kWarpRows + y;  // of this thread in the tile; the next is kY on
  // Tiles of late rows come first: under a causal mask they see most.
  const int heads = p.batch * p.heads_q;
  const int head_index = static_cast<int>(blockIdx.x % heads);  // into [B, Hq]
  const int q_start = ((p.len_q - 1) / kBlockQ - static_cast<int>(blockIdx.x / heads)) * kBlockQ;
  const std::int64_t batch = head_index / p.heads_q, head = head_index % p.heads_q;
  const std::int64_t kv_head = static_cast<int>(head) / (p.heads_q / p.heads_kv);
  const HeadView gQ = head_view(p.q, p.q_stride, batch, head, p.len_q, p.head_dim);
  const HeadView gK = head_view(p.k, p.k_stride, batch, kv_head, p.len_kv, p.head_dim);
  const HeadView gV = head_view(p.v, p.v_stride, batch, kv_head, p.len_kv, p.head_dim_v);

  const KeyTiles tiles = key_tiles(p, q_start, min(q_start + kBlockQ, p.len_q) - 1, kBlockKV);

  // K and V of the tiles as one stream of pieces, in the order in which they are used.
  int load_visit = 0, load_part = 0, load_stage = 0, stage = 0;
  const auto start_piece = [&] {
    if (load_visit < tiles.count()) {
      float* sPiece = sRing + load_stage * S::kPieceFloats;
      const int kv_start = tiles.at(load_visit) * kBlockKV;
      const int v_part = load_part - k_pieces;
      if (v_part < 0) {
        copy_tile<kBlockKV, kDepth, S::kThreads, kAligned, true>(sPiece, gK, kv_start,
                                                                 load_part * kDepth);
      } else {
        copy_tile<kDepth, kHeadDimV, S::kThreads, kAligned, false>(sPiece, gV,
                                                                   kv_start + v_part * kDepth, 0);
      }
      load_part = v_part + 1 == kVPieces ? 0 : load_part + 1;
      load_visit += load_part == 0 ? 1 : 0;
    }
    ptx::cp_async_commit_group();
    load_stage = load_stage + 1 == kStages ? 0 : load_stage + 1;
  };
  // Waits for the next piece, and starts one into the place of the piece before, which the barrier
  // says that all threads have done with.
  const auto next_piece = [&] {
    ptx::cp_async_wait_group<kStages - 2>();
    __syncthreads();
    start_piece();
    const float* sPiece = sRing + stage * S::kPieceFloats;
    stage = stage + 1 == kStages ? 0 : stage + 1;
    return sPiece;
  };

  for (int part = 0; part < k_pieces; ++part) {
    copy_tile<kBlockQ, kDepth, S::kThreads, kAligned, true>(sQ + part * kBlockQ * kDepth, gQ,
                                                            q_start, part * kDepth);
  }
  for (int piece = 0; piece < kStages - 1; ++piece) start_piece();

  const float scale_log2 = static_cast<float>(p.scale * kLog2E);  // exponentials are powers of 2
  float row_max[kTile];       // of the scaled scores; the same in all lanes of a row
  float row_sum[kTile] = {};  // of this thread's keys
  float rO[kTile][kTile] = {};
#pragma unroll
  for (int i = 0; i < kTile; ++i) row_max[i] = -INFINITY;

  const auto step = [&](int kv_start, auto is_masked) {
    constexpr bool kMasked = decltype(is_masked)::value;

    // S = Q K^T.
    float rS[kTile][kTile] = {};
    for (int part = 0; part < k_pieces; ++part) {
      const float* sK = next_piece() + x * kDepth;
      const float* sQPart = sQ + (part * kBlockQ + first_row) * kDepth;
#pragma unroll 2
      for (int c = 0; c < kDepth / 4; ++c) {
        float4 k[kTile];
#pragma unroll
        for (int j = 0; j < kTile; ++j) k[j] = load4(sK + kX * j * kDepth + 4 * (c ^ (x % 8)));
#pragma unroll
        for (int i = 0; i < kTile; ++i) {
          const float4 q = load4(sQPart + kY * i * kDepth + 4 * (c ^ y ^ (kY * i % 8)));
#pragma unroll
          for (int j = 0; j < kTile; ++j) rS[i][j] = dot4(q, k[j], rS[i][j]);
        }
      }
    }

    // P = exp(scale S - m_new). A key that the row does not see gets a weight of -0, which no
    // exponential is: a NaN in its V must not count.
    float rescale[kTile];
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      const int row = q_start + first_row + kY * i;
      const KeyRange seen = kMasked ? visible_keys(p, row) : KeyRange{};
      float new_max = row_max[i];
#pragma unroll
      for (int j = 0; j < kTile; ++j) {
        rS[i][j] = __fmul_rn(rS[i][j], scale_log2);
        if (kMasked && !seen.holds(kv_start + x + kX * j)) rS[i][j] = -INFINITY;
        new_max = fmaxf(new_max, rS[i][j]);
      }
      new_max = max_of_lanes<kX>(new_max);
      const float shift = new_max == -INFINITY ? 0.0F : new_max;
      rescale[i] = ptx::ex2_approx_ftz(row_max[i] - shift);
      row_max[i] = new_max;
      row_sum[i] *= rescale[i];
      float* sRow = sP + (first_row + kY * i) * kBlockKV;
#pragma unroll
      for (int j = 0; j < kTile; ++j) {
        float weight = ptx::ex2_approx_ftz(rS[i][j] - shift);
        row_sum[i] += weight;
        const int key = x + kX * j;
        if (kMasked && !seen.holds(kv_start + key)) weight = -0.0F;
        sRow[4 * (key / 4 ^ (kX / 4 * y)) + key % 4] = weight;
      }
    }
    __syncwarp();  // P is the warp's own

    // O = rescale O + P V. The tile is summed by itself first.
    float rPV[kTile][kTile] = {};
    for (int part = 0; part < kVPieces; ++part) {
      const float* sV = next_piece() + 4 * x;
#pragma unroll 2
      for (int c = 0; c < kDepth / 4; ++c) {
        float4 v[4][2];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          v[e][0] = load4(sV + (4 * c + e) * kHeadDimV);
          v[e][1] = load4(sV + (4 * c + e) * kHeadDimV + 4 * kX);
        }
#pragma unroll
        for (int i = 0; i < kTile; ++i) {
          const int chunk = (part * kDepth / 4 + c) ^ (kX / 4 * y);
          const float4 w = load4(sP + (first_row + kY * i) * kBlockKV + 4 * chunk);
          const float weight[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const bool hidden = kMasked && signbit(weight[e]);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const float4 u = hidden ? make_float4(0.0F, 0.0F, 0.0F, 0.0F) : v[e][h];
              add_scaled4(rPV[i] + 4 * h, weight[e], u);
            }
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
#pragma unroll
      for (int j = 0; j < kTile; ++j) rO[i][j] = rO[i][j] * rescale[i] + rPV[i][j];
    }
  };

  int visit = 0;
  for (; visit < tiles.masked(); ++visit) step(tiles.at(visit) * kBlockKV, std::true_type{});
  for (; visit < tiles.count(); ++visit) step(tiles.at(visit) * kBlockKV, std::false_type{});

  // The one division. A row with no weight at all saw no key: its output is 0.
  float* gO = static_cast<float*>(p.out) + batch * p.out_stride.batch + head * p.out_stride.head;
#pragma unroll
  for (int i = 0; i < kTile; ++i) {
    const float sum = sum_of_lanes<kX>(row_sum[i]);
    const int row = q_start + first_row + kY * i;
    if (row >= p.len_q) continue;
    const float inverse = sum == 0.0F ? 0.0F : 1.0F / sum;
#pragma unroll
    for (int j = 0; j < kTile; ++j) {
      const int column = 4 * x + 4 * kX * (j / 4) + j % 4;
      if (column < p.head_dim_v) gO[row * p.out_stride.row + column] = rO[i][j] * inverse;
    }
    if (p.lse != nullptr && x == 0) {
      p.lse[static_cast<std::int64_t>(head_index) * p.len_q + row] =
          (row_max[i] + log2f(sum)) * kLn2;
    }
  }
}

// Calls f with the shape for a call. Deep pieces need fewer barriers; Q of head dims over 128 leaves
// no room for them beside the P of 128 columns.
template <class F>
auto dispatch_shape(const ForwardParams& p, F&& f) {
  if (p.head_dim_v <= 64) return f(Shape<64, 64>{});
  if (p.head_dim_v <= 128 && p.head_dim <= 128) return f(Shape<128, 64>{});
  if (p.head_dim_v <= 128 && p.head_dim <= 192) return f(Shape<128, 32>{});
  return f(Shape<256, 32>{});
}

LaunchPlan plan(const ForwardParams& p) {
  return dispatch_shape(p, [&]<class S>(S) -> LaunchPlan {
    return {
        .blocks = static_cast<std::int64_t>(p.batch) * p.heads_q * ceil_div(p.len_q, S::kBlockQ),
        .threads = S::kThreads,
        .dynamic_shared_bytes = S::shared_floats(p.head_dim) * sizeof(float)};
  });
}

void run(const ForwardParams& p, void* stream) {
  const bool aligned = rows_are_aligned(p.q, p.q_stride) && rows_are_aligned(p.k, p.k_stride) &&
                       rows_are_aligned(p.v, p.v_stride);
  dispatch_shape(p, [&]<class S>(S) {
    dispatch_bool(aligned, [&](auto kAligned) {
      launch<register_tiles_kernel<S, kAligned.value>>(plan(p), stream, p);
    });
  });
}

}  // namespace

extern const Kernel v5_register_tiles;
const Kernel v5_register_tiles = {
    .name = "v5",
    .title = "register tiles of 8 x 8 in both products, asynchronous copies, masks, any head dim",
    .arithmetic = "float32 multiply-adds",
    .backend = Backend::kCuda,
    .capabilities = {.head_dim_max = 256,
                     .head_dim_v_differs = true,
                     .lengths_differ = true,
                     .grouped_heads = true,
                     .causal = true,
                     .window = true,
                     .min_compute_capability = 75},
    .plan = plan,
    .run = run,
};

}  // namespace fastattn::cuda
