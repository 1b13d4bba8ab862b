// Copies of tensors of 16-bit numbers whose rows don't start and end at multiples of 16 bytes: the
// kernel copies 16 bytes at a time.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/launch/launch.cuh"
#include "cuda/tile/copy.cuh"
#include "cuda/tile/mask.cuh"
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

// Makes `data` and `stride` those of a copy of rows `begin` to `end` at `memory`, where they need
// one. Returns the end of it. Without memory it only measures.
inline std::size_t pack(const void*& data, Strides& stride, int batch, int heads, int begin,
                        int end, int dim, std::size_t used, char* memory, void* stream) {
  if (rows_are_aligned<std::uint16_t>(data, stride, dim) || begin >= end) return used;
  const int chunks = static_cast<int>(ceil_div(dim, 8)), length = end - begin;
  const std::int64_t row = 8 * chunks, head = length * row;
  const std::int64_t count = head * heads * batch;
  if (memory != nullptr) {
    const PackCall call{.source = static_cast<const std::uint16_t*>(data) + begin * stride.row,
                        .target = reinterpret_cast<std::uint16_t*>(memory + used),
                        .stride = stride,
                        .heads = heads,
                        .length = length,
                        .dim = dim,
                        .chunks = chunks,
                        .all_chunks = count / 8};
    launch<pack_kernel>(
        {.blocks = ceil_div(call.all_chunks, kPackThreads), .threads = kPackThreads}, stream, call);
    // Row 0, from where rows are counted, would lie before the copy.
    data = reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(call.target) -
                                         static_cast<std::uintptr_t>(begin * row * 2));
    stride = {.batch = heads * head, .head = head, .row = row};
  }
  return used + static_cast<std::size_t>(count) * 2;
}

// Packs Q, K and V of a call: of K and V the tiles of `block` keys that some row sees. Returns how
// many bytes that takes; without memory it only measures.
inline std::size_t pack(ForwardParams& p, int block, char* memory, void* stream) {
  const KeyRange tiles = seen_tiles(p, block);
  const int begin = tiles.begin * block, end = std::min(tiles.end * block, p.len_kv);
  std::size_t used =
      pack(p.q, p.q_stride, p.batch, p.heads_q, 0, p.len_q, p.head_dim, 0, memory, stream);
  used = pack(p.k, p.k_stride, p.batch, p.heads_kv, begin, end, p.head_dim, used, memory, stream);
  return pack(p.v, p.v_stride, p.batch, p.heads_kv, begin, end, p.head_dim_v, used, memory, stream);
}

}  // namespace fastattn::cuda::v6::half
