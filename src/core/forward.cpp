#include <string>

#include "core/validate.h"
#include "fastattn/fastattn.h"

#if FASTATTN_HAVE_CUDA
#include "cuda/device.h"
#endif

namespace fastattn {
namespace {

std::string describe(const Kernel& kernel, const ForwardParams& p) {
  const auto shape = [&p](int heads, int length, int dim) {
    return " [" + std::to_string(p.batch) + ", " + std::to_string(heads) + ", " +
           std::to_string(length) + ", " + std::to_string(dim) + "]";
  };
  return "kernel '" + std::string(kernel.name) + "', q" + shape(p.heads_q, p.len_q, p.head_dim) +
         ", k" + shape(p.heads_kv, p.len_kv, p.head_dim) + ": ";
}

}  // namespace

const Kernel& forward(const ForwardParams& params, const Target& target, std::string_view name) {
#if FASTATTN_HAVE_CUDA
  const cuda::DeviceGuard guard(target.backend == Backend::kCuda ? target.device : -1);
#endif
  const Kernel& kernel = choose_kernel(params, target, name);
  if (core::is_empty(params)) return kernel;
  try {
    kernel.run(params, target.stream);
  } catch (const CudaError& error) {
    throw CudaError(describe(kernel, params) + error.what());
  }
  return kernel;
}

}  // namespace fastattn
