// 16-bit numbers, float16 or bfloat16, two of them in a register.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/cvt.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/copy.cuh"
#include "cuda/tile/schedule.cuh"
#include "fastattn/fastattn.h"

namespace fastattn::cuda {

template <DType kType>
struct Number16;

template <>
struct Number16<DType::kFloat16> {
  static constexpr unsigned kExponent = 0x7c00;  // of inf and NaN alone all of these bits are set

  static __device__ __forceinline__ float2 unpack(unsigned pair) { return ptx::f16x2_to_f32(pair); }
  static __device__ __forceinline__ unsigned pack(float low, float high) {
    return ptx::cvt_rn_f16x2(high, low);
  }
  static __device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
    ptx::mma_m16n8k16_f16(d, a, b0, b1);
  }
  static __device__ __forceinline__ void mma_zero(float (&d)[4], const unsigned (&a)[4],
                                                  unsigned b0, unsigned b1) {
    ptx::mma_m16n8k16_f16_zero(d, a, b0, b1);
  }
};

template <>
struct Number16<DType::kBFloat16> {
  static constexpr unsigned kExponent = 0x7f80;

  static __device__ __forceinline__ float2 unpack(unsigned pair) {
    return ptx::bf16x2_to_f32(pair);
  }
  static __device__ __forceinline__ unsigned pack(float low, float high) {
    return ptx::cvt_rn_bf16x2(high, low);
  }
  static __device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
    ptx::mma_m16n8k16_bf16(d, a, b0, b1);
  }
  static __device__ __forceinline__ void mma_zero(float (&d)[4], const unsigned (&a)[4],
                                                  unsigned b0, unsigned b1) {
    ptx::mma_m16n8k16_bf16_zero(d, a, b0, b1);
  }
};

template <DType kType>
__device__ __forceinline__ unsigned times(unsigned pair, float factor) {
  const float2 x = Number16<kType>::unpack(pair);
  return Number16<kType>::pack(x.x * factor, x.y * factor);
}

// A tile in shared memory, [rows, kColumns] of 16 bits. Chunk c (16 bytes) of row r lies at place
// c ^ (r % 8): eight rows' chunks of one column, which ldmatrix reads at once, meet no bank twice.
template <int kColumns>
struct Tile16 {
  static constexpr int kRowBytes = kColumns * 2;
  static constexpr int kChunks = kColumns / 8;
  static_assert(kChunks % 8 == 0);

  // In bytes from the start of the tile.
  static __device__ __forceinline__ int offset(int row, int chunk) {
    return row * kRowBytes + 16 * (chunk ^ (row & 7));
  }
  // From the offset of one of a row's first two chunks to that of the chunk `by` (even) further on.
  // The swizzle changes three bits of a chunk's number only: of what `by` has beyond them, a load's
  // own address can take care. At 128 columns that is slower than four more registers (H200: 2%).
  static __device__ __forceinline__ int advance(int offset, int by) {
    constexpr int kInto = kChunks <= 16 ? kChunks : 8;
    return (offset ^ 16 * (by % kInto)) + 16 * (by - by % kInto);
  }
};

// Hides from the compiler where a number comes from: what follows from it, such as the addresses of
// all columns, is then worked out where it is used, and not held in registers through a loop.
__device__ __forceinline__ void hide_origin(int& x) { asm volatile("" : "+r"(x)); }

// Copies tiles of kRows rows to Tile16s; what lies outside of the tensor becomes 0. Rows must
// start at multiples of 16 bytes, and end there or be followed by zeros up to there.
template <int kRows, int kColumns, int kThreads>
struct TileCopy {
  using Tile = Tile16<kColumns>;
  static constexpr int kRowStep = kThreads / Tile::kChunks;
  static_assert(kRows % kRowStep == 0 && (kRowStep & (kRowStep - 1)) == 0);

  const std::uint16_t* source;  // this thread's chunk of the tensor's first tile
  std::int64_t row_stride;
  int rows;     // of the tensor, from this thread's first one on
  bool inside;  // whether the tensor has its columns

