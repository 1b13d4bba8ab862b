// Found in place of src/cuda/ptx/ex2.cuh.
#pragma once

#include <cuda_runtime.h>

namespace fastattn::cuda::ptx {

FASTATTN_INTRINSIC float ex2_approx_ftz(float x) {
  const float result = emulation::exp2f(x);
  return std::fpclassify(result) == FP_SUBNORMAL ? 0.0F : result;
}

}  // namespace fastattn::cuda::ptx
