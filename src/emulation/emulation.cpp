#include "emulation/emulation.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <utility>

#include "core/choose.h"
#include "core/validate.h"
#include "emulation/gpu.h"
#include "emulation/guarded_memory.h"
#include "emulation/observer.h"

// What the two builds of the .cu files define.
#define FASTATTN_CUDA_KERNEL(name, symbol) extern const Kernel symbol;
namespace fastattn::emulated {
#include "cuda/kernels.def"
}  // namespace fastattn::emulated
namespace fastattn::checked {
#include "cuda/kernels.def"
}  // namespace fastattn::checked
#undef FASTATTN_CUDA_KERNEL

namespace fastattn {
namespace {

// As the CUDA kernel, but for arrays of the host, on no GPU.
Kernel on_host(Kernel kernel) {
  kernel.backend = Backend::kCpu;
  kernel.capabilities.min_compute_capability = 0;
  return kernel;
}

struct Pair {
  Kernel ordinary;
  Kernel checked;
};

const std::vector<Pair>& pairs() {
  static const std::vector<Pair> kPairs = {
#define FASTATTN_CUDA_KERNEL(name, symbol) {on_host(emulated::symbol), on_host(checked::symbol)},
#include "cuda/kernels.def"
#undef FASTATTN_CUDA_KERNEL
  };
  return kPairs;
}

}  // namespace

std::span<const Kernel* const> emulated_kernels() {
  static const std::vector<const Kernel*> kKernels = [] {
    std::vector<const Kernel*> kernels;
    for (const Pair& pair : pairs()) kernels.push_back(&pair.ordinary);
    return kernels;
  }();
  return kKernels;
}

namespace emulation {
namespace {

std::size_t bytes_of(DType dtype) {
  return dtype == DType::kFloat32 ? sizeof(float) : sizeof(std::uint16_t);
}

thread_local int used_gpu = 0;

// A tensor [B, H, length, dim] of any strides, in memory of its own for the run.
class GuardedTensor {
 public:
  GuardedTensor(const void* data, DType dtype, const Strides& stride, int batch, int heads,
                int length, int dim)
      : element_bytes_(bytes_of(dtype)),
        stride_(stride),
        batch_(batch),
        heads_(heads),
        length_(length),
        row_bytes_(dim * element_bytes_) {
    std::int64_t highest = dim;
    const std::array<std::pair<int, std::int64_t>, 3> axes = {
        {{batch, stride.batch}, {heads, stride.head}, {length, stride.row}}};
    for (const auto& [size, step] : axes) {
      (step < 0 ? lowest_ : highest) += static_cast<std::int64_t>(size - 1) * step;
    }
    if (batch == 0 || heads == 0 || length == 0) highest = lowest_ = 0;
    bytes_ = static_cast<std::size_t>(highest - lowest_) * element_bytes_;
    original_ = reinterpret_cast<std::uintptr_t>(data);
    memory_ = std::make_unique<GuardedMemory>(
        bytes_, original_ + static_cast<std::size_t>(lowest_) * element_bytes_);
  }

  // Element [0, 0, 0, 0].
  [[nodiscard]] std::byte* data() const { return memory_->data() + offset_of(0); }

  [[nodiscard]] Region region(const char* name, bool is_output) const {
    Region region(name, memory_->data(), bytes_, is_output, !is_output);
    for_each_row([&](std::int64_t element) { region.mark(offset_of(element), row_bytes_); });
    return region;
  }

  void copy_in() const {
    for_each_row([&](std::int64_t element) {
      std::memcpy(memory_->data() + offset_of(element), original(element), row_bytes_);
    });
  }
  void copy_out() const {
    for_each_row([&](std::int64_t element) {
      std::memcpy(original(element), memory_->data() + offset_of(element), row_bytes_);
    });
  }

 private:
  template <class F>
  void for_each_row(F&& f) const {
    for (std::int64_t b = 0; b < batch_; ++b) {
      for (std::int64_t h = 0; h < heads_; ++h) {
        for (std::int64_t row = 0; row < length_; ++row) {
          f(b * stride_.batch + h * stride_.head + row * stride_.row);
        }
      }
    }
  }

  [[nodiscard]] std::size_t offset_of(std::int64_t element) const {
    return static_cast<std::size_t>(element - lowest_) * element_bytes_;
  }
  [[nodiscard]] std::byte* original(std::int64_t element) const {
    return reinterpret_cast<std::byte*>(original_ +
                                        static_cast<std::size_t>(element) * element_bytes_);
  }

  std::size_t element_bytes_;
  Strides stride_;
  int batch_, heads_, length_;
  std::size_t row_bytes_;
  std::int64_t lowest_ = 0;  // element, from the first
  std::size_t bytes_ = 0;
  std::uintptr_t original_ = 0;
  std::unique_ptr<GuardedMemory> memory_;
};

}  // namespace

int current_gpu() { return used_gpu; }

void use_gpu(int ordinal) {
  static_cast<void>(kGpus.at(ordinal));  // throws
  used_gpu = ordinal;
}

Report run_checked(const ForwardParams& p, std::string_view name, std::uint64_t seed) {
  const Kernel& chosen = core::choose_emulated(p, name);
  const auto pair = std::ranges::find_if(
      pairs(), [&](const Pair& each) { return each.ordinary.name == chosen.name; });
  CheckedRun run(seed);
  if (core::is_empty(p)) return run.finish();
  const GuardedTensor q(p.q, p.dtype, p.q_stride, p.batch, p.heads_q, p.len_q, p.head_dim);
  const GuardedTensor k(p.k, p.dtype, p.k_stride, p.batch, p.heads_kv, p.len_kv, p.head_dim);
  const GuardedTensor v(p.v, p.dtype, p.v_stride, p.batch, p.heads_kv, p.len_kv, p.head_dim_v);
  const GuardedTensor out(p.out, p.dtype, p.out_stride, p.batch, p.heads_q, p.len_q, p.head_dim_v);
  const GuardedTensor lse(p.lse, DType::kFloat32,
                          {.batch = std::int64_t{p.heads_q} * p.len_q, .head = p.len_q, .row = 1},
                          p.lse == nullptr ? 0 : p.batch, p.heads_q, p.len_q, 1);
  Observer& observer = *current_observer();
  observer.add_region(q.region("q", false));
  observer.add_region(k.region("k", false));
  observer.add_region(v.region("v", false));
  observer.add_region(out.region("out", true));
  observer.add_region(lse.region("lse", true));
  for (const GuardedTensor* each : {&q, &k, &v, &out, &lse}) each->copy_in();

  ForwardParams params = p;
  params.q = q.data();
  params.k = k.data();
  params.v = v.data();
  params.out = out.data();
  params.lse = p.lse == nullptr ? nullptr : reinterpret_cast<float*>(lse.data());
  pair->checked.run(params, nullptr);
  out.copy_out();
  lse.copy_out();
  return run.finish();
}

}  // namespace emulation
}  // namespace fastattn
