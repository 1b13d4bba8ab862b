// Copies of tensors of 16-bit numbers whose rows don't start and end at multiples of 16 bytes: the
// kernel copies 16 bytes at a time.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/launch/launch.cuh"
#include "cuda/tile/copy.cuh"
#include "fastattn/fastattn.h"

namespace fastattn::cuda::v6::half {

struct PackCall {
  const std::uint16_t* source;  // [B, H, length, dim]
  std::uint16_t* target;        // [B, H, length, 8 chunks], contiguous
  Strides stride;
  int heads, length, dim, chunks;
  std::int64_t all_chunks;
};

constexpr int kPackThreads = 256;

// A thread copies one chunk of 8 numbers; what is beyond the head dim becomes 0.
static __global__ void __launch_bounds__(kPackThreads)
    pack_kernel(const __grid_constant__ PackCall call) {
  const std::int64_t chunk = static_cast<std::int64_t>(blockIdx.x) * kPackThreads + threadIdx.x;
  if (chunk >= call.all_chunks) return;
  const std::int64_t row = chunk / call.chunks;
  const int column = static_cast<int>(chunk % call.chunks) * 8;
  const std::int64_t head = row / call.length;
  const std::uint16_t* source = call.source + head / call.heads * call.stride.batch +
                                head % call.heads * call.stride.head +
                                row % call.length * call.stride.row + column;
  for (int e = 0; e < 8; ++e) {
    call.target[8 * chunk + e] = column + e < call.dim ? source[e] : std::uint16_t{0};
  }
}

inline std::size_t packed_bytes(const void* data, const Strides& stride, int batch, int heads,
                                int length, int dim) {
  if (rows_are_aligned<std::uint16_t>(data, stride, dim)) return 0;
  return static_cast<std::size_t>(batch) * heads * length * (ceil_div(dim, 8) * 16);
}

// Makes `data` and `stride` those of a copy at `memory`, where they need one. Returns the end of it.
inline char* pack(const void*& data, Strides& stride, int batch, int heads, int length, int dim,
                  char* memory, void* stream) {
  const std::size_t bytes = packed_bytes(data, stride, batch, heads, length, dim);
  if (bytes == 0) return memory;
  const int chunks = static_cast<int>(ceil_div(dim, 8));
  const PackCall call{.source = static_cast<const std::uint16_t*>(data),
                      .target = reinterpret_cast<std::uint16_t*>(memory),
                      .stride = stride,
                      .heads = heads,
                      .length = length,
                      .dim = dim,
                      .chunks = chunks,
                      .all_chunks = static_cast<std::int64_t>(bytes / 16)};
  launch<pack_kernel>({.blocks = ceil_div(call.all_chunks, kPackThreads), .threads = kPackThreads},
                      stream, call);
  const std::int64_t row = 8 * chunks, head = length * row;
  data = memory;
  stride = {.batch = heads * head, .head = head, .row = row};
  return memory + bytes;
}

}  // namespace fastattn::cuda::v6::half
