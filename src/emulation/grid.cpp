#include "emulation/grid.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "cpu/parallel.h"
#include "emulation/emulation.h"
#include "emulation/observer.h"

namespace fastattn::emulation {
namespace {

constexpr std::size_t kSharedAlignment = 128;
// Around the shared memory of a block, so that a stray access meets nothing else.
constexpr std::size_t kSharedMargin = 64 * 1024;

thread_local Thread* running = nullptr;

void enter_thread(void* argument) {
  auto* thread = static_cast<Thread*>(argument);
  const Invocation& invocation = thread->block->invocation();
  invocation.call(invocation.arguments);
  thread->state = ThreadState::kDone;
}

std::string lane_list(unsigned mask) {
  std::string text;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (((mask >> lane) & 1U) == 0) continue;
    int last = lane;
    while (last + 1 < kWarpSize && ((mask >> (last + 1)) & 1U) != 0) ++last;
    if (!text.empty()) text += ", ";
    text += std::to_string(lane);
    if (last > lane) text += "-" + std::to_string(last);
    lane = last;
  }
  return text;
}

const char* name_of(WarpOpKind kind) {
  switch (kind) {
    case WarpOpKind::kShuffle:
      return "a shuffle";
    case WarpOpKind::kBallot:
      return "a vote";
    case WarpOpKind::kLoadMatrices:
    case WarpOpKind::kLoadMatricesTransposed:
      return "ldmatrix";
    case WarpOpKind::kMultiplyF16:
    case WarpOpKind::kMultiplyBF16:
      return "mma";
    case WarpOpKind::kSync:
      break;
  }
  return "__syncwarp";
}

const char* where_is(const Thread& thread) {
  switch (thread.state) {
    case ThreadState::kDone:
      return "has ended";
    case ThreadState::kAtBarrier:
      return "waits at __syncthreads";
    case ThreadState::kAtWarpOp:
      return "waits at another warp instruction";
    case ThreadState::kReady:
      break;
  }
  return "runs";
}

}  // namespace

Thread* current_thread() { return running; }

Block::Block(const LaunchShape& shape, const Invocation& invocation, Observer* observer,
             std::mt19937_64* random)
    : shape_(shape), invocation_(invocation), observer_(observer), random_(random) {
  const auto count = static_cast<int>(shape.block.x * shape.block.y * shape.block.z);
  stacks_.reserve(count);
  for (int i = 0; i < count; ++i) {
    auto& thread = *threads_.emplace_back(std::make_unique<Thread>());
    const auto number = static_cast<unsigned>(i);
    thread.index = {.x = number % shape.block.x,
                    .y = number / shape.block.x % shape.block.y,
                    .z = number / shape.block.x / shape.block.y};
    thread.number = i;
    thread.warp = i / kWarpSize;
    thread.lane = i % kWarpSize;
    thread.stack = stacks_.stack(i);
    thread.block = this;
  }
  warp_order_.resize((count + kWarpSize - 1) / kWarpSize);
  std::iota(warp_order_.begin(), warp_order_.end(), 0);
  lane_order_.resize(kWarpSize);
  std::iota(lane_order_.begin(), lane_order_.end(), 0);
  shared_storage_ =
      std::make_unique<std::byte[]>(kSharedMargin + shape.dynamic_shared_bytes + kSharedMargin);
  auto address = reinterpret_cast<std::uintptr_t>(shared_storage_.get()) + kSharedMargin;
  address -= address % kSharedAlignment;
  shared_ = reinterpret_cast<std::byte*>(address);
}

std::string Block::run(std::int64_t number) {
  number_ = number;
  const auto index = static_cast<std::uint64_t>(number);
  block_index_ = {.x = static_cast<unsigned>(index % shape_.grid.x),
                  .y = static_cast<unsigned>(index / shape_.grid.x % shape_.grid.y),
                  .z = static_cast<unsigned>(index / shape_.grid.x / shape_.grid.y)};
  abandoned_ = false;
  for (const auto& thread : threads_) {
    thread->state = ThreadState::kReady;
    thread->furthest_pc = nullptr;
    thread->copies.clear();
    thread->copy_group = 0;
    thread->fiber.start(thread->stack, StackArena::kStackBytes, enter_thread, thread.get());
  }
  if (observer_ != nullptr) observer_->begin_block(*this);
  std::string failure;
  while (failure.empty()) {
    shuffle_order(warp_order_);
    for (const int warp : warp_order_) {
      while (!abandoned_ && run_warp(warp)) {
      }
    }
    if (abandoned_) return {};
    if (std::ranges::all_of(threads_,
                            [](const auto& each) { return each->state == ThreadState::kDone; })) {
      break;
    }
    failure = settle_barrier();
  }
  if (observer_ != nullptr) observer_->end_block(*this);
  return failure;
}

void Block::shuffle_order(std::vector<int>& order) {
  if (random_ == nullptr) return;
  // Not std::shuffle, which draws differently from one standard library to the next.
  for (std::size_t i = order.size() - 1; i > 0; --i) {
    std::swap(order[i], order[(*random_)() % (i + 1)]);
  }
}

