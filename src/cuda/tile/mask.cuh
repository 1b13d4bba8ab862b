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

// No sum here leaves the range of int, whatever the lengths and the window.
__host__ __device__ __forceinline__ KeyRange visible_keys(const ForwardParams& p, int row) {
  const int position = row - p.len_q + p.len_kv;  // of the last key before the window's right part
  const int left = p.mask.window_left, right = p.mask.causal ? 0 : p.mask.window_right;
  const bool cuts_left = left >= 0 && position > left;
  const bool cuts_right = right >= 0 && position < p.len_kv - right - 1;
  return {cuts_left ? min(position - left, p.len_kv) : 0,
          cuts_right ? max(position + right + 1, 0) : p.len_kv};
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
