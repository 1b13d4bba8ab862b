// fastattn: exact attention. The public C++ interface; no framework and no CUDA header needed.
//
//   fastattn::ForwardParams params{.q = q, .k = k, ..., .scale = 0.125f};
//   fastattn::forward(params, {.backend = fastattn::Backend::kCuda, .stream = stream});
//
// Symbols: B batch, Hq/Hkv query and key/value heads, M query length, N key length, D head dim of q
// and k, Dv head dim of v.  S = scale * Q K^T,  P = softmax(S),  O = P V,  lse = log(sum(exp(S))).
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "fastattn/version.h"

#if defined(_WIN32)
#define FASTATTN_EXPORT
#else
#define FASTATTN_EXPORT __attribute__((visibility("default")))
#endif

namespace fastattn {

enum class DType : std::uint8_t { kFloat32, kFloat16, kBFloat16 };
enum class Backend : std::uint8_t { kCpu, kCuda };

FASTATTN_EXPORT std::string_view to_string(DType dtype);
FASTATTN_EXPORT std::string_view to_string(Backend backend);

// In elements. The last dimension always has stride 1.
struct Strides {
  std::int64_t batch, head, row;
};

// Bottom-right aligned: row i stands at key i + N - M. With `causal` it sees no key after that one;
// with a window it sees at most `window_left` keys before and `window_right` keys after it. -1
// means no limit on that side.
struct Mask {
  bool causal = false;
  int window_left = -1;
  int window_right = -1;
};

// The largest len_q and len_kv. A kernel's last tile, of up to 256 rows, ends within an int.
inline constexpr int kMaxLength = std::numeric_limits<int>::max() - 255;

struct ForwardParams {
  const void* q;         // [B, Hq,  M, D]
  const void* k;         // [B, Hkv, N, D]
  const void* v;         // [B, Hkv, N, Dv]
  void* out;             // [B, Hq,  M, Dv], written whole
  float* lse = nullptr;  // [B, Hq,  M] contiguous, natural log; null: not wanted
  Strides q_stride, k_stride, v_stride, out_stride;
  int batch, heads_q, heads_kv, len_q, len_kv, head_dim, head_dim_v;
  float scale;
  DType dtype = DType::kFloat32;  // of q, k, v and out
  Mask mask = {};
};

// A wrong argument. `kind` tells a wrong value, a wrong type and a call that is right but that no
// kernel (or not the named one) can do; Python raises ValueError, TypeError, NotImplementedError.
class FASTATTN_EXPORT ArgumentError : public std::invalid_argument {
 public:
  enum class Kind : std::uint8_t { kValue, kType, kUnsupported };
  ArgumentError(Kind kind, const std::string& message);
  [[nodiscard]] Kind kind() const noexcept { return kind_; }

 private:
  Kind kind_;
};

// CUDA failed: a launch, an allocation of scratch memory, a device that does not answer.
class FASTATTN_EXPORT CudaError : public std::runtime_error {
 public:
  explicit CudaError(const std::string& message);
};

// How a kernel will be launched for one call: tests and the documentation read it.
struct LaunchPlan {
  std::int64_t blocks = 0;               // grid size (one dimension)
  int threads = 0;                       // per block
  std::size_t dynamic_shared_bytes = 0;  // per block
  std::size_t workspace_bytes = 0;       // device memory, allocated and freed in stream order
  bool compiled = true;                  // this build has the kernel's code for the current GPU
};

// What a kernel takes. Checked in one place (src/core/choose.cpp), shown by kernels().
struct Capabilities {
  std::uint32_t dtypes = 1U << static_cast<unsigned>(DType::kFloat32);  // bit i: DType i
  int head_dim_min = 1;
  int head_dim_max = 0;
  bool head_dim_v_differs = false;  // Dv != D
  bool lengths_differ = false;      // M != N
  bool grouped_heads = false;       // Hq != Hkv
  bool causal = false;
  bool window = false;
  int min_compute_capability = 0;  // 75 is 7.5; 0 for the CPU

