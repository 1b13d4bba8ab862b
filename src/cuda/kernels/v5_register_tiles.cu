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
constexpr int kTile = 8;  // rows and columns of a thread's outputs
constexpr double kLog2E = 1.4426950408889634;
constexpr float kLn2 = 0.69314718056F;

// What a block holds. Its GPUs are those with min_kb to max_kb of shared memory for a block.
struct Shape {
  int head_dim_v;  // rounded up; 8 columns a lane, so that head_dim_v / 8 lanes stand side by side
  int keys;        // of a lane: its scores are a tile of 8 x keys
  int depth;       // of a piece of V, in keys
  int stages;      // pieces in shared memory: one in use, the others on their way
  int warps;
  int min_kb, max_kb;
  int block_kv = head_dim_v / kTile * keys;
  int block_q = warps * kWarpSize * kTile * kTile / head_dim_v;
  int depth_k = depth * kTile / keys;  // of a piece of K, in values of d: as large as one of V
  int piece_floats = depth * head_dim_v;

  [[nodiscard]] constexpr std::size_t shared_bytes(int head_dim) const {
    const int columns = (head_dim + depth_k - 1) / depth_k * depth_k;
    return sizeof(float) * (stages * piece_floats + block_q * (block_kv + columns));
  }
};

// A call takes the first that fits. Eight warps are all that the registers hold, so the aim is two
// blocks of four or one of eight; where Q or P would be too large, fewer rows or fewer keys.
constexpr Shape kShapes[] = {
    {64, 8, 64, 3, 4, 227, 227},   // two blocks for D to 64
    {64, 8, 32, 2, 4, 99, 163},    // 163: two blocks for D to 64; 99: one, for D to 96
    {64, 4, 32, 2, 4, 64, 64},     // D to 64
    {128, 8, 64, 3, 8, 227, 227},  // D to 128
    {128, 8, 32, 2, 8, 163, 227},  // 227: any D; 163: D to 128
    {128, 8, 32, 2, 4, 99, 163},   // 163: any D; 99: D to 128
    {128, 4, 16, 2, 4, 64, 64},    // D to 128
    {256, 8, 32, 3, 8, 227, 227},  //
    {256, 2, 8, 2, 8, 99, 163},    // what is left
    {256, 2, 8, 2, 4, 64, 64},     //
};

template <int kShape, bool kAligned>
__global__ void __launch_bounds__(kWarpSize* kShapes[kShape].warps, 8 / kShapes[kShape].warps)
    register_tiles_kernel(const __grid_constant__ ForwardParams p) {
  constexpr Shape kS = kShapes[kShape];
#ifdef __CUDA_ARCH__
  constexpr int kCodeKb = shared_kb(__CUDA_ARCH__ / 10);
  if constexpr (kCodeKb < kS.min_kb || kCodeKb > kS.max_kb) return;  // never launched
#endif
  constexpr int kHeadDimV = kS.head_dim_v, kX = kHeadDimV / kTile, kY = kWarpSize / kX;
  constexpr int kBlockQ = kS.block_q, kBlockKV = kS.block_kv, kKeys = kS.keys;
  constexpr int kDepthK = kS.depth_k, kDepthV = kS.depth, kPieceFloats = kS.piece_floats;
  constexpr int kVPieces = kBlockKV / kDepthV, kStages = kS.stages;
  constexpr int kThreads = kS.warps * kWarpSize;
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

  const float scale_log2 = static_cast<float>(p.scale * kLog2E);  // exponentials are powers of 2
  float row_max[kTile];       // of the scaled scores; the same in all lanes of a row
  float row_sum[kTile] = {};  // of this thread's keys
  float rO[kTile][kTile] = {};
#pragma unroll
  for (int i = 0; i < kTile; ++i) row_max[i] = -INFINITY;

  const auto step = [&](int kv_start, auto is_masked) {
    constexpr bool kMasked = decltype(is_masked)::value;

    // S = Q K^T.
    float rS[kTile][kKeys] = {};
    for (int part = 0; part < k_pieces; ++part) {
      const float* sK = next_piece() + x * kDepthK;
      const float* sQPart = sQ + (part * kBlockQ + first_row) * kDepthK;
#pragma unroll 2
      for (int c = 0; c < kDepthK / 4; ++c) {
        float4 k[kKeys];
#pragma unroll
        for (int j = 0; j < kKeys; ++j) k[j] = load4(sK + kX * j * kDepthK + 4 * (c ^ (x % 8)));
#pragma unroll
        for (int i = 0; i < kTile; ++i) {
          const float4 q = load4(sQPart + kY * i * kDepthK + 4 * (c ^ y ^ (kY * i % 8)));
#pragma unroll
          for (int j = 0; j < kKeys; ++j) rS[i][j] = dot4(q, k[j], rS[i][j]);
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
      row_sum[i] *= rescale[i];
      float* sRow = sP + (first_row + kY * i) * kBlockKV;
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
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
      for (int c = 0; c < kDepthV / 4; ++c) {
        float4 v[4][2];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          v[e][0] = load4(sV + (4 * c + e) * kHeadDimV);
          v[e][1] = load4(sV + (4 * c + e) * kHeadDimV + 4 * kX);
        }
#pragma unroll
        for (int i = 0; i < kTile; ++i) {
          const int chunk = (part * kDepthV / 4 + c) ^ (kX / 4 * y);
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

// For a call on the current GPU, by what its code was compiled for: 227 KB where there is no GPU.
// The last shape for that GPU where none fits, as on one with less than its code is for.
int choose_shape(const ForwardParams& p) {
  const SharedMemory shared = shared_memory<register_tiles_kernel<0, true>>();
  int last = 0;
  for (int i = 0; i < static_cast<int>(std::size(kShapes)); ++i) {
    const Shape& shape = kShapes[i];
    if (shared.code_kb < shape.min_kb || shared.code_kb > shape.max_kb) continue;
    if (shape.head_dim_v < p.head_dim_v) continue;
    if (shape.shared_bytes(p.head_dim) <= shared.bytes_per_block) return i;
    last = i;
  }
  return last;
}

LaunchPlan plan_of(const Shape& shape, const ForwardParams& p) {
  return {
      .blocks = static_cast<std::int64_t>(p.batch) * p.heads_q * ceil_div(p.len_q, shape.block_q),
      .threads = shape.warps * kWarpSize,
      .dynamic_shared_bytes = shape.shared_bytes(p.head_dim)};
}

LaunchPlan plan(const ForwardParams& p) { return plan_of(kShapes[choose_shape(p)], p); }

void run(const ForwardParams& p, void* stream) {
  const bool aligned = rows_are_aligned(p.q, p.q_stride) && rows_are_aligned(p.k, p.k_stride) &&
                       rows_are_aligned(p.v, p.v_stride);
  dispatch_index<std::size(kShapes)>(choose_shape(p), [&](auto kShape) {
    dispatch_bool(aligned, [&](auto kAligned) {
      launch<register_tiles_kernel<kShape.value, kAligned.value>>(plan_of(kShapes[kShape.value], p),
                                                                  stream, p);
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
