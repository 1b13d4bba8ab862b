// Four 8x8 matrices of 16-bit elements from shared memory to the registers of a warp.
// PTX ISA: "Warp-level Matrix Instructions: ldmatrix" (sm_75 and newer).
#pragma once

#include <cuda_runtime.h>

namespace fastattn::cuda::ptx {

// Lane i gives the address of row i % 8 (16 bytes, aligned to them) of matrix i / 8. Of matrix m it
// gets in r[m] the elements 2 * (i % 4) and the next of row i / 4, the first in the low half.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* shared_row) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(shared_row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The same of the transposed matrices: rows 2 * (i % 4) and the next of column i / 4.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], const void* shared_row) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(shared_row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

}  // namespace fastattn::cuda::ptx
