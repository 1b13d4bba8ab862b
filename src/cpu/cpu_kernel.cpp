// Registers the CPU kernel, chooses its instruction-set level and cuts a call into tasks.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>

#include "cpu/cpu.h"
#include "cpu/level.h"
#include "cpu/parallel.h"

namespace fastattn::cpu {
namespace {

// Below this many floating-point operations the caller's thread alone is faster than waking others.
constexpr double kSerialFlops = 2e6;

struct Choice {
  const Level* level = nullptr;
  std::string error;  // FASTATTN_CPU_ARCH asks for what can't run here
};

#if defined(__x86_64__)

#if defined(__clang__)
// Clang before 16 does not know the levels by name. It also lacks names for the rest of v3 (F16C,
// LZCNT, MOVBE), which every processor with these four has.
bool has_v3() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}
bool has_v4() {
  return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#else
bool has_v3() { return __builtin_cpu_supports("x86-64-v3") != 0; }
bool has_v4() { return __builtin_cpu_supports("x86-64-v4") != 0; }
#endif

struct Candidate {
  std::string_view short_name;
  const Level* level;
  bool runs_here;
};

Choice choose_level() {
  __builtin_cpu_init();
  const Candidate candidates[] = {
      {"v4", &x86_64_v4::level, has_v4()},
      {"v3", &x86_64_v3::level, has_v3()},
      {"v2", &x86_64_v2::level, true},
  };
  const char* wanted = std::getenv("FASTATTN_CPU_ARCH");
  for (const Candidate& candidate : candidates) {
    if (wanted == nullptr || *wanted == '\0') {
      if (candidate.runs_here) return {candidate.level, ""};
    } else if (candidate.short_name == wanted) {
      if (candidate.runs_here) return {candidate.level, ""};
      return {nullptr, std::string("FASTATTN_CPU_ARCH=") + wanted + ": this machine has no " +
                           candidate.level->name};
    }
  }
  return {nullptr, std::string("FASTATTN_CPU_ARCH=") + wanted + ": takes v2, v3 or v4"};
}

#else

Choice choose_level() { return {&baseline::level, ""}; }

#endif

const Choice& choice() {
  static const Choice chosen = choose_level();
  return chosen;
}

// Grows as calls need it and is kept for the thread's next call.
std::byte* scratch_of_this_thread(std::size_t bytes) {
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete(memory, std::align_val_t{64}); }
  };
  thread_local std::unique_ptr<std::byte, Free> memory;
  thread_local std::size_t size = 0;
  if (bytes > size) {
    memory.reset();
    size = 0;
    memory.reset(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{64})));
    size = bytes;
  }
  return memory.get();
}

double flops(const ForwardParams& p) {
  double keys = p.len_kv;
  const Mask& mask = p.mask;
  if (mask.window_left >= 0 && (mask.causal || mask.window_right >= 0)) {
    const double right = mask.causal ? 0 : mask.window_right;
    keys = std::min(keys, mask.window_left + right + 1);
  }
  return 2.0 * p.batch * p.heads_q * p.len_q * keys * (p.head_dim + p.head_dim_v);
}

// Large tasks read K and V less often; there must be a few per thread. The cut does not change the
// result: each row's arithmetic is the same in any task.
int choose_rows_per_task(const Level& level, std::int64_t heads, std::int64_t rows, int threads) {
  int size = level.max_rows;
  const auto tasks = [&] { return heads * ((rows + size - 1) / size); };
  while (size > level.group_rows && tasks() < std::int64_t{8} * threads) size -= level.group_rows;
  while (size > level.lanes && tasks() < threads) size -= level.lanes;
  return static_cast<int>(std::min<std::int64_t>(size, rows));
}

void run(const ForwardParams& p, void* /*stream*/) {
  const Level* level = choice().level;
  if (level == nullptr) {
    throw ArgumentError(ArgumentError::Kind::kUnsupported, choice().error);
  }
  const int threads = flops(p) < kSerialFlops ? 1 : max_threads();
  const std::int64_t heads = std::int64_t{p.batch} * p.heads_kv;
  const std::int64_t rows = std::int64_t{p.heads_q / p.heads_kv} * p.len_q;
  const int rows_per_task = choose_rows_per_task(*level, heads, rows, threads);
  const Call call{.params = p,
                  .rows_per_task = rows_per_task,
                  .tasks_per_head = (rows + rows_per_task - 1) / rows_per_task};
  const std::int64_t tasks = heads * call.tasks_per_head;
  const std::size_t bytes = level->scratch_bytes(call);
  std::atomic<std::int64_t> next = 0;
  run_on_threads(static_cast<int>(std::min<std::int64_t>(threads, tasks)), [&] {
    for (std::int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      level->run_task(call, task, scratch_of_this_thread(bytes));
    }
  });
}

constexpr std::uint32_t bit(DType dtype) { return 1U << static_cast<unsigned>(dtype); }

}  // namespace

const Kernel cpu_kernel = {
    .name = "cpu",
    .title = "FlashAttention-2 on CPU threads and vectors",
    .arithmetic = "float32 multiply-adds; float16, bfloat16: inputs widened, results rounded once",
    .backend = Backend::kCpu,
    .capabilities = {.dtypes = bit(DType::kFloat32) | bit(DType::kFloat16) | bit(DType::kBFloat16),
                     .head_dim_min = 1,
                     .head_dim_max = 256,
                     .head_dim_v_differs = true,
                     .lengths_differ = true,
                     .grouped_heads = true,
                     .causal = true,
                     .window = true},
    .redirect = "",
    .plan = nullptr,
    .run = run,
};

int threads() { return max_threads(); }

std::string_view threading() { return threading_name(); }

std::string_view instruction_set() {
  return choice().level != nullptr ? std::string_view(choice().level->name)
                                   : std::string_view(choice().error);
}

}  // namespace fastattn::cpu
