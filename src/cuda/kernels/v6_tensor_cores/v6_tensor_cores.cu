// V6: FlashAttention-2 on tensor cores, as every GPU since sm_80 has them.
//
// Idea            A warp multiplies matrices of 16 x 16 by 16 x 8 in one instruction. Its results
//                 lie in registers just so that the scores of one product are, as weights, an
//                 operand of the next.
// New since V5    mma.sync and ldmatrix in the place of multiply-adds and loads; float16 and
//                 bfloat16; and float32 at its own accuracy, each number as two of float16.
// Who owns what   block: a tile of query rows of one head. warp: 16 or 32 of its rows. lane: of
//                 each 8 x 8 results two in a row, columns 2 (lane % 4) and the next.
// Limit now       docs/ladder/v6.md tells what holds each form back.
// Measured        0.432 ms, 119 TFLOP/s, error 3.0e-7 (float32, H200, B=4, H=12, M=N=2048, D=64)
// Read more       docs/ladder/v6.md; half.cuh, split.cuh: the two forms
#include "cuda/kernels/v6_tensor_cores/instances.cuh"
#include "fastattn/fastattn.h"

namespace fastattn::cuda {
namespace {

template <class F>
void dispatch(const ForwardParams& p, F&& f) {
#define FASTATTN_INSTANCE(form, ...) \
  if (v6::form::Instance<__VA_ARGS__>::takes(p)) return f(v6::form::Instance<__VA_ARGS__>{});
#include "cuda/kernels/v6_tensor_cores/instances.def"
#undef FASTATTN_INSTANCE
}

LaunchPlan plan(const ForwardParams& p) {
  LaunchPlan result;
  dispatch(p, [&]<class Instance>(Instance) { result = Instance::plan(p); });
  return result;
}

void run(const ForwardParams& p, void* stream) {
  dispatch(p, [&]<class Instance>(Instance) { Instance::run(p, stream); });
}

constexpr std::uint32_t bit(DType dtype) { return 1U << static_cast<unsigned>(dtype); }

}  // namespace

extern const Kernel v6_tensor_cores;
const Kernel v6_tensor_cores = {
    .name = "v6",
    .title = "tensor cores (mma.sync): float16, bfloat16, and float32 as two float16 parts",
    .arithmetic =
        "float16, bfloat16: products on tensor cores, float32 sums, weights rounded to "
        "the dtype; float32: each operand as two float16 parts, three products, sums of "
        "at most 32 keys",
    .backend = Backend::kCuda,
    .capabilities = {.dtypes = bit(DType::kFloat32) | bit(DType::kFloat16) | bit(DType::kBFloat16),
                     .head_dim_max = 256,
                     .head_dim_v_differs = true,
                     .lengths_differ = true,
                     .grouped_heads = true,
                     .causal = true,
                     .window = true,
                     .min_compute_capability = 80},
    .plan = plan,
    .run = run,
};

}  // namespace fastattn::cuda
