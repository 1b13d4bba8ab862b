// What <cuda_runtime.h> of the emulation declares.
#include <cuda_runtime.h>

#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "emulation/gpu.h"
#include "emulation/grid.h"
#include "emulation/guarded_memory.h"
#include "emulation/observer.h"

// Where the caller's instruction is; the intrinsics are inlined into kernels for this.
#define FASTATTN_CALLER __builtin_extract_return_addr(__builtin_return_address(0))

namespace fastattn::emulation {
namespace {

constexpr unsigned kAllLanes = 0xffffffffU;

uint3 to_uint3(Index3 index) { return {index.x, index.y, index.z}; }
Index3 to_index3(dim3 size) { return {.x = size.x, .y = size.y, .z = size.z}; }

// A launch's scratch is allocated and freed by the thread that launches.
using Allocation = std::unique_ptr<GuardedMemory>;
std::vector<Allocation>& allocations() {
  thread_local std::vector<Allocation> all;
  return all;
}

}  // namespace

uint3 thread_index() { return to_uint3(current_thread()->index); }
uint3 block_index() { return to_uint3(current_thread()->block->block_index()); }
uint3 block_dim() { return to_uint3(current_thread()->block->shape().block); }
uint3 grid_dim() { return to_uint3(current_thread()->block->shape().grid); }
int lane_index() { return current_thread()->lane; }
void* dynamic_shared_memory() { return current_thread()->block->shared(); }

int sync_threads(bool vote) { return current_thread()->block->sync_threads(FASTATTN_CALLER, vote); }

void sync_warp(unsigned mask) {
  current_thread()->block->warp_op(
      {.kind = WarpOpKind::kSync, .mask = mask, .pc = FASTATTN_CALLER});
}

std::uint64_t shuffle(unsigned mask, std::uint64_t value, int source_lane) {
  return current_thread()->block->warp_op({.kind = WarpOpKind::kShuffle,
                                           .mask = mask,
                                           .pc = FASTATTN_CALLER,
                                           .value = value,
                                           .source_lane = source_lane});
}

unsigned ballot(unsigned mask, bool vote) {
  return static_cast<unsigned>(
      current_thread()->block->warp_op({.kind = WarpOpKind::kBallot,
                                        .mask = mask,
                                        .pc = FASTATTN_CALLER,
                                        .value = static_cast<std::uint64_t>(vote)}));
}

void load_matrices(unsigned* registers, const void* row, bool transposed) {
  current_thread()->block->warp_op(
      {.kind = transposed ? WarpOpKind::kLoadMatricesTransposed : WarpOpKind::kLoadMatrices,
       .mask = kAllLanes,
       .pc = FASTATTN_CALLER,
       .row = static_cast<const std::byte*>(row),
       .registers = registers});
}

void multiply_f16(float* d, const unsigned* a, unsigned b0, unsigned b1) {
  const MmaOperands operands{.d = d, .a = a, .b = {b0, b1}};
  current_thread()->block->warp_op({.kind = WarpOpKind::kMultiplyF16,
                                    .mask = kAllLanes,
                                    .pc = FASTATTN_CALLER,
                                    .operands = &operands});
}

void multiply_bf16(float* d, const unsigned* a, unsigned b0, unsigned b1) {
  const MmaOperands operands{.d = d, .a = a, .b = {b0, b1}};
  current_thread()->block->warp_op({.kind = WarpOpKind::kMultiplyBF16,
                                    .mask = kAllLanes,
                                    .pc = FASTATTN_CALLER,
                                    .operands = &operands});
}

void count_exponential() {
  if (Observer* observer = current_thread()->block->observer()) observer->exponential();
}

void copy_later(void* shared, const void* global, int bytes, int valid) {
  Thread& thread = *current_thread();
  // The copy itself is made as late as can be; what it overwrites is gone from now on.
  Observer* observer = thread.block->observer();
  if (observer != nullptr &&
      !observer->copy_begins(thread, reinterpret_cast<std::uintptr_t>(shared),
                             static_cast<std::size_t>(bytes), FASTATTN_CALLER)) {
    thread.block->abandon();
  }
  thread.copies.push_back({.target = static_cast<std::byte*>(shared),
                           .source = static_cast<const std::byte*>(global),
                           .bytes = bytes,
                           .valid = valid,
                           .group = thread.copy_group,
                           .pc = FASTATTN_CALLER});
}

void commit_copies() { ++current_thread()->copy_group; }

void finish_copies(int groups_left) {
  Thread& thread = *current_thread();
  Observer* observer = thread.block->observer();
  const int first_left = thread.copy_group - groups_left;
  for (const PendingCopy& copy : thread.copies) {
    if (copy.group >= first_left) break;
    const auto see = [&](const std::byte* address, int bytes, Access kind) {
      return bytes == 0 || observer->access(thread, reinterpret_cast<std::uintptr_t>(address),
                                            static_cast<std::size_t>(bytes), kind, copy.pc,
                                            static_cast<std::size_t>(copy.bytes));
    };
    if (observer != nullptr && (!see(copy.source, copy.valid, Access::kRead) ||
                                !see(copy.target, copy.bytes, Access::kWrite))) {
      thread.block->abandon();
    }
    std::memcpy(copy.target, copy.source, static_cast<std::size_t>(copy.valid));
    std::memset(copy.target + copy.valid, 0, static_cast<std::size_t>(copy.bytes - copy.valid));
  }
  std::erase_if(thread.copies,
                [first_left](const PendingCopy& copy) { return copy.group < first_left; });
}

void atomic_read(const void* address, std::size_t bytes, void* value) {
  Thread& thread = *current_thread();
  if (Observer* observer = thread.block->observer()) {
    if (!observer->access(thread, reinterpret_cast<std::uintptr_t>(address), bytes, Access::kAtomic,
                          FASTATTN_CALLER, bytes)) {
      thread.block->abandon();
    }
  }
  if (bytes == sizeof(std::uint64_t)) {
    __atomic_load(static_cast<const std::uint64_t*>(address), static_cast<std::uint64_t*>(value),
                  __ATOMIC_RELAXED);
  } else {
    __atomic_load(static_cast<const std::uint32_t*>(address), static_cast<std::uint32_t*>(value),
                  __ATOMIC_RELAXED);
  }
}

bool atomic_replace(void* address, std::size_t bytes, void* expected, const void* wanted) {
  if (bytes == sizeof(std::uint64_t)) {
    std::uint64_t value = 0;
    std::memcpy(&value, wanted, sizeof(value));
    return __atomic_compare_exchange_n(static_cast<std::uint64_t*>(address),
                                       static_cast<std::uint64_t*>(expected), value, false,
                                       __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }
  std::uint32_t value = 0;
  std::memcpy(&value, wanted, sizeof(value));
  return __atomic_compare_exchange_n(static_cast<std::uint32_t*>(address),
                                     static_cast<std::uint32_t*>(expected), value, false,
                                     __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

cudaError_t cudaMallocAsync(void** pointer, std::size_t bytes, cudaStream_t) {
  try {
    Allocation& allocation = allocations().emplace_back(std::make_unique<GuardedMemory>(bytes));
    *pointer = allocation->data();
  } catch (const std::bad_alloc&) {
    return cudaErrorMemoryAllocation;
  }
  if (Observer* observer = current_observer()) {
    observer->add_region({"scratch memory", *pointer, bytes, true, false});
  }
  return cudaSuccess;
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) {
  if (Observer* observer = current_observer()) observer->remove_region(pointer);
  std::erase_if(allocations(),
                [pointer](const Allocation& each) { return each->data() == pointer; });
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  *free_bytes = 0;
  *total_bytes = 0;
  return cudaSuccess;
}

int code_architecture() { return kGpus.at(current_gpu()).compute_capability; }

const char* cudaGetErrorName(cudaError_t status) {
  switch (status) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    default:
      return "cudaErrorInvalidValue";
  }
}

const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaErrorMemoryAllocation ? "out of memory" : "invalid launch";
}

cudaError_t launch_grid(const cudaLaunchConfig_t& config, const void* kernel,
                        void (*call)(const void* arguments), const void* arguments,
                        std::size_t argument_bytes) {
  const LaunchShape shape{.grid = to_index3(config.gridDim),
                          .block = to_index3(config.blockDim),
                          .dynamic_shared_bytes = config.dynamicSmemBytes};
  const std::uint64_t threads =
      std::uint64_t{shape.block.x} * shape.block.y * std::uint64_t{shape.block.z};
  if (threads < 1 || threads > kMaxThreads || shape.grid.x < 1 || shape.grid.y < 1 ||
      shape.grid.z < 1) {
    return cudaErrorInvalidConfiguration;
  }
  if (shape.dynamic_shared_bytes > kGpus.at(current_gpu()).shared_bytes_per_block) {
    return cudaErrorInvalidValue;
  }
  run_grid(
      shape,
      {.kernel = kernel, .call = call, .arguments = arguments, .argument_bytes = argument_bytes});
  return cudaSuccess;
}

}  // namespace fastattn::emulation
