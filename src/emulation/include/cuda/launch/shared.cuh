// Found in place of src/cuda/launch/shared.cuh: an extern array can't stand for each block's memory.
#pragma once

#include <cuda_runtime.h>

namespace fastattn::cuda {

template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  return static_cast<T*>(dynamic_shared_memory());
}

}  // namespace fastattn::cuda