void Block::resume(Thread& thread) {
  running = &thread;
  thread.fiber.resume();
  running = nullptr;
}

bool Block::run_warp(int warp) {
  bool moved = false;
  shuffle_order(lane_order_);
  const int first = warp * kWarpSize;
  for (const int lane : lane_order_) {
    if (first + lane >= thread_count()) continue;
    Thread& thread = *threads_[first + lane];
    if (thread.state != ThreadState::kReady) continue;
    moved = true;
    resume(thread);
    if (abandoned_) return false;
  }
  return moved;
}

void Block::abandon() {
  abandoned_ = true;
  running->fiber.suspend();
  std::abort();  // an abandoned fiber is not resumed
}

int Block::sync_threads(const void* pc, bool vote) {
  Thread& thread = *running;
  thread.barrier_vote = vote;
  // Without an observer the code is optimised, and one barrier may have become two.
  thread.barrier_pc = observer_ != nullptr ? pc : nullptr;
  thread.state = ThreadState::kAtBarrier;
  thread.fiber.suspend();
  return barrier_votes_;
}

// The barrier opens where every thread waits at it.
std::string Block::settle_barrier() {
  const Thread* waiting = nullptr;
  const Thread* ended = nullptr;
  const Thread* elsewhere = nullptr;
  for (const auto& thread : threads_) {
    if (thread->state == ThreadState::kAtWarpOp) return absent_lanes();
    if (thread->state == ThreadState::kDone) {
      ended = thread.get();
    } else if (waiting == nullptr) {
      waiting = thread.get();
    } else if (thread->barrier_pc != waiting->barrier_pc) {
      elsewhere = thread.get();
    }
  }
  if (ended != nullptr || elsewhere != nullptr) {
    const Thread& other = ended != nullptr ? *ended : *elsewhere;
    const std::string message =
        "thread " + std::to_string(waiting->number) + " waits at __syncthreads, thread " +
        std::to_string(other.number) +
        (ended != nullptr ? " has ended" : " waits at another __syncthreads");
    if (observer_ != nullptr) {
      observer_->find("barrier", message, waiting->barrier_pc, number_, waiting->number);
    }
    return message;
  }
  if (observer_ != nullptr) observer_->barrier(*this);
  barrier_votes_ = 0;
  for (const auto& thread : threads_) {
    barrier_votes_ += thread->barrier_vote ? 1 : 0;
    thread->state = ThreadState::kReady;
    thread->furthest_pc = nullptr;
  }
  return {};
}

std::string Block::absent_lanes() const {
  for (const auto& thread : threads_) {
    if (thread->state != ThreadState::kAtWarpOp) continue;
    const int first = thread->warp * kWarpSize;
    for (int lane = 0; lane < kWarpSize; ++lane) {
      if (((thread->op.mask >> lane) & 1U) == 0) continue;
      std::string whereabouts = "does not exist";
      if (first + lane < thread_count()) {
        const Thread& other = *threads_[first + lane];
        if (other.state == ThreadState::kAtWarpOp && other.op.kind == thread->op.kind &&
            other.op.pc == thread->op.pc && other.op.mask == thread->op.mask) {
          continue;
        }
        whereabouts = where_is(other);
      }
      const std::string message = std::string(name_of(thread->op.kind)) + " names lanes " +
                                  lane_list(thread->op.mask) + "; lane " + std::to_string(lane) +
                                  " of warp " + std::to_string(thread->warp) + " " + whereabouts;
      if (observer_ != nullptr) {
        observer_->find("warp", message, thread->op.pc, number_, thread->number);
      }
      return message;
    }
  }
  return "threads wait for each other";
}

std::uint64_t Block::warp_op(const WarpOp& op) {
  Thread& thread = *running;
  thread.op = op;
  if (observer_ == nullptr) thread.op.pc = nullptr;  // likewise
  if (((op.mask >> thread.lane) & 1U) == 0) {
    if (observer_ != nullptr) {
      observer_->find("warp",
                      std::string(name_of(op.kind)) + " names lanes " + lane_list(op.mask) +
                          ", and lane " + std::to_string(thread.lane) + " calls it",
                      op.pc, number_, thread.number);
    }
    return op.value;
  }
  thread.state = ThreadState::kAtWarpOp;
  std::vector<Thread*>& lanes = waiting_lanes_;
  lanes.clear();
  // From the last: where lanes come in their order, all but that one have but one to look at.
  for (int lane = kWarpSize - 1; lane >= 0; --lane) {
    if (((op.mask >> lane) & 1U) == 0) continue;
    const int number = thread.warp * kWarpSize + lane;
    Thread* other = number < thread_count() ? threads_[number].get() : nullptr;
    if (other == nullptr || other->state != ThreadState::kAtWarpOp ||
        other->op.kind != thread.op.kind || other->op.pc != thread.op.pc ||
        other->op.mask != thread.op.mask) {
      thread.fiber.suspend();  // a later lane finishes the instruction
      return thread.op.result;
    }
    lanes.push_back(other);
  }
  std::ranges::reverse(lanes);
  finish_warp_op(lanes);
  return thread.op.result;
}

