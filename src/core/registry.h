#pragma once

#include <span>
#include <string_view>

namespace fastattn::core {

// Names of all CUDA kernels, also in a build without the CUDA backend: an error can then say that
// the kernel exists and the build lacks it.
std::span<const std::string_view> cuda_kernel_names();

}  // namespace fastattn::core
