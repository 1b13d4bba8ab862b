// CUDA as the rungs use it, for a C++ compiler on the host. Found in place of the toolkit's header
// of this name when a .cu file is compiled for the emulation; `cuda` is defined as the name of the
// namespace that the build goes to.
//
// Compiled without its optimiser and with the compiler's instrumentation of memory accesses, the
// same source is the checked build (instrumentation.cpp).
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <tuple>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) alignas(bytes)
// A block stays on one OS thread, and an OS thread runs one block at a time. The observer takes the
// thread-local memory of the module for it. (Not a section of its own: GCC leaves the statics of
// templates out of it without a word.)
#define __shared__ static thread_local
// In the caller's line for a debugger and for the checker, though it stands here.
#define FASTATTN_INTRINSIC inline __attribute__((always_inline, artificial))

#define warpSize 32

namespace fastattn::emulation {

// --- built-in types ------------------------------------------------------------------------------

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr explicit(false) dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1)
      : x(x_), y(y_), z(z_) {}
};

#define FASTATTN_VECTOR_TYPES(T, name)                                   \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                     \
  struct alignas(4 * sizeof(T)) name##4 { T x, y, z, w; };               \
  FASTATTN_INTRINSIC name##2 make_##name##2(T x, T y) { return {x, y}; } \
  FASTATTN_INTRINSIC name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
FASTATTN_VECTOR_TYPES(float, float)
FASTATTN_VECTOR_TYPES(int, int)
FASTATTN_VECTOR_TYPES(unsigned, uint)
#undef FASTATTN_VECTOR_TYPES

// --- the thread and its block --------------------------------------------------------------------

uint3 thread_index();
uint3 block_index();
uint3 block_dim();
uint3 grid_dim();
void* dynamic_shared_memory();

// threadIdx and its like: variables to the source, read from the thread that runs.
template <uint3 (*kRead)()>
struct BuiltIn {
  struct X {
    FASTATTN_INTRINSIC explicit(false) operator unsigned() const { return kRead().x; }
  } x;
  struct Y {
    FASTATTN_INTRINSIC explicit(false) operator unsigned() const { return kRead().y; }
  } y;
  struct Z {
    FASTATTN_INTRINSIC explicit(false) operator unsigned() const { return kRead().z; }
  } z;
};
inline constexpr BuiltIn<thread_index> threadIdx = {};
inline constexpr BuiltIn<block_index> blockIdx = {};
inline constexpr BuiltIn<block_dim> blockDim = {};
inline constexpr BuiltIn<grid_dim> gridDim = {};

int sync_threads(bool vote = false);  // returns how many threads voted for it
void sync_warp(unsigned mask);
std::uint64_t shuffle(unsigned mask, std::uint64_t value, int source_lane);
unsigned ballot(unsigned mask, bool vote);
int lane_index();
void count_exponential();
// Instructions of tensor cores: see ldmatrix.cuh and mma.cuh. d = a b + d.
void load_matrices(unsigned* registers, const void* row, bool transposed);
void multiply_f16(float* d, const unsigned* a, unsigned b0, unsigned b1);
void multiply_bf16(float* d, const unsigned* a, unsigned b0, unsigned b1);
unsigned to_f16(float x);  // bits, rounded to nearest, ties to even
unsigned to_bf16(float x);
float from_f16(unsigned bits);
// Copies to shared memory that are made when the thread waits for them: see cp_async.cuh.
void copy_later(void* shared, const void* global, int bytes, int valid);
void commit_copies();
void finish_copies(int groups_left);
void atomic_read(const void* address, std::size_t bytes, void* value);
bool atomic_replace(void* address, std::size_t bytes, void* expected, const void* wanted);

FASTATTN_INTRINSIC void __syncthreads() { sync_threads(); }
FASTATTN_INTRINSIC int __syncthreads_count(int vote) { return sync_threads(vote != 0); }
FASTATTN_INTRINSIC int __syncthreads_or(int vote) { return sync_threads(vote != 0) != 0; }
FASTATTN_INTRINSIC int __syncthreads_and(int vote) { return sync_threads(vote == 0) == 0; }
FASTATTN_INTRINSIC void __syncwarp(unsigned mask = 0xffffffffU) { sync_warp(mask); }

