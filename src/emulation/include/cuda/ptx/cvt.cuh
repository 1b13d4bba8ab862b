// Found in place of src/cuda/ptx/cvt.cuh. By bits, since not every compiler has the types.
#pragma once

#include <cuda_runtime.h>

namespace fastattn::cuda::ptx {

FASTATTN_INTRINSIC unsigned cvt_rn_f16x2(float high, float low) {
  return emulation::to_f16(high) << 16U | emulation::to_f16(low);
}
FASTATTN_INTRINSIC unsigned cvt_rn_bf16x2(float high, float low) {
  return emulation::to_bf16(high) << 16U | emulation::to_bf16(low);
}
FASTATTN_INTRINSIC float2 f16x2_to_f32(unsigned pair) {
  return {emulation::from_f16(pair & 0xffffU), emulation::from_f16(pair >> 16U)};
}
FASTATTN_INTRINSIC float2 bf16x2_to_f32(unsigned pair) {
  return {__uint_as_float(pair << 16U), __uint_as_float(pair & 0xffff0000U)};
}
// A product of two numbers of 11 bits is exact in fp32, so it is rounded once.
FASTATTN_INTRINSIC unsigned mul_rn_f16x2(unsigned a, unsigned b) {
  const float2 x = f16x2_to_f32(a);
  const float2 y = f16x2_to_f32(b);
  return cvt_rn_f16x2(x.y * y.y, x.x * y.x);
}

}  // namespace fastattn::cuda::ptx
