// V5: both products from tiles in registers.
//
// Idea            A value from shared memory should serve eight multiply-adds, not one or two: where
//                 a thread owns 8 x 8 scores and outputs, 16 loads of 16 bytes feed 256 of them.
// New since V4    8 x 8 register tiles in both products; 16-byte chunks swizzled instead of padded
//                 rows; K and V stream in by asynchronous copies, ahead of their use. And what a call
//                 needs: masks, whose tiles are skipped, masked or left alone; any head dim and GPU.
// Who owns what   block: 32 to 128 query rows of one head. warp: a band of them against all keys of
//                 a tile. lane (x, y) of X * Y = 32: rows y + Y i, keys x + X j, output columns 4 x
//                 .. 4 x + 3 and those 4 X further on.
// Limit now       Two warps a scheduler are all that the registers hold, and one of six instructions
//                 is no multiply-add; register banks cost the multiply-adds themselves some turns.
// Measured        1.23 ms, 41.8 TFLOP/s, error 3.5e-7 (H200, B=4, H=12, M=N=2048, D=64)
// Read more       docs/ladder/v5.md
// spills allowed: at most 23 registers, of values that are read once a tile of keys.
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
#include "cuda/tile/scale.cuh"
#include "fastattn/fastattn.h"

namespace fastattn::cuda {
namespace {

constexpr int kWarpSize = 32;
constexpr int kTile = 8;  // rows and columns of a thread's outputs
// What a block holds, on GPUs with min_kb to max_kb of shared memory for one. A lane has 8 columns
// of the head_dim_v (Dv or more), and `keys` of a tile's keys. Of `stages` pieces one is in use.
struct Shape {
  int head_dim_v, keys, threads, depth_v, stages, min_kb, max_kb;
  int block_kv = head_dim_v / kTile * keys;
  int block_q = threads * kTile * kTile / head_dim_v;
  int depth_k = depth_v * kTile / keys;  // so that pieces of K and V are of one size
  int piece_floats = depth_v * head_dim_v;
  [[nodiscard]] constexpr std::size_t shared_bytes(int head_dim) const {
    const int columns = (head_dim + depth_k - 1) / depth_k * depth_k;
    return sizeof(float) * (stages * piece_floats + block_q * (block_kv + columns));
  }
};

// A call takes the first that fits. An SM's registers hold 256 threads: two blocks or one. Where
// memory is short, pieces shrink first, then a block has fewer rows, then a lane fewer keys.
constexpr Shape kShapes[] = {
    {64, 8, 128, 64, 3, 227, 227},   // two blocks where D is up to 64
    {64, 8, 128, 32, 2, 99, 163},    // 163 KB: likewise; 99 KB: one, for D to 96
    {64, 4, 128, 32, 2, 64, 64},     // D to 64
    {128, 8, 256, 64, 3, 227, 227},  // D to 128
    {128, 8, 256, 32, 2, 163, 227},  // 227 KB: any D; 163 KB: D to 128
    {128, 8, 128, 32, 2, 99, 163},   // 163 KB: any D; 99 KB: D to 128
    {128, 4, 128, 16, 2, 64, 64},    // D to 128
    {256, 8, 256, 32, 3, 227, 227},  // this and the next: what is left
    {256, 2, 256, 8, 2, 99, 163},   {256, 2, 128, 8, 2, 64, 64}};
static_assert(kShapes[0].shared_bytes(64) == 114688);

template <int kShape, bool kAligned>
__global__ void __launch_bounds__(kShapes[kShape].threads, 256 / kShapes[kShape].threads)
    register_tiles_kernel(const __grid_constant__ ForwardParams p) {
  constexpr Shape kS = kShapes[kShape];
  if constexpr (!compiled_for_kb(kS.min_kb, kS.max_kb)) return;
  constexpr int kHeadDimV = kS.head_dim_v, kX = kHeadDimV / kTile, kY = kWarpSize / kX;
  constexpr int kBlockQ = kS.block_q, kBlockKV = kS.block_kv, kKeys = kS.keys;
  constexpr int kDepthK = kS.depth_k, kDepthV = kS.depth_v, kVPieces = kBlockKV / kDepthV;
  constexpr int kStages = kS.stages, kPieceFloats = kS.piece_floats, kThreads = kS.threads;
  const int k_pieces = (p.head_dim + kDepthK - 1) / kDepthK;

  float* sRing = dynamic_shared<float>();      // [kStages, kPieceFloats]
  float* sP = sRing + kStages * kPieceFloats;  // [kBlockQ, kBlockKV]
  float* sQ = sP + kBlockQ * kBlockKV;         // [k_pieces, kBlockQ, kDepthK]

  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int x = lane % kX, y = lane / kX;
  const int first_row = warp * kTile * kY + y;  // of this thread in the tile; the next is kY on
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
      float* sPiece = sRing + load_stage * kPieceFloats;
      const int kv_start = tiles.at(load_visit) * kBlockKV;
      const int v_part = load_part - k_pieces;
      if (v_part < 0) {
        copy_tile<kBlockKV, kDepthK, kThreads, kAligned, true>(sPiece, gK, kv_start,
                                                               load_part * kDepthK);
      } else {
        copy_tile<kDepthV, kHeadDimV, kThreads, kAligned, false>(sPiece, gV,
                                                                 kv_start + v_part * kDepthV, 0);
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
    const float* sPiece = sRing + stage * kPieceFloats;
    stage = stage + 1 == kStages ? 0 : stage + 1;
    return sPiece;
  };

  for (int part = 0; part < k_pieces; ++part) {
    copy_tile<kBlockQ, kDepthK, kThreads, kAligned, true>(sQ + part * kBlockQ * kDepthK, gQ,
                                                          q_start, part * kDepthK);
  }
  for (int piece = 0; piece < kStages - 1; ++piece) start_piece();

  const float scale_log2 = scale_to_log2(p.scale);
  float row_max[kTile];       // of the scaled scores; the same in all lanes of a row
  float row_sum[kTile] = {};  // of this thread's keys
  float rO[kTile][kTile] = {};
#pragma unroll
  for (int i = 0; i < kTile; ++i) row_max[i] = -INFINITY;

  const auto step = [&](int kv_start, auto is_masked) {
    constexpr bool kMasked = decltype(is_masked)::value;

    // S = Q K^T. A step loads all before it multiplies: so nvcc 13.0 spills least.
    float rS[kTile][kKeys] = {};
    for (int part = 0; part < k_pieces; ++part) {
      const float* sK = next_piece();
      const float* sQPart = sQ + part * kBlockQ * kDepthK;
#pragma unroll 2
      for (int c = 0; c < kDepthK / 4; ++c) {
        float4 q[kTile], k[kKeys];
#pragma unroll
        for (int i = 0; i < kTile; ++i) q[i] = chunk_at<kDepthK>(sQPart, first_row, y, kY * i, c);
#pragma unroll
        for (int j = 0; j < kKeys; ++j) k[j] = chunk_at<kDepthK>(sK, x, x % 8, kX * j, c);
#pragma unroll
        for (int i = 0; i < kTile; ++i) {
#pragma unroll
          for (int j = 0; j < kKeys; ++j) rS[i][j] = dot4(q[i], k[j], rS[i][j]);
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
      for (int j = 0; j < kKeys; ++j) {
        rS[i][j] = __fmul_rn(rS[i][j], scale_log2);
        if (kMasked && !seen.holds(kv_start + x + kX * j)) rS[i][j] = -INFINITY;
        new_max = fmaxf(new_max, rS[i][j]);
      }
      new_max = max_of_lanes<kX>(new_max);
      const float shift = new_max == -INFINITY ? 0.0F : new_max;
      rescale[i] = ptx::ex2_approx_ftz(row_max[i] - shift);
      row_max[i] = new_max;
      float tile_sum = 0.0F;
      float* sRow = sP + (first_row + kY * i) * kBlockKV;
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        float weight = ptx::ex2_approx_ftz(rS[i][j] - shift);
        tile_sum += weight;
        const int key = x + kX * j;
        if (kMasked && !seen.holds(kv_start + key)) weight = -0.0F;
        sRow[4 * (key / 4 ^ (kX / 4 * y)) + key % 4] = weight;
      }
      row_sum[i] = row_sum[i] * rescale[i] + tile_sum;
    }
    __syncwarp();  // P is the warp's own

    // O = rescale O + P V, the tile summed by itself first. Columns to and fro: for register banks, 1%.
    float rPV[kTile][kTile] = {};
    for (int part = 0; part < kVPieces; ++part) {
      const float* sV = next_piece() + 4 * x;
#pragma unroll 2
      for (int c = 0; c < kDepthV / 4; ++c) {
        float v[4][kTile], w[kTile][4];
        const int place = 4 * ((part * kDepthV / 4 + c) ^ (kX / 4 * y));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          load4(v[e], sV + (4 * c + e) * kHeadDimV);
          load4(v[e] + 4, sV + (4 * c + e) * kHeadDimV + 4 * kX);
        }
#pragma unroll
        for (int i = 0; i < kTile; ++i) load4(w[i], sP + (first_row + kY * i) * kBlockKV + place);
#pragma unroll
        for (int i = 0; i < kTile; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float weight = w[i][e];
#pragma unroll
            for (int n = 0; n < kTile; ++n) {
              const int j = (i + e) % 2 == 0 ? n : kTile - 1 - n;
              rPV[i][j] += weight * (kMasked && signbit(weight) ? 0.0F : v[e][j]);
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
          natural_log(row_max[i], sum, p.scale);
    }
  }
}

// By the GPU that the code was compiled for; where none of its shapes fits, the last.
int choose_shape(const ForwardParams& p) {
  const auto [bytes, kb] = shared_memory<register_tiles_kernel<0, true>>();
  int chosen = 0;
  for (const Shape& s : kShapes) {
    if (kb < s.min_kb || kb > s.max_kb || s.head_dim_v < p.head_dim_v) continue;
    chosen = static_cast<int>(&s - kShapes);
    if (s.shared_bytes(p.head_dim) <= bytes) break;
  }
  return chosen;
}

LaunchPlan plan(const ForwardParams& p) {
  const Shape& s = kShapes[choose_shape(p)];
  return {.blocks = static_cast<std::int64_t>(p.batch) * p.heads_q * ceil_div(p.len_q, s.block_q),
          .threads = s.threads,
          .dynamic_shared_bytes = s.shared_bytes(p.head_dim)};
}

void run(const ForwardParams& p, void* stream) {
  dispatch_index<std::size(kShapes)>(choose_shape(p), [&](auto kShape) {
    dispatch_bool(inputs_are_aligned(p), [&](auto kAligned) {
      launch<register_tiles_kernel<kShape.value, kAligned.value>>(plan(p), stream, p);
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
