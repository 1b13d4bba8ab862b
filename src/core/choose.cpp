// The one place that decides which kernel runs a call, and why another can't.
#include "core/choose.h"

#include <algorithm>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "core/auto_rules.h"
#include "core/registry.h"
#include "core/validate.h"
#include "fastattn/fastattn.h"

#if FASTATTN_HAVE_CUDA
#include "cuda/device.h"
#endif

namespace fastattn {
namespace {

using Kind = ArgumentError::Kind;

std::string quoted(std::string_view text) { return "'" + std::string(text) + "'"; }

std::string join(const std::vector<std::string>& parts, std::string_view separator) {
  std::string text;
  for (const std::string& part : parts) {
    if (!text.empty()) text += separator;
    text += part;
  }
  return text;
}

std::string dtype_list(const Capabilities& takes) {
  std::vector<std::string> names;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    if (takes.takes(dtype)) names.emplace_back(to_string(dtype));
  }
  return join(names, ", ");
}

std::string range(int low, int high) {
  return low == high ? std::to_string(low) : std::to_string(low) + " to " + std::to_string(high);
}

bool head_dim_fits(const Kernel& kernel, int head_dim) {
  const Capabilities& takes = kernel.capabilities;
  return takes.head_dim_min <= head_dim && head_dim <= takes.head_dim_max;
}

bool is_windowed(const Mask& mask) { return mask.window_left >= 0 || mask.window_right >= 0; }

// What of the call itself the kernel does not take, whatever the machine.
std::vector<std::string> call_refusals(const Kernel& kernel, const ForwardParams& p) {
  const Capabilities& takes = kernel.capabilities;
  std::vector<std::string> reasons;
  if (!takes.takes(p.dtype)) {
    reasons.push_back("dtype " + std::string(to_string(p.dtype)) + " (it takes " +
                      dtype_list(takes) + ")");
  }
  if (!head_dim_fits(kernel, p.head_dim)) {
    reasons.push_back("head_dim " + std::to_string(p.head_dim) + " (it takes " +
                      range(takes.head_dim_min, takes.head_dim_max) + ")");
  }
  if (p.head_dim_v != p.head_dim) {
    if (!takes.head_dim_v_differs) {
      reasons.push_back("head_dim of v " + std::to_string(p.head_dim_v) +
                        " (it takes only that of q and k, " + std::to_string(p.head_dim) + ")");
    } else if (!head_dim_fits(kernel, p.head_dim_v)) {
      reasons.push_back("head_dim of v " + std::to_string(p.head_dim_v) + " (it takes " +
                        range(takes.head_dim_min, takes.head_dim_max) + ")");
    }
  }
  if (p.len_q != p.len_kv && !takes.lengths_differ) {
    reasons.push_back("query length " + std::to_string(p.len_q) + " with key length " +
                      std::to_string(p.len_kv) + " (it takes only equal lengths)");
  }
  if (p.heads_q != p.heads_kv && !takes.grouped_heads) {
    reasons.push_back(std::to_string(p.heads_q) + " query heads with " +
                      std::to_string(p.heads_kv) + " key/value heads (it takes only equal counts)");
  }
  if (p.mask.causal && !takes.causal) reasons.emplace_back("causal=True (it has no causal mask)");
  if (is_windowed(p.mask) && !takes.window) {
    reasons.push_back("window=(" + std::to_string(p.mask.window_left) + ", " +
                      std::to_string(p.mask.window_right) + ") (it has no window)");
  }
  return reasons;
}

std::string compute_capability(int value) {
  return std::to_string(value / 10) + "." + std::to_string(value % 10);
}

// What this GPU can't do of it. The plan is valid only where the call itself is taken.
std::vector<std::string> device_refusals(const Kernel& kernel, const ForwardParams& p,
                                         const DeviceInfo& gpu) {
  std::vector<std::string> reasons;
  if (gpu.compute_capability < kernel.capabilities.min_compute_capability) {
    reasons.push_back(gpu.name + ", compute capability " +
                      compute_capability(gpu.compute_capability) + " (it needs " +
                      compute_capability(kernel.capabilities.min_compute_capability) +
                      " or newer)");
  }
  const LaunchPlan plan = kernel.plan(p);
  if (plan.dynamic_shared_bytes > gpu.shared_bytes_per_block) {
    reasons.push_back("head_dim " + std::to_string(p.head_dim) + " on " + gpu.name +
                      " (it would need " + std::to_string(plan.dynamic_shared_bytes) +
                      " bytes of shared memory per block; this GPU has " +
                      std::to_string(gpu.shared_bytes_per_block) + ")");
  }
  if (!plan.compiled) {
    reasons.push_back(gpu.name + " by this build (its code is for " +
                      std::string(build_info().cuda_archs) + ")");
  }
  if (plan.blocks > std::numeric_limits<std::int32_t>::max()) {
    reasons.push_back(std::to_string(plan.blocks) + " blocks (a grid has at most 2147483647)");
  }
  return reasons;
}

// `gpu`: null for the CPU.
std::vector<std::string> refusals(const Kernel& kernel, const ForwardParams& p,
                                  const DeviceInfo* gpu) {
  std::vector<std::string> reasons = call_refusals(kernel, p);
  if (reasons.empty() && gpu != nullptr) reasons = device_refusals(kernel, p, *gpu);
  return reasons;
}

// The GPU of a target, current for as long as this lives: plans are made for the current one.
class TargetGpu {
 public:
#if FASTATTN_HAVE_CUDA
  explicit TargetGpu(const Target& target)
      : guard_(target.backend == Backend::kCuda ? target.device : -1),
        info_(target.backend == Backend::kCuda ? &cuda::device_info(cuda::current_device())
                                               : nullptr) {}
#else
  explicit TargetGpu(const Target&) {}
#endif

