// How a grid runs on the host: block after block, the threads of a block as fibers. A thread runs
// until it meets a barrier or a warp instruction that other threads have yet to reach.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "emulation/fiber.h"
#include "emulation/tensor_core.h"

namespace fastattn::emulation {

inline constexpr int kWarpSize = 32;
inline constexpr int kMaxThreads = 1024;  // per block

struct Index3 {
  unsigned x = 0;
  unsigned y = 0;
  unsigned z = 0;
};

enum class WarpOpKind : std::uint8_t {
  kSync,
  kShuffle,
  kBallot,
  kLoadMatrices,
  kLoadMatricesTransposed,
  kMultiplyF16,
  kMultiplyBF16,
};

// A warp instruction as one lane issues it.
struct WarpOp {
  WarpOpKind kind = WarpOpKind::kSync;
  unsigned mask = 0;
  const void* pc = nullptr;  // null where instructions are not told apart by their place
  std::uint64_t value = 0;   // what the lane gives
  int source_lane = 0;       // shuffle: the lane to read from
  std::uint64_t result = 0;
  const std::byte* row = nullptr;         // ldmatrix: that the lane gives,
  unsigned* registers = nullptr;          // and what it gets, 4 of them
  const MmaOperands* operands = nullptr;  // mma
};

enum class ThreadState : std::uint8_t { kReady, kAtWarpOp, kAtBarrier, kDone };

// A copy that a thread has started and not yet waited for.
struct PendingCopy {
  std::byte* target;
  const std::byte* source;
  int bytes;  // of which the first `valid` are read, and the rest are 0
  int valid;
  int group;  // counted by commits
  const void* pc;
};

// One thread of the block that runs. In a debugger: `p *current_block->threads_[37]`.
struct Thread {
  Index3 index;  // threadIdx
  int number = 0;
  int warp = 0;
  int lane = 0;
  ThreadState state = ThreadState::kDone;
  const void* barrier_pc = nullptr;
  bool barrier_vote = false;
  WarpOp op;
  // That it went through since its last access, or since it last met others (checked build).
  const void* furthest_pc = nullptr;
  std::vector<PendingCopy> copies;
  int copy_group = 0;  // that the next copy belongs to
  std::byte* stack = nullptr;
  class Block* block = nullptr;
  Fiber fiber;
};

struct LaunchShape {
  Index3 grid{1, 1, 1};
  Index3 block{1, 1, 1};
  std::size_t dynamic_shared_bytes = 0;
};

// The kernel with its arguments, as the launch packs them.
struct Invocation {
  const void* kernel = nullptr;
  void (*call)(const void* arguments) = nullptr;
  const void* arguments = nullptr;
  std::size_t argument_bytes = 0;
};

class Observer;

// The threads, the shared memory and the scheduler of one block at a time.
class Block {
 public:
  // `observer` may be null. With `random`, threads run in its order, else in theirs.
  Block(const LaunchShape& shape, const Invocation& invocation, Observer* observer,
        std::mt19937_64* random);

  // Runs block `number` of the grid to its end. Returns why it could not end; empty: it did.
  std::string run(std::int64_t number);

  // For the thread that runs.
  int sync_threads(const void* pc, bool vote);  // returns how many threads voted for it
  std::uint64_t warp_op(const WarpOp& op);
  [[noreturn]] void abandon();  // stops the whole block where it stands

  [[nodiscard]] const LaunchShape& shape() const { return shape_; }
  [[nodiscard]] Index3 block_index() const { return block_index_; }
  [[nodiscard]] std::int64_t number() const { return number_; }
  [[nodiscard]] std::byte* shared() const { return shared_; }
  [[nodiscard]] const Invocation& invocation() const { return invocation_; }
  [[nodiscard]] Observer* observer() const { return observer_; }
  [[nodiscard]] const Thread& thread(int number) const { return *threads_[number]; }
  [[nodiscard]] int thread_count() const { return static_cast<int>(threads_.size()); }

 private:
  void resume(Thread& thread);
  bool run_warp(int warp);  // until all of its lanes wait or are done; true: one of them moved
  void finish_warp_op(const std::vector<Thread*>& lanes);
  void load_matrices(const std::vector<Thread*>& lanes);
  std::string settle_barrier();
  std::string absent_lanes() const;
  void shuffle_order(std::vector<int>& order);

  LaunchShape shape_;
  Invocation invocation_;
  Observer* observer_;
  std::mt19937_64* random_;
  Index3 block_index_;
  std::int64_t number_ = 0;
  bool abandoned_ = false;
  int barrier_votes_ = 0;  // at the last barrier that opened
  StackArena stacks_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<int> warp_order_;
  std::vector<int> lane_order_;
  std::vector<Thread*> waiting_lanes_;
  std::unique_ptr<std::byte[]> shared_storage_;
  std::byte* shared_ = nullptr;
};

// The thread that runs on this OS thread; null outside of a kernel.
Thread* current_thread();

// Runs all blocks. Throws std::runtime_error for a block that can't end, and what the calling
// thread's pause throws.
void run_grid(const LaunchShape& shape, const Invocation& invocation);

}  // namespace fastattn::emulation
