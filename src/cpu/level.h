// What the dispatcher and the per-level objects agree on. tile_kernel.cpp is compiled once per
// instruction-set level, each time with FASTATTN_CPU_LEVEL as its namespace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fastattn/fastattn.h"

namespace fastattn::cpu {

// One call cut into tasks. The query heads that share a key/value head are packed: packed row r is
// query r / group of query head r % group, so neighbouring rows see nearly the same keys and a
// decode step fills the vector lanes with its group. A task is `rows_per_task` packed rows.
struct Call {
  const ForwardParams& params;
  int rows_per_task;
  std::int64_t tasks_per_head;  // per key/value head
};

struct Level {
  const char* name;  // "x86-64-v4"
  int lanes;         // fp32 per vector
  int group_rows;    // rows that share one pass over a key tile in registers
  int max_rows;      // of a task
  std::size_t (*scratch_bytes)(const Call& call);
  // Writes the rows of one task to out and lse. `scratch` is 64-byte aligned and may hold anything.
  void (*run_task)(const Call& call, std::int64_t task, std::byte* scratch);
};

#if defined(__x86_64__)
namespace x86_64_v2 {
extern const Level level;
}
namespace x86_64_v3 {
extern const Level level;
}
namespace x86_64_v4 {
extern const Level level;
}
#else
namespace baseline {
extern const Level level;
}
#endif

}  // namespace fastattn::cpu