  [[nodiscard]] const DeviceInfo* info() const { return info_; }  // null for the CPU

 private:
#if FASTATTN_HAVE_CUDA
  cuda::DeviceGuard guard_;
#endif
  const DeviceInfo* info_ = nullptr;
};

// Asks for the GPU only where the call itself is taken: what is wrong with it is said without one.
std::vector<std::string> refusals(const Kernel& kernel, const ForwardParams& p,
                                  const Target& target) {
  std::vector<std::string> reasons = call_refusals(kernel, p);
  return reasons.empty() ? refusals(kernel, p, TargetGpu(target).info()) : reasons;
}

// The kernel of that name for arrays of that backend; for the host, also a CUDA kernel's emulation.
const Kernel* find_kernel_for(Backend backend, std::string_view name) {
  for (const Kernel* kernel : kernels()) {
    if (kernel->name == name && kernel->backend == backend) return kernel;
  }
  if (backend == Backend::kCpu) {
    for (const Kernel* kernel : emulated_kernels()) {
      if (kernel->name == name) return kernel;
    }
  }
  return nullptr;
}

// The kernel itself, or the one it hands this head dim to.
const Kernel& follow_redirect(const Kernel& kernel, const ForwardParams& p) {
  if (kernel.redirect.empty() || head_dim_fits(kernel, p.head_dim)) return kernel;
  return *find_kernel_for(kernel.backend, kernel.redirect);
}

// Which of the candidates take the call.
std::vector<std::string> takers(std::span<const Kernel* const> candidates, const ForwardParams& p,
                                const Target& target) {
  std::vector<std::string> names;
  for (const Kernel* kernel : candidates) {
    if (kernel->backend == target.backend && refusals(*kernel, p, target).empty()) {
      names.push_back(quoted(kernel->name));
    }
  }
  return names;
}

std::vector<std::string> quoted_names(std::span<const Kernel* const> named) {
  std::vector<std::string> names;
  for (const Kernel* kernel : named) names.push_back(quoted(kernel->name));
  return names;
}

// Throws: why there is no kernel of that name for arrays of that backend.
[[noreturn]] void refuse_name(std::string_view name, Backend backend) {
  if (const Kernel* kernel = find_kernel(name)) {
    throw ArgumentError(Kind::kValue, "kernel: " + quoted(name) + " takes arrays on the " +
                                          std::string(to_string(kernel->backend)) +
                                          " backend, these are on " +
                                          std::string(to_string(backend)));
  }
  std::vector<std::string> known = quoted_names(kernels());
  known.insert(known.begin(), "'auto'");
  for (const std::string_view cuda_name : core::cuda_kernel_names()) {
    if (cuda_name == name) {
      throw ArgumentError(Kind::kUnsupported,
                          "kernel " + quoted(name) +
                              " is a CUDA kernel, and this build has no CUDA backend: build "
                              "with FASTATTN_CUDA=ON (kernels of this build: " +
                              join(known, ", ") + ")");
    }
  }
  if (backend == Backend::kCpu) {
    for (const Kernel* each : emulated_kernels()) {
      if (find_kernel(each->name) == nullptr) known.push_back(quoted(each->name));
    }
  }
  throw ArgumentError(
      Kind::kValue, "kernel: unknown kernel " + quoted(name) + "; known are " + join(known, ", "));
}

// `kernel` or its redirect. Where that does not take the call, `offer` names those that do.
template <class Offer>
const Kernel& take(const Kernel& kernel, const ForwardParams& p, const Target& target,
                   const Offer& offer) {
  const Kernel& runner = follow_redirect(kernel, p);
  const std::vector<std::string> reasons = refusals(runner, p, target);
  if (reasons.empty()) return runner;
  const std::string via =
      &runner == &kernel ? "" : " (to which " + quoted(kernel.name) + " redirects)";
  const std::vector<std::string> names = offer();
  throw ArgumentError(
      Kind::kUnsupported,
      "kernel " + quoted(runner.name) + via + " does not take " + join(reasons, "; ") + "; " +
          (names.empty()
               ? "no kernel of the " + std::string(to_string(target.backend)) + " backend takes it"
               : "kernels that take it: " + join(names, ", ")));
}

const Kernel& choose_named(const ForwardParams& p, const Target& target, std::string_view name) {
  const Kernel* kernel = find_kernel_for(target.backend, name);
  if (kernel == nullptr) refuse_name(name, target.backend);
  return take(*kernel, p, target, [&] {
    std::vector<std::string> names = takers(kernels(), p, target);
    if (std::ranges::count(emulated_kernels(), kernel) != 0) {
      // Who asks for a rung may want another one, and not the CPU kernel alone.
      const std::vector<std::string> rungs = takers(emulated_kernels(), p, target);
      names.insert(names.end(), rungs.begin(), rungs.end());
    }
    return names;
  });
}

}  // namespace

