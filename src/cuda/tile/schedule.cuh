// Which tile of queries a block computes.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstdint>

#include "fastattn/fastattn.h"

namespace fastattn::cuda {

// Division of numbers from 0 to 2^31 - 1 by one that the host knows: n / d = n * factor / 2^shift,
// where 2^shift / d, rounded up to `factor`, has 32 bits (Granlund and Montgomery, 1994). A GPU has
// no instruction that divides integers.
class Divider {
 public:
  Divider() = default;
  explicit Divider(int divisor) : divisor_(divisor) {
    shift_ = 31 + std::bit_width(static_cast<unsigned>(divisor) - 1);
    const std::uint64_t rest = (std::uint64_t{1} << shift_) - 1;
    factor_ = static_cast<std::uint32_t>(rest / static_cast<unsigned>(divisor) + 1);
  }

  [[nodiscard]] __host__ __device__ int divide(int n) const {
    return static_cast<int>(static_cast<std::uint64_t>(static_cast<unsigned>(n)) * factor_ >>
                            shift_);
  }
  [[nodiscard]] __host__ __device__ int rest(int n) const { return n - divide(n) * divisor_; }

 private:
  std::uint32_t factor_ = 1U << 31;
  int shift_ = 31;
  int divisor_ = 1;
};

struct QueryTile {
  int batch, head, kv_head;
  int first_row;
};

// The tiles of all heads in the order of the blocks. Some heads' blocks take turns. Under a causal
// mask blocks differ in length, and the more heads there are together, the more long blocks come
// before short ones; else what counts is that their K and V stay in the L2 cache. Both numbers are of
// a try on an H200: 1 to all heads.
class QueryTiles {
 public:
  QueryTiles(const ForwardParams& p, int rows, int element_bytes) : rows_(rows) {
    constexpr std::int64_t kCausalHeads = 64, kCacheBytes = 8 << 20;
    const std::int64_t head_bytes =
        static_cast<std::int64_t>(p.len_kv) * (p.head_dim + p.head_dim_v) * element_bytes;
    const int heads = std::max(p.batch * p.heads_q, 1);
    const int group = p.heads_q / p.heads_kv;
    const std::int64_t fit = kCacheBytes / std::max<std::int64_t>(head_bytes, 1) * group;
    together_ =
        static_cast<int>(std::clamp<std::int64_t>(p.mask.causal ? kCausalHeads : fit, 1, heads));
    of_head_ = std::max((p.len_q - 1) / rows + 1, 1);
    last_first_head_ = (heads - 1) / together_ * together_;
    by_turns_ = Divider(of_head_ * together_);
    by_together_ = Divider(together_);
    by_last_ = Divider(heads - last_first_head_);
    by_heads_ = Divider(std::max(p.heads_q, 1));
    by_group_ = Divider(std::max(group, 1));
  }

  // Late rows come first: under a causal mask they see most.
  [[nodiscard]] __device__ __forceinline__ QueryTile at(int block) const {
    const int first_head = by_turns_.divide(block) * together_;
    const int turn = block - first_head * of_head_;
    const Divider& by_heads_here = first_head == last_first_head_ ? by_last_ : by_together_;
    const int index = first_head + by_heads_here.rest(turn);
    const int head = by_heads_.rest(index);
    return {by_heads_.divide(index), head, by_group_.divide(head),
            (of_head_ - 1 - by_heads_here.divide(turn)) * rows_};
  }

 private:
  int rows_;
  int of_head_ = 1;          // tiles
  int together_ = 1;         // heads
  int last_first_head_ = 0;  // the first of the last heads, of which there may be fewer
  Divider by_turns_, by_together_, by_last_, by_heads_, by_group_;
};

}  // namespace fastattn::cuda
