#include "cpu/cpu.h"
#include "fastattn/fastattn.h"

#if FASTATTN_HAVE_CUDA
#include "cuda/device.h"
#endif

namespace fastattn {

BuildInfo build_info() {
  return {.version = FASTATTN_VERSION,
#if FASTATTN_HAVE_CUDA
          .cuda = true,
          .cuda_toolkit = FASTATTN_CUDA_TOOLKIT,
          .cuda_archs = FASTATTN_CUDA_ARCHS,
#else
          .cuda = false,
          .cuda_toolkit = "",
          .cuda_archs = "",
#endif
          .threading = cpu::threading(),
          .cpu_instruction_set = cpu::instruction_set()};
}

std::vector<DeviceInfo> cuda_devices() {
#if FASTATTN_HAVE_CUDA
  return cuda::list_devices();
#else
  return {};
#endif
}

int cuda_driver_version() {
#if FASTATTN_HAVE_CUDA
  return cuda::driver_version();
#else
  return 0;
#endif
}

int cpu_threads() { return cpu::threads(); }

}  // namespace fastattn
