// Found in place of src/cuda/ptx/cp_async.cuh. Each copy is made as late as the waits allow, so that a
// wait that is missing shows.
#pragma once

#include <cuda_runtime.h>

namespace fastattn::cuda::ptx {

template <int kBytes>
FASTATTN_INTRINSIC void cp_async(void* shared, const void* global, bool inside = true) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  emulation::copy_later(shared, global, kBytes, inside ? kBytes : 0);
}

FASTATTN_INTRINSIC void cp_async_commit_group() { emulation::commit_copies(); }

template <int kGroups>
FASTATTN_INTRINSIC void cp_async_wait_group() {
  emulation::finish_copies(kGroups);
}

}  // namespace fastattn::cuda::ptx
