// Which kernel "auto" prefers for a call on a GPU: measured rules, written by a command.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "fastattn/fastattn.h"

namespace fastattn::core {

// Whether tensor cores sum float16 products in float32 as fast as in float16. GeForce cards do it
// at half the rate. The compute capability doesn't tell: 8.9 is a GeForce RTX 4090 and an L40S.
enum class GpuClass : std::uint8_t { kFullRate, kHalfRate };

// By the name of the GPU.
FASTATTN_EXPORT GpuClass gpu_class(const DeviceInfo& gpu);

// Holds for calls up to its limits; 0 is no limit. Among the rules the first that holds, and whose
// kernel takes the call, decides.
struct AutoRule {
  GpuClass gpu;
  DType dtype;
  int head_dim_max;          // the larger of D and Dv
  std::int64_t queries_max;  // M
  std::int64_t keys_max;     // N
  std::int64_t work_max;     // B * Hq * M * N
  std::string_view kernel;

  [[nodiscard]] FASTATTN_EXPORT bool holds(GpuClass of_gpu, const ForwardParams& params) const;
};

FASTATTN_EXPORT std::span<const AutoRule> auto_rules();

}  // namespace fastattn::core
