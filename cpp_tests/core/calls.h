// Calls for tests of the core: shapes alone, with pointers that are never read.
#pragma once

#include "fastattn/fastattn.h"

namespace fastattn::testing {

struct Shape {
  int batch = 4, heads_q = 12, heads_kv = 12, len_q = 2048, len_kv = 2048, head_dim = 64,
      head_dim_v = 64;
};

inline ForwardParams call(const Shape& s = {}) {
  static float element = 0.0F;
  const auto contiguous = [](std::int64_t heads, std::int64_t length, std::int64_t dim) {
    return Strides{heads * length * dim, length * dim, dim};
  };
  return {.q = &element,
          .k = &element,
          .v = &element,
          .out = &element,
          .q_stride = contiguous(s.heads_q, s.len_q, s.head_dim),
          .k_stride = contiguous(s.heads_kv, s.len_kv, s.head_dim),
          .v_stride = contiguous(s.heads_kv, s.len_kv, s.head_dim_v),
          .out_stride = contiguous(s.heads_q, s.len_q, s.head_dim_v),
          .batch = s.batch,
          .heads_q = s.heads_q,
          .heads_kv = s.heads_kv,
          .len_q = s.len_q,
          .len_kv = s.len_kv,
          .head_dim = s.head_dim,
          .head_dim_v = s.head_dim_v,
          .scale = 0.125F};
}

}  // namespace fastattn::testing
