// The variants of one build behind a C interface, which run.py calls through ctypes.
#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>

#include "cuda/check.cuh"
#include "fastattn/fastattn.h"
#include "launch_observer.cuh"

namespace fastattn {

// Of src/core this library takes the errors alone; launch.cuh names the build in one of them.
BuildInfo build_info() {
  return {.version = FASTATTN_VERSION,
          .cuda = true,
          .cuda_toolkit = "",
          .cuda_archs = V4_STEPS_ARCH,
          .threading = "",
          .cpu_instruction_set = ""};
}

namespace cuda {
// Each variant was compiled with its own name in place of the rung's.
#define V4_STEP(name) extern const Kernel name;
#include "steps.def"
#undef V4_STEP
}  // namespace cuda

namespace v4_steps {
namespace {

constexpr std::array kSteps = {
#define V4_STEP(name) &cuda::name,
#include "steps.def"
#undef V4_STEP
};

std::string& last_error() {
  static std::string message;
  return message;
}

// An exception must not reach C: null for success, else what went wrong.
template <class F>
const char* guarded(F&& f) {
  try {
    f();
    return nullptr;
  } catch (const std::exception& error) {
    last_error() = error.what();
    return last_error().c_str();
  }
}

}  // namespace

Launch& last_launch() {
  static Launch launch;
  return launch;
}

}  // namespace v4_steps
}  // namespace fastattn

extern "C" {

struct V4StepInfo {
  std::int32_t registers;             // per thread
  std::int32_t local_bytes;           // per thread: what is spilled
  std::int32_t threads;               // per block
  std::int32_t dynamic_shared_bytes;  // per block
  std::int32_t blocks_per_sm;
};

// Enqueues a variant on the default stream. q and out: [batch, heads, len_q, 64], k and v:
// [batch, heads, len_kv, 64], contiguous.
FASTATTN_EXPORT const char* v4_step_run(int step, const void* q, const void* k, const void* v,
                                        void* out, int batch, int heads, int len_q, int len_kv,
                                        float scale) {
  using fastattn::v4_steps::kSteps;
  return fastattn::v4_steps::guarded([=] {
    const fastattn::Kernel& kernel = *kSteps.at(static_cast<std::size_t>(step));
    const int dim = kernel.capabilities.head_dim_max;
    const std::int64_t q_head = static_cast<std::int64_t>(len_q) * dim;
    const std::int64_t kv_head = static_cast<std::int64_t>(len_kv) * dim;
    const fastattn::Strides q_stride = {heads * q_head, q_head, dim};
    const fastattn::Strides kv_stride = {heads * kv_head, kv_head, dim};
    const fastattn::ForwardParams params = {.q = q,
                                            .k = k,
                                            .v = v,
                                            .out = out,
                                            .q_stride = q_stride,
                                            .k_stride = kv_stride,
                                            .v_stride = kv_stride,
                                            .out_stride = q_stride,
                                            .batch = batch,
                                            .heads_q = heads,
                                            .heads_kv = heads,
                                            .len_q = len_q,
                                            .len_kv = len_kv,
                                            .head_dim = dim,
                                            .head_dim_v = dim,
                                            .scale = scale};
    kernel.run(params, nullptr);
  });
}

// Of the kernel that ran last.
FASTATTN_EXPORT const char* v4_step_info(V4StepInfo* info) {
  using fastattn::cuda::check;
  return fastattn::v4_steps::guarded([=] {
    const fastattn::v4_steps::Launch& launch = fastattn::v4_steps::last_launch();
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, launch.kernel), "cudaFuncGetAttributes");
    int blocks = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, launch.kernel, launch.threads,
                                                        launch.dynamic_shared_bytes),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    *info = {.registers = attributes.numRegs,
             .local_bytes = static_cast<std::int32_t>(attributes.localSizeBytes),
             .threads = launch.threads,
             .dynamic_shared_bytes = static_cast<std::int32_t>(launch.dynamic_shared_bytes),
             .blocks_per_sm = blocks};
  });
}

}  // extern "C"
