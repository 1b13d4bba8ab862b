// Found in place of src/cuda/ptx/mma.cuh. The arithmetic is tensor_core.cpp's.
#pragma once

#include <cuda_runtime.h>

namespace fastattn::cuda::ptx {

FASTATTN_INTRINSIC void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1) {
  emulation::multiply_f16(d, a, b0, b1);
}
FASTATTN_INTRINSIC void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                          unsigned b1) {
  emulation::multiply_bf16(d, a, b0, b1);
}
FASTATTN_INTRINSIC void mma_m16n8k16_f16_zero(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                              unsigned b1) {
  for (float& each : d) each = 0.0F;
  emulation::multiply_f16(d, a, b0, b1);
}
FASTATTN_INTRINSIC void mma_m16n8k16_bf16_zero(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                               unsigned b1) {
  for (float& each : d) each = 0.0F;
  emulation::multiply_bf16(d, a, b0, b1);
}

}  // namespace fastattn::cuda::ptx
