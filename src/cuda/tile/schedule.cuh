// Which tile of queries a block computes.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "fastattn/fastattn.h"

namespace fastattn::cuda {

struct QueryTile {
  int batch, head;
  int first_row;
};

// Heads whose blocks take turns. Under a causal mask blocks differ in length, and the more heads
// there are together, the more long blocks come before short ones; else what counts is that their K
// and V stay in the L2 cache. Both numbers are of a try on an H200: 1 to all heads.
inline int heads_together(const ForwardParams& p, int element_bytes) {
  constexpr std::int64_t kCausalHeads = 64, kCacheBytes = 8 << 20;
  const std::int64_t head_bytes =
      static_cast<std::int64_t>(p.len_kv) * (p.head_dim + p.head_dim_v) * element_bytes;
  const std::int64_t fit =
      kCacheBytes / std::max<std::int64_t>(head_bytes, 1) * (p.heads_q / p.heads_kv);
  return static_cast<int>(std::clamp<std::int64_t>(p.mask.causal ? kCausalHeads : fit, 1,
                                                   static_cast<std::int64_t>(p.batch) * p.heads_q));
}

// Late rows come first: under a causal mask they see most.
__device__ __forceinline__ QueryTile query_tile(const ForwardParams& p, int rows,
                                                int heads_together) {
  const int tiles = (p.len_q - 1) / rows + 1;
  const int heads = p.batch * p.heads_q;
  const int block = static_cast<int>(blockIdx.x);
  const int first_head = block / (tiles * heads_together) * heads_together;
  const int in_group = block - first_head * tiles;
  const int group_heads = min(heads_together, heads - first_head);
  const int head_index = first_head + in_group % group_heads;
  return {head_index / p.heads_q, head_index % p.heads_q,
          (tiles - 1 - in_group / group_heads) * rows};
}

}  // namespace fastattn::cuda
