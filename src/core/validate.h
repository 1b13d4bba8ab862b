#pragma once

#include "fastattn/fastattn.h"

namespace fastattn::core {

// What is wrong whatever the kernel: sizes, head counts, scale, window, null pointers.
void validate(const ForwardParams& params);

// No output element at all.
inline bool is_empty(const ForwardParams& params) {
  return params.batch == 0 || params.heads_q == 0 || params.len_q == 0;
}

}  // namespace fastattn::core
