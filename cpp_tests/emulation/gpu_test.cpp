// Kernels that choose by the GPU: on every emulated one the results are right and nothing is found.
#include "emulation/gpu.h"

#include <gtest/gtest.h>

#include <limits>
#include <ostream>
#include <random>
#include <stdexcept>

#include "core/calls.h"
#include "cpu/array.h"
#include "cpu/attention.h"
#include "emulation/emulation.h"
#include "fastattn/fastattn.h"

namespace fastattn::testing {
namespace {

// Runs what follows as on the emulated GPU of a compute capability.
class OnGpu {
 public:
  explicit OnGpu(int compute_capability) : before_(emulation::current_gpu()) {
    int ordinal = 0;
    while (emulation::kGpus.at(ordinal).compute_capability != compute_capability) ++ordinal;
    emulation::use_gpu(ordinal);
  }
  ~OnGpu() { emulation::use_gpu(before_); }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;

 private:
  int before_;
};

const Kernel& v5() {
  for (const Kernel* kernel : emulated_kernels()) {
    if (kernel->name == "v5") return *kernel;
  }
  throw std::logic_error("there is no v5");
}

// Every shape of V5 with the GPUs that use it; docs/ladder/v5.md has the table.
struct Case {
  int compute_capability, head_dim, head_dim_v;
  int block_q, threads;
  std::size_t bytes;
};

std::ostream& operator<<(std::ostream& stream, const Case& c) {
  return stream << "sm_" << c.compute_capability << "_D" << c.head_dim << "_Dv" << c.head_dim_v;
}

class RegisterTiles : public ::testing::TestWithParam<Case> {
 protected:
  // In both builds, with grouped heads.
  static void expect_right(const Case& c, int len_q, int len_kv, const Mask& mask, Layout layout) {
    std::mt19937 generator(1);
    const auto array = [&](int heads, int length, int dim) {
      return Array(DType::kFloat32, 1, heads, length, dim, layout).randomise(generator, 1, 0.25F);
    };
    const Array q = array(2, len_q, c.head_dim);
    const Array k = array(1, len_kv, c.head_dim), v = array(1, len_kv, c.head_dim_v);
    const float scale = default_scale(q);
    Output checked(q, v, layout), ordinary(q, v, layout);
    const emulation::Report report =
        emulation::run_checked(params_of(q, k, v, checked, scale, mask), "v5", 1);
    for (const emulation::Finding& each : report.findings) {
      ADD_FAILURE() << each.kind << ": " << each.message << " [line " << each.line << "]";
    }
    EXPECT_EQ(report.counts.shared_read_conflicts, 0);
    if (layout == Layout::kContiguous && c.head_dim % 4 == 0 && c.head_dim_v % 4 == 0) {
      EXPECT_EQ(report.counts.shared_write_conflicts, 0);
    }
    ASSERT_EQ(report.launches.size(), 1U);
    EXPECT_EQ(report.launches[0].blocks, 2 * ((len_q - 1) / c.block_q + 1));
    EXPECT_EQ(report.launches[0].threads, c.threads);
    EXPECT_EQ(report.launches[0].dynamic_shared_bytes, c.bytes);
    expect_close(checked, q, k, v, scale, mask);
    EXPECT_EQ(checked.out.count_stray_writes(), 0);

    forward(params_of(q, k, v, ordinary, scale, mask), {}, "v5");
    expect_close(ordinary, q, k, v, scale, mask);
  }
};

TEST_P(RegisterTiles, AreRight) {
  const OnGpu gpu(GetParam().compute_capability);
  expect_right(GetParam(), GetParam().block_q + 1, 141, {}, Layout::kContiguous);
}

TEST_P(RegisterTiles, AreRightUnderMasks) {
  const OnGpu gpu(GetParam().compute_capability);
  expect_right(GetParam(), 20, 300, {.causal = true}, Layout::kPadded);
  expect_right(GetParam(), 50, 30, {.causal = true, .window_left = 9}, Layout::kContiguous);
}

INSTANTIATE_TEST_SUITE_P(
    OnGpus, RegisterTiles,
    ::testing::Values(Case{90, 64, 64, 128, 128, 114'688}, Case{90, 256, 1, 128, 128, 212'992},
                      Case{90, 128, 128, 128, 256, 229'376}, Case{90, 192, 128, 128, 256, 196'608},
                      Case{90, 256, 65, 128, 256, 229'376}, Case{90, 8, 200, 64, 256, 172'032},
                      Case{80, 64, 64, 128, 128, 81'920}, Case{80, 256, 64, 64, 128, 131'072},
                      Case{80, 128, 128, 128, 256, 163'840}, Case{80, 192, 128, 64, 128, 114'688},
                      Case{80, 256, 256, 64, 256, 98'304}, Case{86, 64, 64, 128, 128, 81'920},
                      Case{86, 96, 40, 128, 128, 98'304}, Case{86, 128, 64, 64, 128, 98'304},
                      Case{86, 192, 128, 64, 256, 81'920}, Case{86, 256, 256, 64, 256, 98'304},
                      Case{75, 64, 64, 128, 128, 65'536}, Case{75, 65, 1, 64, 128, 57'344},
                      Case{75, 128, 128, 64, 128, 65'536}, Case{75, 129, 64, 32, 128, 45'056},
                      Case{75, 256, 256, 32, 128, 57'344}),
    ::testing::PrintToStringParamName());

// log2(e) times the scale is beyond float's range: it must not make infinity, nor a score of 0 NaN.
TEST(RegisterTilesOnGpus, TakeEveryScale) {
  const Array keys = Array(DType::kFloat32, 1, 1, 70, 64).fill([](int, int, int key, int d) {
    return d == 0 ? 0.25F * static_cast<float>(key % 3) : 0.0F;
  });
  const Array v = Array(DType::kFloat32, 1, 1, 70, 64).fill([](int, int, int key, int) {
    return static_cast<float>(key);
  });
  for (const float factor : {0.0F, 1.0F, -1.0F}) {
    const Array q = Array(DType::kFloat32, 1, 1, 20, 64).fill([&](int, int, int, int d) {
      return d == 0 ? factor : 0.0F;
    });
    for (const float scale : {2e38F, 3e38F, std::numeric_limits<float>::max(), -3e38F}) {
      SCOPED_TRACE(::testing::Message() << "q " << factor << ", scale " << scale);
      Output found(q, v, Layout::kContiguous);
      forward(params_of(q, keys, v, found, scale, {}), {}, "v5");
      expect_close(found, q, keys, v, scale);
    }
  }
}

// Whatever the head dims, there is a shape that fits.
TEST(RegisterTilesOnGpus, FitAllHeadDims) {
  for (const emulation::Gpu& each : emulation::kGpus) {
    const OnGpu gpu(each.compute_capability);
    for (int dim = 1; dim <= 256; ++dim) {
      for (int dim_v = 1; dim_v <= 256; ++dim_v) {
        const LaunchPlan plan = v5().plan(call({.head_dim = dim, .head_dim_v = dim_v}));
        ASSERT_LE(plan.dynamic_shared_bytes, each.shared_bytes_per_block)
            << "sm_" << each.compute_capability << " " << dim << " " << dim_v;
      }
    }
  }
}

}  // namespace
}  // namespace fastattn::testing
