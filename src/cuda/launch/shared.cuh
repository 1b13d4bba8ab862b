// The dynamic shared memory of the block, as an array of T.
#pragma once

#include <cuda_runtime.h>

namespace fastattn::cuda {

// The bytes are what the launch plan asks for. All callers share one declaration, since an extern
// array has one type a file; as float4 it is aligned for the widest copies.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ float4 shared_storage[];
  return reinterpret_cast<T*>(shared_storage);
}

}  // namespace fastattn::cuda