  explicit __device__ __forceinline__ TileCopy(const HeadView<std::uint16_t>& g)
      : source(g.data + thread_row() * g.row_stride + 8 * thread_chunk()),
        row_stride(g.row_stride),
        rows(g.length - thread_row()),
        inside(8 * thread_chunk() < g.dim) {}

  static __device__ __forceinline__ int thread_row() {
    return static_cast<int>(threadIdx.x / Tile::kChunks);
  }
  static __device__ __forceinline__ int thread_chunk() {
    return static_cast<int>(threadIdx.x % Tile::kChunks);
  }

  // Of this thread's chunk in row thread_row() + first. The two have no bit in common, so what `first`
  // changes of the swizzle is known at compile time, and two registers do for all rows.
  static __device__ __forceinline__ int offset(int first) {
    const int change = first % 8;
    return Tile::offset(thread_row() + first - change, thread_chunk() ^ change) +
           change * Tile::kRowBytes;
  }

  __device__ __forceinline__ void start(char* sTile, int first_row) const {
    if (first_row + kRows - kRowStep < rows) {
      start<true>(sTile, first_row);
    } else {
      start<false>(sTile, first_row);
    }
  }
  // kInside: the tensor has all the rows.
  template <bool kInside>
  __device__ __forceinline__ void start(char* sTile, int first_row) const {
    const std::uint16_t* chunk = source + first_row * row_stride;
#pragma unroll
    for (int first = 0; first < kRows; first += kRowStep) {
      ptx::cp_async<16>(sTile + offset(first), chunk,
                        inside && (kInside || first_row + first < rows));
      chunk += kRowStep * row_stride;
    }
  }

  // Calls f(offset) for the chunks that this thread copies: it may read them before the barrier
  // that shows them to others.
  template <class F>
  static __device__ __forceinline__ void for_own_chunks(F&& f) {
#pragma unroll 4
    for (int first = 0; first < kRows; first += kRowStep) {
      f(offset(first));
    }
  }
};

// Multiplies what this thread has copied to a tile by `factor`.
template <DType kType, class Copy>
__device__ __forceinline__ void times_own_chunks(char* sTile, float factor) {
  Copy::for_own_chunks([&](int offset) {
    uint4& u = *reinterpret_cast<uint4*>(sTile + offset);
    u = make_uint4(times<kType>(u.x, factor), times<kType>(u.y, factor), times<kType>(u.z, factor),
                   times<kType>(u.w, factor));
  });
}

// Writes kRows rows of the output from a Tile16, by one warp.
template <int kRows, int kColumns>
__device__ __forceinline__ void write_rows16(const char* sTile, int tile_row,
                                             const ForwardParams& p, const QueryTile& tile,
                                             int lane) {
  using Tile = Tile16<kColumns>;
  constexpr int kRowStep = 32 / Tile::kChunks;
  const int r = static_cast<int>(static_cast<unsigned>(lane) / Tile::kChunks);
  const int c = static_cast<int>(static_cast<unsigned>(lane) % Tile::kChunks);
  const int rows =
      p.len_q - tile.first_row - tile_row - r;  // of the tensor, from this lane's first
  const int columns = min(p.head_dim_v - 8 * c, 8);
  std::uint16_t* head = static_cast<std::uint16_t*>(p.out) + tile.batch * p.out_stride.batch +
                        tile.head * p.out_stride.head;
  std::uint16_t* target = head + (tile.first_row + tile_row + r) * p.out_stride.row + 8 * c;
  const bool is_aligned =
      reinterpret_cast<std::uintptr_t>(head) % 16 == 0 && p.out_stride.row % 8 == 0;
  const auto source = [&](int i) { return sTile + Tile::offset(tile_row + r + i, c); };
  if (is_aligned && columns == 8 && rows > kRows - kRowStep) {
#pragma unroll
    for (int i = 0; i < kRows; i += kRowStep) {
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source(i));
      target += kRowStep * p.out_stride.row;
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < min(kRows, rows); i += kRowStep) {
    if (is_aligned && columns == 8) {
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source(i));
    } else {
#pragma unroll 1
      for (int e = 0; e < columns; ++e) {
        target[e] = reinterpret_cast<const std::uint16_t*>(source(i))[e];
      }
    }
    target += kRowStep * p.out_stride.row;
  }
}

}  // namespace fastattn::cuda
