// Which GPU is emulated: what a kernel chooses by it can be tried on each kind.
#pragma once

#include <array>
#include <cstddef>

#include "fastattn/fastattn.h"

namespace fastattn::emulation {

struct Gpu {
  int compute_capability;
  std::size_t shared_bytes_per_block;
};

// By ordinal. The first is what a thread begins with.
inline constexpr std::array<Gpu, 4> kGpus = {
    {{90, 227 * 1024}, {80, 163 * 1024}, {86, 99 * 1024}, {75, 64 * 1024}}};

// Of the calling thread, as with CUDA's current device.
FASTATTN_EXPORT int current_gpu();
FASTATTN_EXPORT void use_gpu(int ordinal);

}  // namespace fastattn::emulation
