// The emulated GPUs, as src/cuda/launch asks for them. Compiled once for each build of the kernels.
#include "cuda/device.h"

#include "emulation/gpu.h"

namespace fastattn::cuda {

const DeviceInfo& device_info(int device) {
  static const auto kInfos = [] {
    std::array<DeviceInfo, emulation::kGpus.size()> infos;
    for (std::size_t i = 0; i < infos.size(); ++i) {
      infos[i] = {.ordinal = static_cast<int>(i),
                  .name = "emulated GPU",
                  .compute_capability = emulation::kGpus[i].compute_capability,
                  .multiprocessors = 1,
                  .shared_bytes_per_block = emulation::kGpus[i].shared_bytes_per_block,
                  .memory_bytes = 0};
    }
    return infos;
  }();
  return kInfos.at(device);
}

int current_device() { return emulation::current_gpu(); }

}  // namespace fastattn::cuda