// --- warp shuffles and votes ---------------------------------------------------------------------

template <class T>
FASTATTN_INTRINSIC T shuffle_value(unsigned mask, T value, int source_lane) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t) && std::is_trivially_copyable_v<T>);
  std::uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = shuffle(mask, bits, source_lane);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

// Lanes exchange within segments of `width`; a source outside of the segment is the lane itself.
template <class T>
FASTATTN_INTRINSIC T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return shuffle_value(mask, value, (lane_index() & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
FASTATTN_INTRINSIC T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  const int lane = lane_index();
  const int source = lane ^ lane_mask;
  return shuffle_value(mask, value, source < (lane & ~(width - 1)) + width ? source : lane);
}
template <class T>
FASTATTN_INTRINSIC T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = lane_index();
  const int source = lane - static_cast<int>(delta);
  return shuffle_value(mask, value, source >= (lane & ~(width - 1)) ? source : lane);
}
template <class T>
FASTATTN_INTRINSIC T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = lane_index();
  const int source = lane + static_cast<int>(delta);
  return shuffle_value(mask, value, source < (lane & ~(width - 1)) + width ? source : lane);
}

FASTATTN_INTRINSIC unsigned __ballot_sync(unsigned mask, int vote) {
  return ballot(mask, vote != 0);
}
FASTATTN_INTRINSIC int __any_sync(unsigned mask, int vote) { return ballot(mask, vote != 0) != 0; }
FASTATTN_INTRINSIC int __all_sync(unsigned mask, int vote) {
  return ballot(mask, vote != 0) == mask;
}

// --- arithmetic ----------------------------------------------------------------------------------

template <class A, class B>
FASTATTN_INTRINSIC std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
FASTATTN_INTRINSIC std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

FASTATTN_INTRINSIC float expf(float x) {
  count_exponential();
  return std::exp(x);
}
FASTATTN_INTRINSIC float exp2f(float x) {
  count_exponential();
  return std::exp2(x);
}
FASTATTN_INTRINSIC float __expf(float x) { return expf(x); }
FASTATTN_INTRINSIC float logf(float x) { return std::log(x); }
FASTATTN_INTRINSIC float __logf(float x) { return std::log(x); }
FASTATTN_INTRINSIC float log2f(float x) { return std::log2(x); }
FASTATTN_INTRINSIC float sqrtf(float x) { return std::sqrt(x); }
FASTATTN_INTRINSIC float rsqrtf(float x) { return 1.0F / std::sqrt(x); }
FASTATTN_INTRINSIC float ldexpf(float x, int exponent) { return std::ldexp(x, exponent); }
FASTATTN_INTRINSIC int ilogbf(float x) { return std::ilogb(x); }
FASTATTN_INTRINSIC bool signbit(float x) { return std::signbit(x); }
FASTATTN_INTRINSIC bool isfinite(float x) { return std::isfinite(x); }
FASTATTN_INTRINSIC bool isinf(float x) { return std::isinf(x); }
FASTATTN_INTRINSIC bool isnan(float x) { return std::isnan(x); }
FASTATTN_INTRINSIC float fabsf(float x) { return std::fabs(x); }
FASTATTN_INTRINSIC float fmaxf(float a, float b) { return std::fmax(a, b); }
FASTATTN_INTRINSIC float fminf(float a, float b) { return std::fmin(a, b); }
FASTATTN_INTRINSIC float fmaf(float a, float b, float c) { return std::fma(a, b, c); }
FASTATTN_INTRINSIC float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
FASTATTN_INTRINSIC float __fmul_rn(float a, float b) { return a * b; }
FASTATTN_INTRINSIC float __fadd_rn(float a, float b) { return a + b; }
FASTATTN_INTRINSIC float __frcp_rn(float a) { return 1.0F / a; }
FASTATTN_INTRINSIC float __fdividef(float a, float b) { return a / b; }

