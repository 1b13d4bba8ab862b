// CUDA status codes to exceptions.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "fastattn/fastattn.h"

namespace fastattn::cuda {

[[noreturn]] inline void fail(cudaError_t status, const std::string& what) {
  // The runtime also keeps the error for the next cudaGetLastError(); it is ours, so take it back.
  static_cast<void>(cudaGetLastError());
  // The runtime says this of a machine without any driver as well.
  const char* hint = status == cudaErrorInsufficientDriver ? " (or there is no NVIDIA driver)" : "";
  throw CudaError(what + ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status) +
                  hint);
}

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) fail(status, what);
}

}  // namespace fastattn::cuda
