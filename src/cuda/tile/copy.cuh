// Asynchronous copies of tiles of a tensor to shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/ptx/cp_async.cuh"
#include "cuda/tile/lanes.cuh"
#include "fastattn/fastattn.h"

namespace fastattn::cuda {

// One head of a tensor.
template <class T>
struct HeadView {
  const T* data;  // [length, dim]
  std::int64_t row_stride;
  int length, dim;
};

template <class T = float>
__device__ __forceinline__ HeadView<T> head_view(const void* data, const Strides& stride,
                                                 std::int64_t batch, std::int64_t head, int length,
                                                 int dim) {
  return {static_cast<const T*>(data) + batch * stride.batch + head * stride.head, stride.row,
          length, dim};
}

// Starts copying [kRows, kColumns] from (row, column) on; what lies outside of the tensor becomes 0.
// kSwizzled: chunk c (16 bytes) of row r goes to place c ^ (r % 8), so that eight lanes that read
// one chunk of eight rows meet no bank twice. kAligned: rows start and end at multiples of 16 bytes.
template <int kRows, int kColumns, int kThreads, bool kAligned, bool kSwizzled>
__device__ __forceinline__ void copy_tile(float* sTile, const HeadView<float>& g, int row,
                                          int column) {
  constexpr int kChunks = kColumns / 4;
  constexpr int kRowStep = kThreads / kChunks;
  static_assert(kRows % kRowStep == 0 && (!kSwizzled || kRowStep % 8 == 0));
  const int r = static_cast<int>(threadIdx.x) / kChunks;
  const int c = static_cast<int>(threadIdx.x) % kChunks;
  const bool has_all_rows = row + kRows <= g.length;
  const int floats = g.dim - column - 4 * c;
  const float* source = g.data + (row + r) * g.row_stride + column + 4 * c;
  float* target = sTile + r * kColumns + 4 * (kSwizzled ? c ^ (r % 8) : c);
#pragma unroll
  for (int first = 0; first < kRows; first += kRowStep) {
    const bool has_row = has_all_rows || row + r + first < g.length;
    if constexpr (kAligned) {
      ptx::cp_async<16>(target + first * kColumns, source, has_row && floats > 0);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        ptx::cp_async<4>(target + first * kColumns + e, source + e, has_row && e < floats);
      }
    }
    source += kRowStep * g.row_stride;
  }
}

// Chunk c of row `row` + `further` of a swizzled tile. `swizzle` is row % 8; `further` is known at
// compile time and has none of its bits. One exclusive or sets the place of c into the row's address.
template <int kColumns>
__device__ __forceinline__ float4 chunk_at(const float* sTile, int row, int swizzle, int further,
                                           int c) {
  static_assert(kColumns % 32 == 0 && (kColumns & (kColumns - 1)) == 0);
  const int change = further % 8;
  const unsigned byte = (4 * row * kColumns + 16 * swizzle) ^ 16 * c ^ 16 * change;
  return load4(reinterpret_cast<const float*>(reinterpret_cast<const char*>(sTile) + byte) +
               further * kColumns);
}

// Whether every row of a tensor of T starts and ends at a multiple of 16 bytes.
template <class T = float>
bool rows_are_aligned(const void* data, const Strides& stride, int dim) {
  constexpr int kElements = 16 / sizeof(T);
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && dim % kElements == 0 &&
         stride.batch % kElements == 0 && stride.head % kElements == 0 &&
         stride.row % kElements == 0;
}

inline bool inputs_are_aligned(const ForwardParams& p) {
  return rows_are_aligned(p.q, p.q_stride, p.head_dim) &&
         rows_are_aligned(p.k, p.k_stride, p.head_dim) &&
         rows_are_aligned(p.v, p.v_stride, p.head_dim_v);
}

}  // namespace fastattn::cuda
