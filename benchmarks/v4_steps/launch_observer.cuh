// Compiled before each variant (nvcc -include): notes which kernel a variant launches, and how.
//
// The variants keep their kernels in unnamed namespaces, as the rungs do, so their registers and
// blocks per multiprocessor can't be asked for by name.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

namespace fastattn::v4_steps {

struct Launch {
  const void* kernel = nullptr;
  int threads = 0;
  std::size_t dynamic_shared_bytes = 0;
};

// The last launch of any variant.
Launch& last_launch();

template <class... Parameters, class... Args>
cudaError_t observe_launch(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                           Args&&... args) {
  last_launch() = {.kernel = reinterpret_cast<const void*>(kernel),
                   .threads = static_cast<int>(config->blockDim.x),
                   .dynamic_shared_bytes = config->dynamicSmemBytes};
  return cudaLaunchKernelEx(config, kernel, std::forward<Args>(args)...);
}

}  // namespace fastattn::v4_steps

// cuda_runtime.h is behind us: this renames the call in src/cuda/launch/launch.cuh alone.
#define cudaLaunchKernelEx ::fastattn::v4_steps::observe_launch