  [[nodiscard]] constexpr bool takes(DType dtype) const {
    return ((dtypes >> static_cast<unsigned>(dtype)) & 1U) != 0;
  }
};

// One registered implementation.
struct Kernel {
  std::string_view name;   // "v4"
  std::string_view title;  // one line
  // In what precision the products are made and summed, for each dtype that it takes.
  std::string_view arithmetic;
  Backend backend;
  Capabilities capabilities;
  // The kernel that takes over where head_dim is outside this one's range; empty: none.
  std::string_view redirect = {};
  // Null for the CPU. Valid for any call that the capabilities allow.
  LaunchPlan (*plan)(const ForwardParams& params);
  // Enqueues the work (CUDA: on `stream`, a cudaStream_t, on the current device) or does it (CPU).
  void (*run)(const ForwardParams& params, void* stream);
};

// Every kernel of this build: the CPU kernel, then the CUDA kernels in ladder order.
FASTATTN_EXPORT std::span<const Kernel* const> kernels();

// Null where there is no such kernel.
FASTATTN_EXPORT const Kernel* find_kernel(std::string_view name);

// The CUDA kernels once more, as this host emulates a GPU: for arrays on the CPU, to step through
// and to learn from, tens to hundreds of times slower than the CPU kernel. forward() takes them by
// name for Backend::kCpu; "auto" never does. Empty in a build without the emulation.
FASTATTN_EXPORT std::span<const Kernel* const> emulated_kernels();

// Where a call runs. The pointers in ForwardParams must be valid there.
struct Target {
  Backend backend = Backend::kCpu;
  int device = -1;         // CUDA ordinal; -1: the current device
  void* stream = nullptr;  // a cudaStream_t
};

// Why `kernel` can't take this call on this target; empty: it can. Redirects are not followed.
// Throws ArgumentError for a call that is wrong whatever the kernel.
FASTATTN_EXPORT std::string refusal(const Kernel& kernel, const ForwardParams& params,
                                    const Target& target);

// The kernel that forward() would run. `name` "auto": the fastest that takes the call by what was
// measured (src/core/auto_rules.def), else the last of kernels() that takes it. Throws
// ArgumentError.
FASTATTN_EXPORT const Kernel& choose_kernel(const ForwardParams& params, const Target& target,
                                            std::string_view name = "auto");

// out = softmax(scale * q k^T) v, and lse. Returns the kernel that ran. On CUDA the work is
// enqueued on target.stream and nothing waits for it. A row that sees no key gives out 0 and lse
// -inf. Throws ArgumentError before anything is enqueued, CudaError where CUDA fails.
//
// What `out` and `lse` are written to must be apart from q, k and v and from each other, and each
// element of them must have memory of its own: inputs are still read while results are written.
// This is not checked here (Python's forward() checks it): the result would be wrong, silently.
FASTATTN_EXPORT const Kernel& forward(const ForwardParams& params, const Target& target = {},
                                      std::string_view kernel = "auto");

struct DeviceInfo {
  int ordinal;
  std::string name;
  int compute_capability;  // 90 is 9.0
  int multiprocessors;
  std::size_t shared_bytes_per_block;  // the most that a kernel can opt in to
  std::size_t memory_bytes;
};

struct BuildInfo {
  std::string_view version;
  bool cuda;                             // the CUDA backend is in this build
  std::string_view cuda_toolkit;         // "13.0"; empty without CUDA
  std::string_view cuda_archs;           // CMAKE_CUDA_ARCHITECTURES as built; empty without CUDA
  std::string_view threading;            // of the CPU kernel: "OpenMP" or "std::thread"
  std::string_view cpu_instruction_set;  // that the CPU kernel uses on this machine
};

FASTATTN_EXPORT BuildInfo build_info();

// Empty where there is no driver, no GPU or no CUDA backend. Creates no CUDA context.
FASTATTN_EXPORT std::vector<DeviceInfo> cuda_devices();

// CUDA version that the driver supports (13000 is 13.0); 0 without a driver.
FASTATTN_EXPORT int cuda_driver_version();

// Threads that the CPU kernel uses: OMP_NUM_THREADS where it is set, else the cores this process
// may run on.
FASTATTN_EXPORT int cpu_threads();

}  // namespace fastattn
