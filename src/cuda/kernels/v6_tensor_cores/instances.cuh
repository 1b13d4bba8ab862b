// What V6's instances offer to the file that chooses among them.
#pragma once

#include <algorithm>

#include "fastattn/fastattn.h"

namespace fastattn::cuda::v6 {

// For float16 and bfloat16. kHeadDim: at least that of q and k, and that of v.
namespace half {
template <DType kType, int kHeadDim>
struct Instance {
  static bool takes(const ForwardParams& p) {
    return p.dtype == kType && std::max(p.head_dim, p.head_dim_v) <= kHeadDim;
  }
  static LaunchPlan plan(const ForwardParams& p);
  static void run(const ForwardParams& p, void* stream);
};
}  // namespace half

// For float32.
namespace split {
template <int kHeadDim>
struct Instance {
  static bool takes(const ForwardParams& p) {
    return p.dtype == DType::kFloat32 && std::max(p.head_dim, p.head_dim_v) <= kHeadDim;
  }
  static LaunchPlan plan(const ForwardParams& p);
  static void run(const ForwardParams& p, void* stream);
};
}  // namespace split

#define FASTATTN_INSTANCE(form, ...) extern template struct form::Instance<__VA_ARGS__>;
#include "cuda/kernels/v6_tensor_cores/instances.def"
#undef FASTATTN_INSTANCE

}  // namespace fastattn::cuda::v6
