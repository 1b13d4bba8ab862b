#include "core/auto_rules.h"

#include <algorithm>

namespace fastattn::core {
namespace {

constexpr AutoRule kRules[] = {
#define FASTATTN_AUTO_RULE(gpu, dtype, head_dim_max, queries_max, keys_max, work_max, kernel) \
  {GpuClass::gpu, DType::dtype, head_dim_max, queries_max, keys_max, work_max, #kernel},
#include "core/auto_rules.def"
#undef FASTATTN_AUTO_RULE
};

bool within(std::int64_t value, std::int64_t limit) { return limit == 0 || value <= limit; }

}  // namespace

GpuClass gpu_class(const DeviceInfo& gpu) {
  return gpu.name.find("GeForce") == std::string::npos ? GpuClass::kFullRate : GpuClass::kHalfRate;
}

bool AutoRule::holds(GpuClass of_gpu, const ForwardParams& p) const {
  // In floating point: the product may be beyond 64 bits, and no limit needs its last digits.
  const double work = static_cast<double>(p.batch) * p.heads_q * p.len_q * p.len_kv;
  return gpu == of_gpu && dtype == p.dtype &&
         within(std::max(p.head_dim, p.head_dim_v), head_dim_max) && within(p.len_q, queries_max) &&
         within(p.len_kv, keys_max) && (work_max == 0 || work <= static_cast<double>(work_max));
}

std::span<const AutoRule> auto_rules() { return kRules; }

}  // namespace fastattn::core
