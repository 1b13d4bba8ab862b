// Found in place of src/cuda/ptx/ldmatrix.cuh.
#pragma once

#include <cuda_runtime.h>

namespace fastattn::cuda::ptx {

FASTATTN_INTRINSIC void ldmatrix_x4(unsigned (&r)[4], const void* shared_row) {
  emulation::load_matrices(r, shared_row, false);
}
FASTATTN_INTRINSIC void ldmatrix_x4_trans(unsigned (&r)[4], const void* shared_row) {
  emulation::load_matrices(r, shared_row, true);
}

}  // namespace fastattn::cuda::ptx
