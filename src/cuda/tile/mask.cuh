// Which keys a query row sees, and which tiles of keys a tile of query rows has to visit.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "fastattn/fastattn.h"

namespace fastattn::cuda {

// The keys [begin, end) that a row sees: those of the tensor, cut by the causal mask and the window,
// both aligned at the bottom right.
struct KeyRange {
  int begin, end;

  [[nodiscard]] __device__ __forceinline__ bool holds(int key) const {
    return key >= begin && key < end;
  }
};

__host__ __device__ __forceinline__ KeyRange visible_keys(const ForwardParams& p, int row) {
  const std::int64_t position = static_cast<std::int64_t>(row) + p.len_kv - p.len_q;
  const int right = p.mask.causal ? 0 : p.mask.window_right;
  const std::int64_t length = p.len_kv;
  const std::int64_t begin = p.mask.window_left < 0 ? 0 : position - p.mask.window_left;
  const std::int64_t end = right < 0 ? length : position + right + 1;
  return {static_cast<int>(min(max(begin, std::int64_t{0}), length)),
          static_cast<int>(min(max(end, std::int64_t{0}), length))};
}

// The tiles of `block` keys that hold a key which some row of the call sees.
inline KeyRange seen_tiles(const ForwardParams& p, int block) {
  const int begin = visible_keys(p, 0).begin, end = visible_keys(p, p.len_q - 1).end;
  if (begin >= end) return {0, 0};
  return {begin / block, (end - 1) / block + 1};
}

// Tiles of `block` keys, for rows from one to another: those between `first` and `end` hold a key
// that some row sees. Of those between `full_first` and `full_end` every row sees every key.
struct KeyTiles {
  int first, end, full_first, full_end;

  [[nodiscard]] __device__ __forceinline__ int count() const { return end - first; }
  [[nodiscard]] __device__ __forceinline__ int masked() const {
    return count() - (full_end - full_first);
  }
  // The order of the visits: first the masked tiles, of both ends, then the full ones.
  [[nodiscard]] __device__ __forceinline__ int at(int visit) const {
    const int left = full_first - first;
    if (visit < left) return first + visit;
    return visit < masked() ? full_end + visit - left : at_full(visit);
  }
  // The same for a visit after the masked ones.
  [[nodiscard]] __device__ __forceinline__ int at_full(int visit) const {
    return full_first + visit - masked();
  }
};

__device__ __forceinline__ KeyTiles key_tiles(const ForwardParams& p, int first_row, int last_row,
                                              int block) {
  const KeyRange top = visible_keys(p, first_row);
  const KeyRange bottom = visible_keys(p, last_row);
  if (top.begin >= bottom.end) return {0, 0, 0, 0};
  const int first = top.begin / block;
  const int end = (bottom.end - 1) / block + 1;
  const int full_first = min((bottom.begin + block - 1) / block, end);
  const int full_end = max(top.end / block, full_first);
  return {first, end, full_first, full_end};
}

}  // namespace fastattn::cuda
