// Device memory for the length of one call, allocated and freed in stream order.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include "cuda/check.cuh"

namespace fastattn::cuda {

class Scratch {
 public:
  // `what` is for the error message: what the bytes are for.
  Scratch(std::size_t bytes, void* stream, const char* what)
      : stream_(static_cast<cudaStream_t>(stream)) {
    const cudaError_t status = cudaMallocAsync(&data_, bytes, stream_);
    if (status == cudaSuccess) return;
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    static_cast<void>(cudaMemGetInfo(&free_bytes, &total_bytes));
    fail(status, "scratch memory of " + std::to_string(bytes) + " bytes for " + what + " (" +
                     std::to_string(free_bytes) + " of the GPU's " + std::to_string(total_bytes) +
                     " bytes are free; the tiled kernels need none of that size)");
  }
  ~Scratch() { static_cast<void>(cudaFreeAsync(data_, stream_)); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  [[nodiscard]] void* data() const { return data_; }
  [[nodiscard]] float* floats() const { return static_cast<float*>(data_); }

 private:
  void* data_ = nullptr;
  cudaStream_t stream_;
};

}  // namespace fastattn::cuda
