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

}  // namespace fastattn::cuda::ptx