void Block::finish_warp_op(const std::vector<Thread*>& lanes) {
  const WarpOp& op = lanes.front()->op;
  const int first = lanes.front()->warp * kWarpSize;
  std::uint64_t votes = 0;
  for (const Thread* each : lanes) votes |= (each->op.value & 1U) << each->lane;
  for (Thread* each : lanes) {
    each->state = ThreadState::kReady;
    each->furthest_pc = nullptr;
    if (op.kind == WarpOpKind::kBallot) {
      each->op.result = votes;
    } else if (op.kind == WarpOpKind::kShuffle) {
      const int source = each->op.source_lane;
      if (((op.mask >> source) & 1U) != 0) {
        each->op.result = threads_[first + source]->op.value;
      } else {
        each->op.result = each->op.value;
        if (observer_ != nullptr) {
          observer_->find("warp",
                          "lane " + std::to_string(each->lane) + " reads from lane " +
                              std::to_string(source) + ", which is not among the lanes " +
                              lane_list(op.mask),
                          op.pc, number_, each->number);
        }
      }
    }
  }
  if (observer_ != nullptr) observer_->warp_op(lanes);
  switch (op.kind) {
    case WarpOpKind::kLoadMatrices:
    case WarpOpKind::kLoadMatricesTransposed:
      load_matrices(lanes);
      break;
    case WarpOpKind::kMultiplyF16:
    case WarpOpKind::kMultiplyBF16: {
      std::array<const MmaOperands*, kWarpSize> operands;
      for (int lane = 0; lane < kWarpSize; ++lane) operands[lane] = lanes[lane]->op.operands;
      multiply_matrices(op.kind == WarpOpKind::kMultiplyF16 ? HalfType::kF16 : HalfType::kBF16,
                        operands);
      break;
    }
    case WarpOpKind::kSync:
    case WarpOpKind::kShuffle:
    case WarpOpKind::kBallot:
      break;
  }
}

// All lanes are there. Each row is read in the name of the lane that gives its address.
void Block::load_matrices(const std::vector<Thread*>& lanes) {
  constexpr int kRows = 8;
  std::array<std::array<std::uint16_t, kRows>, kWarpSize> rows;
  for (Thread* each : lanes) {
    if (observer_ != nullptr &&
        !observer_->load_row(*each, each->op.row, sizeof(rows[0]), each->op.pc)) {
      abandon();
    }
    std::memcpy(rows[each->lane].data(), each->op.row, sizeof(rows[0]));
  }
  const bool transposed = lanes.front()->op.kind == WarpOpKind::kLoadMatricesTransposed;
  for (Thread* each : lanes) {
    const int outer = each->lane / 4;
    const int inner = 2 * (each->lane % 4);
    for (int matrix = 0; matrix < 4; ++matrix) {
      const auto* from = &rows[matrix * kRows];
      const unsigned low = transposed ? from[inner][outer] : from[outer][inner];
      const unsigned high = transposed ? from[inner + 1][outer] : from[outer][inner + 1];
      each->op.registers[matrix] = high << 16U | low;
    }
  }
}

namespace {

thread_local Pause pause_between_blocks = nullptr;

// Calls the pause of the thread that it was made on.
class Pauses {
 public:
  void offer() {
    if (pause_ == nullptr || Clock::now() < next_) return;
    pause_();
    next_ = Clock::now() + std::chrono::milliseconds(100);
  }

 private:
  using Clock = std::chrono::steady_clock;
  Pause pause_ = pause_between_blocks;
  Clock::time_point next_ = Clock::now() + std::chrono::milliseconds(100);
};

// One Block per OS thread, all of them taking the next number until none is left.
void run_parallel(const LaunchShape& shape, const Invocation& invocation, std::int64_t blocks) {
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> failed{false};
  cpu::run_on_threads(static_cast<int>(std::min<std::int64_t>(blocks, cpu::max_threads())), [&] {
    if (next.load() >= blocks) return;
    Block block(shape, invocation, nullptr, nullptr);
    Pauses pauses;
    try {
      for (std::int64_t number = next++; number < blocks && !failed; number = next++) {
        pauses.offer();
        const std::string failure = block.run(number);
        if (failure.empty()) continue;
        throw std::runtime_error("block " + std::to_string(number) + ": " + failure);
      }
    } catch (...) {
      failed = true;  // the other threads need not go on
      throw;
    }
  });
}

}  // namespace

Pause set_pause(Pause pause) { return std::exchange(pause_between_blocks, pause); }

void run_grid(const LaunchShape& shape, const Invocation& invocation) {
  const std::int64_t blocks = static_cast<std::int64_t>(shape.grid.x) * shape.grid.y *
                              static_cast<std::int64_t>(shape.grid.z);
  Observer* observer = current_observer();
  if (observer == nullptr) {
    run_parallel(shape, invocation, blocks);
    return;
  }
  observer->begin_launch(shape, invocation);
  Block block(shape, invocation, observer, &observer->random());
  Pauses pauses;
  for (std::int64_t number = 0; number < blocks && !observer->stopped(); ++number) {
    pauses.offer();
    if (!block.run(number).empty()) observer->stop();
  }
}

}  // namespace fastattn::emulation