FASTATTN_INTRINSIC int __float_as_int(float x) { return std::bit_cast<int>(x); }
FASTATTN_INTRINSIC unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
FASTATTN_INTRINSIC float __int_as_float(int x) { return std::bit_cast<float>(x); }
FASTATTN_INTRINSIC float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
FASTATTN_INTRINSIC int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
FASTATTN_INTRINSIC int __popc(unsigned x) { return std::popcount(x); }
FASTATTN_INTRINSIC int __ffs(int x) { return __builtin_ffs(x); }
[[noreturn]] inline void __trap() { std::abort(); }

template <class T>
FASTATTN_INTRINSIC T __ldg(const T* address) {
  return *address;
}

// --- atomics -------------------------------------------------------------------------------------

// All return the old value.
template <class T, class F>
FASTATTN_INTRINSIC T atomic_update(T* address, F change) {
  T old;
  atomic_read(address, sizeof(T), &old);
  T wanted = change(old);
  while (!atomic_replace(address, sizeof(T), &old, &wanted)) wanted = change(old);
  return old;
}
template <class T>
FASTATTN_INTRINSIC T atomicAdd(T* address, std::type_identity_t<T> value) {
  return atomic_update(address, [value](T old) { return old + value; });
}
template <class T>
FASTATTN_INTRINSIC T atomicMax(T* address, std::type_identity_t<T> value) {
  return atomic_update(address, [value](T old) { return old < value ? value : old; });
}
template <class T>
FASTATTN_INTRINSIC T atomicMin(T* address, std::type_identity_t<T> value) {
  return atomic_update(address, [value](T old) { return value < old ? value : old; });
}
template <class T>
FASTATTN_INTRINSIC T atomicExch(T* address, std::type_identity_t<T> value) {
  return atomic_update(address, [value](T) { return value; });
}
template <class T>
FASTATTN_INTRINSIC T atomicCAS(T* address, std::type_identity_t<T> expected,
                               std::type_identity_t<T> value) {
  return atomic_update(address, [=](T old) { return old == expected ? value : old; });
}

// --- the runtime, as far as src/cuda/launch calls it ---------------------------------------------

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoKernelImageForDevice = 209,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
struct cudaFuncAttributes {
  std::size_t sharedSizeBytes;
  int ptxVersion;
};
using cudaStream_t = struct EmulatedStream*;
struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
};

cudaError_t cudaMallocAsync(void** pointer, std::size_t bytes, cudaStream_t stream);
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream);
cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes);
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t status);
const char* cudaGetErrorString(cudaError_t status);
int code_architecture();  // that kernels count as compiled for: the emulated GPU's

template <class... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*)(Parameters...)) {
  *attributes = {.sharedSizeBytes = 0, .ptxVersion = code_architecture()};
  return cudaSuccess;
}
template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*)(Parameters...), cudaFuncAttribute, int) {
  return cudaSuccess;  // every block has all of the shared memory
}

cudaError_t launch_grid(const cudaLaunchConfig_t& config, const void* kernel,
                        void (*call)(const void* arguments), const void* arguments,
                        std::size_t argument_bytes);

// Runs the grid at once: a launch has ended when it returns.
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  struct Packed {
    void (*kernel)(Parameters...);
    std::tuple<std::remove_cv_t<Parameters>...> arguments;
  };
  const Packed packed{kernel, {arguments...}};
  const auto call = [](const void* packed_arguments) {
    const auto& p = *static_cast<const Packed*>(packed_arguments);
    std::apply(p.kernel, p.arguments);
  };
  return launch_grid(*config, reinterpret_cast<const void*>(kernel), call, &packed, sizeof(packed));
}

}  // namespace fastattn::emulation

// The namespace that the file goes to sees all of it.
namespace fastattn::cuda {
using namespace fastattn::emulation;  // NOLINT(google-build-using-namespace)
}
