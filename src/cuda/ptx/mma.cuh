// Matrix products of a warp on tensor cores: D [16, 8] = A [16, 16] B [16, 8] + D, sums in fp32.
// PTX ISA: "Warp-level Matrix Instructions: mma" (.m16n8k16.row.col, sm_80 and newer).
#pragma once

#include <cuda_runtime.h>

namespace fastattn::cuda::ptx {

// With g = lane / 4 and t = lane % 4, a lane holds, the first of two in the low half of a register:
//   a[0]: row g, columns 2t, 2t + 1       a[2]: row g, columns 2t + 8, 2t + 9
//   a[1]: row g + 8, columns 2t, 2t + 1   a[3]: row g + 8, columns 2t + 8, 2t + 9
//   b0: rows 2t, 2t + 1 of column g       b1: rows 2t + 8, 2t + 9 of column g
//   d[0], d[1]: row g, columns 2t, 2t + 1, and d[2], d[3]: those of row g + 8
#if __CUDA_ARCH__ >= 800
#define FASTATTN_MMA(type, d, a, b0, b1)                                     \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
#define FASTATTN_MMA_ZERO(type, d, a, b0, b1)                                    \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                     \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};" \
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                           \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0F))
#else
#define FASTATTN_MMA(type, d, a, b0, b1) __trap()
#define FASTATTN_MMA_ZERO(type, d, a, b0, b1) __trap()
#endif

__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                                 unsigned b1) {
  FASTATTN_MMA("f16", d, a, b0, b1);
}
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4],
                                                  unsigned b0, unsigned b1) {
  FASTATTN_MMA("bf16", d, a, b0, b1);
}

// d = a b: saves the registers' being set to 0 first.
__device__ __forceinline__ void mma_m16n8k16_f16_zero(float (&d)[4], const unsigned (&a)[4],
                                                      unsigned b0, unsigned b1) {
  FASTATTN_MMA_ZERO("f16", d, a, b0, b1);
}
__device__ __forceinline__ void mma_m16n8k16_bf16_zero(float (&d)[4], const unsigned (&a)[4],
                                                       unsigned b0, unsigned b1) {
  FASTATTN_MMA_ZERO("bf16", d, a, b0, b1);
}

#undef FASTATTN_MMA
#undef FASTATTN_MMA_ZERO

}  // namespace fastattn::cuda::ptx
