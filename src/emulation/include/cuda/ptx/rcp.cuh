// Found in place of src/cuda/ptx/rcp.cuh.
#pragma once

#include <cuda_runtime.h>

namespace fastattn::cuda::ptx {

FASTATTN_INTRINSIC float rcp_approx_ftz(float x) {
  const auto flush = [](float y) {
    return std::fpclassify(y) == FP_SUBNORMAL ? std::copysign(0.0F, y) : y;
  };
  return flush(1.0F / flush(x));
}

}  // namespace fastattn::cuda::ptx
