// What goes wrong in kernels, a kernel for each. Compiled as a checked build, never for a GPU.
#include "emulation/broken.h"

#include "cuda/launch/launch.cuh"
#include "cuda/launch/shared.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"

namespace fastattn::cuda {
namespace {

constexpr unsigned kAllLanes = 0xffffffffU;

// Thread t takes the value of thread 63 - t, which is in the other warp.
__global__ void race_between_warps(const float* input, float* output) {
  float* shared = dynamic_shared<float>();
  shared[threadIdx.x] = input[threadIdx.x];
  output[threadIdx.x] = shared[63 - threadIdx.x];  // race_between_warps
}

// The same within a warp, where a shuffle is no barrier for memory.
__global__ void race_within_a_warp(const float* input, float* output) {
  float* shared = dynamic_shared<float>();
  shared[threadIdx.x] = input[threadIdx.x];
  const float mine = __shfl_xor_sync(kAllLanes, input[threadIdx.x], 1);
  output[threadIdx.x] = mine + shared[threadIdx.x ^ 1];  // race_within_a_warp
}

// A barrier of the warp does not hold the other warp.
__global__ void syncwarp_is_no_syncthreads(const float* input, float* output) {
  float* shared = dynamic_shared<float>();
  shared[threadIdx.x] = input[threadIdx.x];
  __syncwarp();
  output[threadIdx.x] = shared[63 - threadIdx.x];  // syncwarp_is_no_syncthreads
}

// The next round overwrites what slower threads still read: a barrier is missing at the loop's end.
__global__ void overwritten_while_read(const float* input, float* output) {
  float* shared = dynamic_shared<float>();
  float sum = 0.0F;
  for (int round = 0; round < 2; ++round) {
    shared[threadIdx.x] = input[threadIdx.x] + round;  // overwritten_while_read
    __syncthreads();
    sum += shared[63 - threadIdx.x];
  }
  output[threadIdx.x] = sum;
}

__global__ void two_values_for_one_word(const float* input, float* output) {
  float* shared = dynamic_shared<float>();
  shared[threadIdx.x / 2] = input[threadIdx.x];  // two_values_for_one_word
  __syncthreads();
  output[threadIdx.x] = shared[threadIdx.x / 2];
}

__global__ void blocks_share_a_result(const float* input, float* output) {
  output[threadIdx.x] += input[threadIdx.x];  // blocks_share_a_result
}

__global__ void barrier_in_a_branch(const float* input, float* output) {
  if (threadIdx.x < 32) {
    __syncthreads();  // barrier_in_a_branch
  }
  output[threadIdx.x] = input[threadIdx.x];
}

__global__ void two_barriers_at_once(const float* input, float* output) {
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  output[threadIdx.x] = input[threadIdx.x];
}

__global__ void shuffle_without_a_lane(const float* input, float* output) {
  float value = input[threadIdx.x];
  if (threadIdx.x % 32 < 31) {
    value = __shfl_down_sync(kAllLanes, value, 1);  // shuffle_without_a_lane
  }
  output[threadIdx.x] = value;
}

__global__ void shuffle_by_an_unnamed_lane(const float* input, float* output) {
  output[threadIdx.x] =
      __shfl_xor_sync(0x7fffffffU, input[threadIdx.x], 0);  // shuffle_by_an_unnamed_lane
}

__global__ void shuffle_from_an_unnamed_lane(const float* input, float* output) {
  float value = input[threadIdx.x];
  if (threadIdx.x % 32 < 16) {
    value = __shfl_xor_sync(0xffffU, value, 16);  // shuffle_from_an_unnamed_lane
  }
  output[threadIdx.x] = value;
}

__global__ void syncwarp_without_a_lane(const float* input, float* output) {
  if (threadIdx.x % 32 != 5) {
    __syncwarp();  // syncwarp_without_a_lane
  }
  output[threadIdx.x] = input[threadIdx.x];
}

__global__ void past_the_input(const float* input, float* output) {
  output[threadIdx.x] = input[threadIdx.x + 1];  // past_the_input
}

__global__ void before_the_output(const float* input, float* output) {
  output[static_cast<int>(threadIdx.x) - 1] = input[threadIdx.x];  // before_the_output
}

__global__ void far_away(const float* input, float* output) {
  const float* nowhere = nullptr;
  output[threadIdx.x] = input[threadIdx.x] + nowhere[threadIdx.x];  // far_away
}

__global__ void writes_the_input(const float* input, float* output) {
  const_cast<float*>(input)[threadIdx.x] = 0.0F;  // writes_the_input
  output[threadIdx.x] = 0.0F;
}

__global__ void past_dynamic_shared_memory(const float* input, float* output) {
  float* shared = dynamic_shared<float>();
  shared[threadIdx.x + 1] = input[threadIdx.x];  // past_dynamic_shared_memory
  __syncthreads();
  output[threadIdx.x] = shared[threadIdx.x];
}

__global__ void past_a_static_array(const float* input, float* output) {
  __shared__ float tile[64];
  tile[threadIdx.x + 1] = input[threadIdx.x];  // past_a_static_array
  __syncthreads();
  output[threadIdx.x] = tile[threadIdx.x];
}

// In bounds of the shared memory, but of another member of it.
__global__ void into_the_next_member(const float* input, float* output) {
  struct SharedStorage {
    float first[32];
    float second[32];
  };
  SharedStorage& s = *dynamic_shared<SharedStorage>();
  s.first[threadIdx.x] = input[threadIdx.x];  // into_the_next_member
  __syncthreads();
  output[threadIdx.x] = s.first[threadIdx.x];
}

__global__ void past_a_register_array(const float* input, float* output) {
  float values[4];
  for (int i = 0; i < 4; ++i) values[i] = input[threadIdx.x];
  output[threadIdx.x] = values[threadIdx.x % 5];  // past_a_register_array
}

__global__ void uninitialised_shared_memory(const float* input, float* output) {
  float* shared = dynamic_shared<float>();
  if (threadIdx.x % 8 != 0) shared[threadIdx.x] = input[threadIdx.x];
  __syncthreads();
  output[threadIdx.x] = shared[threadIdx.x];  // uninitialised_shared_memory
}

// Memory of the last block, which this one must not count on.
__global__ void shared_memory_of_the_last_block(const float* input, float* output) {
  float* shared = dynamic_shared<float>();
  if (blockIdx.x == 0) shared[threadIdx.x] = input[threadIdx.x];
  __syncthreads();
  const float value = shared[threadIdx.x];  // shared_memory_of_the_last_block
  if (blockIdx.x == 1) output[threadIdx.x] = value;
}

// GCC puts the statics of templates elsewhere than others.
template <int kSize>
__global__ void race_in_a_template(const float* input, float* output) {
  __shared__ float tile[kSize];
  tile[threadIdx.x] = input[threadIdx.x];
  output[threadIdx.x] = tile[63 - threadIdx.x];  // race_in_a_template
}

__global__ void misaligned_vector(const float* input, float* output) {
  if (threadIdx.x >= 8) return;
  const float4 value =
      *reinterpret_cast<const float4*>(input + 4 * threadIdx.x + 1);  // misaligned_vector
  output[threadIdx.x] = value.x;
}

__global__ void reads_what_others_update(const float* input, float* output) {
  float* shared = dynamic_shared<float>();
  if (threadIdx.x == 0) shared[0] = 0.0F;
  __syncthreads();
  atomicAdd(&shared[0], input[threadIdx.x]);
  output[threadIdx.x] = shared[0];  // reads_what_others_update
}

__global__ void waits_for_a_flag(const float* input, float* output) {
  volatile float* shared = dynamic_shared<float>();
  shared[threadIdx.x] = 0.0F;
  __syncthreads();
  if (threadIdx.x != 33) {
    while (shared[0] == 0.0F) {  // waits_for_a_flag
    }
  }
  output[threadIdx.x] = input[threadIdx.x];
}

// A barrier waits for threads, not for their asynchronous copies.
__global__ void copy_not_waited_for(const float* input, float* output) {
  float* shared = dynamic_shared<float>();
  ptx::cp_async<4>(shared + threadIdx.x, input + threadIdx.x, 4);
  ptx::cp_async_commit_group();
  __syncthreads();
  output[threadIdx.x] = shared[63 - threadIdx.x];  // copy_not_waited_for
}

// A ring of two pieces, where a wait for all but the latest two groups waits for neither.
__global__ void waits_for_one_group_too_few(const float* input, float* output) {
  float* shared = dynamic_shared<float>();
  float sum = 0.0F;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int piece = 0; piece < 3; ++piece) {
    if (piece < 2 && threadIdx.x < 32) {
      ptx::cp_async<4>(shared + 32 * piece + lane, input + lane, 4);
    }
    ptx::cp_async_commit_group();
    if (piece == 0) continue;
    ptx::cp_async_wait_group<2>();  // should be 1
    __syncthreads();
    sum += shared[32 * (piece - 1) + 31 - lane];  // waits_for_one_group_too_few
    __syncthreads();
  }
  output[threadIdx.x] = sum;
}

// It may write at once, and slower threads still read: it must start behind the barrier.
__global__ void copy_into_what_is_read(const float* input, float* output) {
  float* shared = dynamic_shared<float>();
  shared[threadIdx.x] = input[threadIdx.x];
  __syncthreads();
  const float value = shared[63 - threadIdx.x];
  ptx::cp_async<4>(shared + threadIdx.x, input + threadIdx.x, 4);  // copy_into_what_is_read
  ptx::cp_async_commit_group();
  __syncthreads();
  ptx::cp_async_wait_group<0>();
  output[threadIdx.x] = value + shared[threadIdx.x];
}

__global__ void copy_to_global_memory(const float* input, float* output) {
  ptx::cp_async<4>(output + threadIdx.x, input + threadIdx.x, 4);  // copy_to_global_memory
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
}

__global__ void misaligned_matrix_row(const float* input, float* output) {
  float* shared = dynamic_shared<float>();
  shared[threadIdx.x] = input[threadIdx.x];
  __syncthreads();
  unsigned r[4];
  ptx::ldmatrix_x4(r, shared + 4 * (threadIdx.x % 8) + 1);  // misaligned_matrix_row
  output[threadIdx.x] = __uint_as_float(r[0]);
}

__global__ void matrix_row_in_global_memory(const float* input, float* output) {
  unsigned r[4];
  ptx::ldmatrix_x4(r, input + 4 * (threadIdx.x % 16));  // matrix_row_in_global_memory
  output[threadIdx.x] = __uint_as_float(r[0]);
}

// Its own rows are ordered by the barrier of the warp, those of the other warp by nothing.
__global__ void matrix_before_the_barrier(const float* input, float* output) {
  float* shared = dynamic_shared<float>();
  shared[threadIdx.x] = input[threadIdx.x];
  __syncwarp();
  unsigned r[4];
  ptx::ldmatrix_x4(r, shared + 4 * (threadIdx.x % 16));  // matrix_before_the_barrier
  output[threadIdx.x] = __uint_as_float(r[0]);
}

__global__ void matrix_overwritten_while_read(const float* input, float* output) {
  float* shared = dynamic_shared<float>();
  float sum = 0.0F;
  for (int round = 0; round < 2; ++round) {
    shared[threadIdx.x] = input[threadIdx.x] + round;  // matrix_overwritten_while_read
    __syncthreads();
    unsigned r[4];
    ptx::ldmatrix_x4_trans(r, shared + 4 * (threadIdx.x % 16));
    sum += __uint_as_float(r[0]);
  }
  output[threadIdx.x] = sum;
}

__global__ void matrix_not_waited_for(const float* input, float* output) {
  float* shared = dynamic_shared<float>();
  if (threadIdx.x < 16) ptx::cp_async<16>(shared + 4 * threadIdx.x, input + 4 * threadIdx.x, 16);
  ptx::cp_async_commit_group();
  __syncthreads();
  unsigned r[4];
  ptx::ldmatrix_x4(r, shared + 4 * (threadIdx.x % 16));  // matrix_not_waited_for
  output[threadIdx.x] = __uint_as_float(r[0]);
}

__global__ void matrix_without_a_lane(const float* input, float* output) {
  float* shared = dynamic_shared<float>();
  shared[threadIdx.x] = input[threadIdx.x];
  __syncthreads();
  unsigned r[4] = {};
  if (threadIdx.x % 32 < 16) {
    ptx::ldmatrix_x4(r, shared + 4 * (threadIdx.x % 16));  // matrix_without_a_lane
  }
  output[threadIdx.x] = __uint_as_float(r[0]);
}

__global__ void product_without_a_lane(const float* input, float* output) {
  const unsigned a[4] = {__float_as_uint(input[threadIdx.x])};
  float d[4];
  if (threadIdx.x % 32 != 7) {
    ptx::mma_m16n8k16_f16_zero(d, a, a[0], a[1]);  // product_without_a_lane
  }
  output[threadIdx.x] = d[0];
}

__global__ void sums_up_nothing(const float* input, float* output) {
  output[threadIdx.x] += input[threadIdx.x];  // sums_up_nothing
}

template <auto kKernel, int kBlocks = 1>
void run(const float* input, float* output) {
  launch<kKernel>({.blocks = kBlocks, .threads = 64, .dynamic_shared_bytes = 64 * sizeof(float)},
                  nullptr, input, output);
}

#define BROKEN(name, kind, says) {#name, kind, says, run<name>}
constexpr testing::BrokenKernel kBroken[] = {
    BROKEN(race_between_warps, "race", "wrote with no barrier between"),
    BROKEN(race_within_a_warp, "race", "wrote with no barrier between"),
    BROKEN(syncwarp_is_no_syncthreads, "race", "wrote with no barrier between"),
    BROKEN(overwritten_while_read, "race", "read with no barrier between"),
    BROKEN(two_values_for_one_word, "race", "writes 4 bytes"),
    {"blocks_share_a_result", "race", "another block wrote", run<blocks_share_a_result, 2>},
    BROKEN(barrier_in_a_branch, "barrier", "has ended"),
    BROKEN(two_barriers_at_once, "barrier", "waits at another __syncthreads"),
    BROKEN(shuffle_without_a_lane, "warp", "lane 31 of warp"),
    BROKEN(shuffle_by_an_unnamed_lane, "warp", "names lanes 0-30, and lane 31 calls it"),
    BROKEN(shuffle_from_an_unnamed_lane, "warp", "which is not among the lanes 0-15"),
    BROKEN(syncwarp_without_a_lane, "warp", "lane 5 of warp"),
    BROKEN(past_the_input, "out of range", "1 byte past the last byte of input (256 bytes)"),
    BROKEN(before_the_output, "out of range", "4 bytes before the start of output"),
    BROKEN(far_away, "out of range", "at an address that is no argument's"),
    BROKEN(writes_the_input, "out of range", "of input, which is only read"),
    BROKEN(past_dynamic_shared_memory, "out of range", "past the last byte of shared memory"),
    BROKEN(past_a_static_array, "out of range", "element 64 of an array"),
    BROKEN(into_the_next_member, "out of range", "of an array that has no such element"),
    BROKEN(past_a_register_array, "out of range", "element 4 of an array"),
    BROKEN(uninitialised_shared_memory, "uninitialised", "shared memory, which nothing wrote"),
    {"shared_memory_of_the_last_block", "uninitialised", "which nothing wrote",
     run<shared_memory_of_the_last_block, 2>},
    {"race_in_a_template", "race", "wrote with no barrier between", run<race_in_a_template<64>>},
    BROKEN(misaligned_vector, "misaligned", "which is no multiple of 16"),
    BROKEN(reads_what_others_update, "race", "which several threads updated"),
    BROKEN(waits_for_a_flag, "barrier", "accesses without a barrier"),
    BROKEN(copy_not_waited_for, "uninitialised", "the copy to it is not waited for"),
    BROKEN(waits_for_one_group_too_few, "uninitialised", "the copy to it is not waited for"),
    BROKEN(copy_into_what_is_read, "race", "read with no barrier between"),
    BROKEN(copy_to_global_memory, "out of range", "takes shared memory alone"),
    BROKEN(misaligned_matrix_row, "misaligned", "which is no multiple of 16"),
    BROKEN(matrix_row_in_global_memory, "out of range", "takes shared memory alone"),
    BROKEN(matrix_before_the_barrier, "race", "wrote with no barrier between"),
    BROKEN(matrix_overwritten_while_read, "race", "read with no barrier between"),
    BROKEN(matrix_not_waited_for, "uninitialised", "the copy to it is not waited for"),
    BROKEN(matrix_without_a_lane, "warp", "ldmatrix names lanes 0-31; lane 16 of warp"),
    BROKEN(product_without_a_lane, "warp", "mma names lanes 0-31; lane 7 of warp"),
    BROKEN(sums_up_nothing, "uninitialised", "of output, which nothing wrote"),
};
#undef BROKEN

}  // namespace

std::span<const testing::BrokenKernel> broken_kernels() { return kBroken; }

}  // namespace fastattn::cuda
