#include "core/registry.h"

#include "cpu/cpu.h"
#include "fastattn/fastattn.h"

#if FASTATTN_HAVE_CUDA
namespace fastattn::cuda {
#define FASTATTN_CUDA_KERNEL(name, symbol) extern const Kernel symbol;
#include "cuda/kernels.def"
#undef FASTATTN_CUDA_KERNEL
}  // namespace fastattn::cuda
#endif

namespace fastattn {
namespace {

constexpr const Kernel* kKernels[] = {
    &cpu::cpu_kernel,
#if FASTATTN_HAVE_CUDA
#define FASTATTN_CUDA_KERNEL(name, symbol) &cuda::symbol,
#include "cuda/kernels.def"
#undef FASTATTN_CUDA_KERNEL
#endif
};

constexpr std::string_view kCudaKernelNames[] = {
#define FASTATTN_CUDA_KERNEL(name, symbol) #name,
#include "cuda/kernels.def"
#undef FASTATTN_CUDA_KERNEL
};

}  // namespace

std::span<const Kernel* const> kernels() { return kKernels; }

std::span<const std::string_view> core::cuda_kernel_names() { return kCudaKernelNames; }

#if !FASTATTN_HAVE_EMULATION
std::span<const Kernel* const> emulated_kernels() { return {}; }
#endif

const Kernel* find_kernel(std::string_view name) {
  for (const Kernel* kernel : kKernels) {
    if (kernel->name == name) return kernel;
  }
  return nullptr;
}

}  // namespace fastattn