std::string refusal(const Kernel& kernel, const ForwardParams& params, const Target& target) {
  core::validate(params);
  if (kernel.backend != target.backend) {
    return "arrays on " + std::string(to_string(target.backend)) + " (it is a kernel for " +
           std::string(to_string(kernel.backend)) + ")";
  }
  return join(refusals(kernel, params, target), "; ");
}

const Kernel* core::choose_auto(std::span<const Kernel* const> candidates,
                                const ForwardParams& params, const DeviceInfo* gpu,
                                std::vector<std::string>* why_not) {
  const Backend backend = gpu == nullptr ? Backend::kCpu : Backend::kCuda;
  const auto takes = [&](const Kernel& kernel) {
    return kernel.backend == backend && refusals(kernel, params, gpu).empty();
  };
  if (gpu != nullptr) {
    const GpuClass gpu_class = core::gpu_class(*gpu);
    for (const AutoRule& rule : auto_rules()) {
      if (!rule.holds(gpu_class, params)) continue;
      for (const Kernel* kernel : candidates) {
        if (kernel->name == rule.kernel && takes(*kernel)) return kernel;
      }
    }
  }
  // Ladder order is the order of speed where nothing else was measured.
  for (auto each = candidates.rbegin(); each != candidates.rend(); ++each) {
    const Kernel& kernel = **each;
    if (takes(kernel)) return &kernel;
    if (kernel.backend != backend) continue;
    why_not->push_back(quoted(kernel.name) + " does not take " +
                       join(refusals(kernel, params, gpu), "; "));
  }
  return nullptr;
}

const Kernel& core::choose_emulated(const ForwardParams& params, std::string_view name) {
  core::validate(params);
  for (const Kernel* kernel : emulated_kernels()) {
    if (kernel->name != name) continue;
    const Target host{.backend = Backend::kCpu};
    return take(*kernel, params, host, [&] { return takers(emulated_kernels(), params, host); });
  }
  const bool is_known = name == "auto" || find_kernel(name) != nullptr;
  throw ArgumentError(Kind::kValue,
                      "kernel: " +
                          (is_known ? quoted(name) + " is not a CUDA kernel to emulate; takes "
                                    : "unknown kernel " + quoted(name) + "; known are ") +
                          join(quoted_names(emulated_kernels()), ", "));
}

const Kernel& choose_kernel(const ForwardParams& params, const Target& target,
                            std::string_view name) {
  core::validate(params);
#if !FASTATTN_HAVE_CUDA
  if (target.backend == Backend::kCuda) {
    throw ArgumentError(Kind::kUnsupported,
                        "arrays are on a CUDA device, and this build has no CUDA backend: build "
                        "with FASTATTN_CUDA=ON");
  }
#endif
  if (name != "auto") return choose_named(params, target, name);
  std::vector<std::string> why_not;
  const TargetGpu gpu(target);
  const Kernel* kernel = core::choose_auto(kernels(), params, gpu.info(), &why_not);
  if (kernel != nullptr) return *kernel;
  throw ArgumentError(Kind::kUnsupported, "no kernel of the " +
                                              std::string(to_string(target.backend)) +
                                              " backend takes this call: " + join(why_not, ". "));
}

}  // namespace fastattn
