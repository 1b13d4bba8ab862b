// Every CUDA kernel against float64 in each of its dtypes, on a GPU.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/calls.h"
#include "core/choose.h"
#include "cpu/attention.h"
#include "cuda/on_device.h"
#include "fastattn/fastattn.h"

namespace fastattn::testing {
namespace {

#define CUDA_OK(call) ASSERT_EQ(call, cudaSuccess) << cudaGetErrorString(cudaGetLastError())

struct Implementation {
  const Kernel* kernel;
  DType dtype;
};

void PrintTo(const Implementation& x, std::ostream* stream) {
  *stream << x.kernel->name << " " << to_string(x.dtype);
}

std::vector<Implementation> implementations() {
  std::vector<Implementation> all;
  for (const Kernel* kernel : kernels()) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      if (kernel->backend == Backend::kCuda && kernel->capabilities.takes(dtype)) {
        all.push_back({kernel, dtype});
      }
    }
  }
  return all;
}

// One shape, square unless told otherwise.
struct Sizes {
  int batch = 1, heads_q = 2, heads_kv = 2, len_q = 70, len_kv = 70, dim = 64;
  DType dtype = DType::kFloat32;
};

struct Inputs {
  Array q, k, v;

  Inputs(const Sizes& s, Layout layout, float mean = 0.0F)
      : q(s.dtype, s.batch, s.heads_q, s.len_q, s.dim, layout),
        k(s.dtype, s.batch, s.heads_kv, s.len_kv, s.dim, layout),
        v(s.dtype, s.batch, s.heads_kv, s.len_kv, s.dim, layout) {
    std::mt19937 generator(20240531);
    for (Array* array : {&q, &k, &v}) array->randomise(generator, 1.0F, mean);
  }
  explicit Inputs(const Sizes& s) : Inputs(s, Layout::kContiguous) {}

  [[nodiscard]] float scale() const { return default_scale(q); }
};

class GpuForward : public ::testing::TestWithParam<Implementation> {
 protected:
  void SetUp() override {
    if (cuda_devices().empty()) GTEST_SKIP() << "no CUDA device";
  }

  [[nodiscard]] bool takes_different_lengths() const {
    return GetParam().kernel->capabilities.lengths_differ;
  }
  [[nodiscard]] static std::string_view kernel() { return GetParam().kernel->name; }
  [[nodiscard]] static Sizes sized(Sizes sizes) {
    sizes.dtype = GetParam().dtype;
    return sizes;
  }

  [[nodiscard]] Output run(const Inputs& x, float scale, Layout out = Layout::kContiguous) const {
    DeviceCall call(x.q, x.k, x.v, scale, out);
    forward(call.params, {.backend = Backend::kCuda}, kernel());
    return call.fetch();
  }
  [[nodiscard]] Output run(const Inputs& x) const { return run(x, x.scale()); }

  void check(const Inputs& x, float scale, Layout out = Layout::kContiguous) const {
    expect_close(run(x, scale, out), x.q, x.k, x.v, scale);
  }
  void check(const Inputs& x) const { check(x, x.scale()); }
};

TEST_P(GpuForward, RaggedLengths) {
  for (const int len_q : {1, 17, 63, 64, 65, 127, 200}) {
    for (const int len_kv : {1, 17, 63, 64, 65, 127, 200}) {
      if (len_q != len_kv && !takes_different_lengths()) continue;
      SCOPED_TRACE(std::to_string(len_q) + " x " + std::to_string(len_kv));
      check(Inputs(sized({.len_q = len_q, .len_kv = len_kv})));
    }
  }
}

TEST_P(GpuForward, LongRows) { check(Inputs(sized({.len_q = 1000, .len_kv = 1000}))); }

TEST_P(GpuForward, HeadDims) {
  for (const int dim : {1, 2, 3, 5, 8, 12, 31, 32, 33, 40, 63, 64, 65, 80, 96, 100, 128}) {
    SCOPED_TRACE(dim);
    check(Inputs(sized({.dim = dim})));
  }
}

TEST_P(GpuForward, StridedAndMisalignedViews) {
  for (const Layout layout : {Layout::kLengthFirst, Layout::kPadded, Layout::kReversed}) {
    for (const int dim : {64, 33}) {
      SCOPED_TRACE("layout " + std::to_string(static_cast<int>(layout)) +
                   " D=" + std::to_string(dim));
      const Inputs x(
          sized({.batch = 2, .heads_q = 3, .heads_kv = 3, .len_q = 97, .len_kv = 97, .dim = dim}),
          layout);
      check(x, x.scale(), layout);
    }
  }
}

// The scalar and the 16-byte copies of one kernel do the same arithmetic.
TEST_P(GpuForward, AlignmentDoesNotChangeABit) {
  const Sizes sizes = sized({.len_q = 130, .len_kv = 130});
  const Output aligned = run(Inputs(sizes));
  const Output padded = run(Inputs(sizes, Layout::kPadded));
  EXPECT_EQ(aligned.out.values(), padded.out.values());
  EXPECT_EQ(aligned.lse, padded.lse);
}

TEST_P(GpuForward, GroupedHeads) {
  for (const int heads_kv : {1, 2, 3}) {
    SCOPED_TRACE(heads_kv);
    check(Inputs(sized({.batch = 2, .heads_q = 6, .heads_kv = heads_kv})));
  }
}

TEST_P(GpuForward, MeanAndScale) {
  const Inputs x(sized({.len_q = 150, .len_kv = 150}), Layout::kContiguous, 0.5F);
  for (const float scale : {0.0F, -0.125F, 0.125F, 1.0F, 30.0F}) {
    SCOPED_TRACE(scale);
    check(x, scale);
  }
}

TEST_P(GpuForward, NoKeys) {
  if (!takes_different_lengths()) {
    EXPECT_THROW(static_cast<void>(run(Inputs(sized({.len_kv = 0})))), ArgumentError);
    return;
  }
  const Output found = run(Inputs(sized({.len_kv = 0})));
  for (const float value : found.out.values()) ASSERT_EQ(value, 0.0F);
  for (const float value : found.lse) ASSERT_EQ(value, -kInf);
}

// A022. Equal scores of 1.4e11: an exponent that is not exactly 0 would be thousands. The output is
// a sum of `length` equal terms: exact for one, else within a rounding for each.
TEST_P(GpuForward, HugeEqualScores) {
  const float huge = GetParam().dtype == DType::kFloat16 ? 60000.0F : 133120.0F;
  const double score = double{huge} * huge * 8;
  for (const int length : {1, 5, 70}) {
    Inputs x(sized({.heads_q = 1, .heads_kv = 1, .len_q = length, .len_kv = length}));
    for (Array* array : {&x.q, &x.k, &x.v}) array->fill(huge);
    const float tolerance = length == 1 ? 0.0F : huge * 0x1p-24F * static_cast<float>(length);
    const Output found = run(x);
    for (const float value : found.out.values()) ASSERT_NEAR(value, huge, tolerance);
    for (const float value : found.lse) ASSERT_NEAR(value / score, 1.0, 1e-6);
  }
}

// A007, without the mask: large negative scores are as good as any.
TEST_P(GpuForward, VeryNegativeScores) {
  Inputs x(sized({.heads_q = 1, .heads_kv = 1, .len_q = 88, .len_kv = 88}));
  x.q.fill([](int, int, int, int d) { return d == 0 ? 1.0F : 0.0F; });
  x.k.fill([](int, int, int, int d) { return d == 0 ? -1000.0F : 0.0F; });
  x.v.fill([](int, int, int key, int) { return key; });  // numbers of each dtype
  const Output found = run(x, 1.0F);
  for (const float value : found.out.values()) ASSERT_NEAR(value, 43.5F, 1e-4F);
  for (const float value : found.lse) ASSERT_NEAR(value, -1000.0F + std::log(88.0F), 1e-3F);
}

TEST_P(GpuForward, NanReachesOnlyTheHeadThatSeesIt) {
  Inputs x(sized({}));
  const Output clean = run(x);
  for (int d = 0; d < 64; ++d) x.k.set(0, 1, 69, d, kNaN);
  const Output found = run(x);
  for (int i = 0; i < 70; ++i) {
    for (int d = 0; d < 64; ++d) {
      ASSERT_EQ(found.out.get(0, 0, i, d), clean.out.get(0, 0, i, d));
      ASSERT_TRUE(std::isnan(found.out.get(0, 1, i, d)));
    }
  }
}

// A row whose scores are all -inf, or -inf for a whole tile, or +inf somewhere.
TEST_P(GpuForward, InfiniteScores) {
  for (const int infinite : {32, 70}) {
    Inputs x(sized({}));
    x.q.fill(1.0F);
    for (int key = 0; key < infinite; ++key) x.k.set(0, 0, key, 3, -kInf);
    x.k.set(0, 1, 40, 3, kInf);
    SCOPED_TRACE(infinite);
    check(x);
  }
}

// A021. What an earlier call left in shared memory must not reach a shorter one.
TEST_P(GpuForward, StaleSharedMemory) {
  Inputs poison(sized({.batch = 4, .heads_q = 12, .heads_kv = 12, .len_q = 128, .len_kv = 128}));
  for (Array* array : {&poison.q, &poison.k, &poison.v}) array->fill(kNaN);
  for (int length = 1; length <= 17; ++length) {
    static_cast<void>(run(poison));
    check(Inputs(sized({.len_q = length, .len_kv = length})));
  }
}

TEST_P(GpuForward, RepeatsBitForBit) {
  const Inputs x(sized({.batch = 2, .heads_q = 12, .heads_kv = 12, .len_q = 300, .len_kv = 300}));
  const Output first = run(x);
  for (int round = 0; round < 5; ++round) {
    const Output again = run(x);
    ASSERT_EQ(first.out.values(), again.out.values());
    ASSERT_EQ(first.lse, again.lse);
  }
}

// A055. More (batch, head) pairs than the y and z dimensions of a grid hold.
TEST_P(GpuForward, ManyHeads) {
  check(Inputs(sized({.batch = 8200, .heads_q = 8, .heads_kv = 8, .len_q = 2, .len_kv = 2})));
}

TEST_P(GpuForward, LseIsOptional) {
  const Inputs x(sized({.len_q = 40, .len_kv = 40}));
  DeviceCall call(x.q, x.k, x.v, x.scale());
  call.params.lse = nullptr;
  forward(call.params, {.backend = Backend::kCuda}, kernel());
  EXPECT_EQ(call.fetch().out.values(), run(x).out.values());
  EXPECT_TRUE(std::isnan(call.output.lse[0]));
}

TEST_P(GpuForward, RunsOnTheStreamItIsGivenAndInACapturedGraph) {
  const Inputs x(sized({.len_q = 100, .len_kv = 100}));
  DeviceCall call(x.q, x.k, x.v, x.scale());
  cudaStream_t stream = nullptr;
  CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  forward(call.params, {.backend = Backend::kCuda, .stream = stream}, kernel());
  cudaGraph_t graph = nullptr;
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  CUDA_OK(cudaDeviceSynchronize());
  EXPECT_TRUE(std::isnan(call.fetch().out.get(0, 0, 0, 0))) << "captured work must not have run";
  cudaGraphExec_t executable = nullptr;
  CUDA_OK(cudaGraphInstantiate(&executable, graph, 0));
  for (int round = 0; round < 3; ++round) CUDA_OK(cudaGraphLaunch(executable, stream));
  CUDA_OK(cudaStreamSynchronize(stream));
  EXPECT_EQ(call.fetch().out.values(), run(x).out.values());
  CUDA_OK(cudaGraphExecDestroy(executable));
  CUDA_OK(cudaGraphDestroy(graph));
  CUDA_OK(cudaStreamDestroy(stream));
}

TEST_P(GpuForward, StaleErrorIsNotOurs) {
  void* pointer = nullptr;
  ASSERT_NE(cudaMalloc(&pointer, std::size_t{1} << 60), cudaSuccess);  // leaves its error behind
  check(Inputs(sized({.len_q = 33, .len_kv = 33})));
  static_cast<void>(cudaGetLastError());
}

INSTANTIATE_TEST_SUITE_P(Kernels, GpuForward, ::testing::ValuesIn(implementations()),
                         [](const auto& info) {
                           return std::string(info.param.kernel->name) + "_" +
                                  std::string(to_string(info.param.dtype));
                         });

class Gpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_devices().empty()) GTEST_SKIP() << "no CUDA device";
  }
};

// What it chooses for GPUs that are not here: core/auto_test.cpp.
TEST_F(Gpu, AutoChoosesForThisGpu) {
  const Target target{.backend = Backend::kCuda, .device = 0};
  const DeviceInfo gpu = cuda_devices()[0];
  for (const Shape& shape :
       {Shape{}, Shape{.len_q = 1}, Shape{.len_q = 64, .len_kv = 64},
        Shape{.head_dim = 80, .head_dim_v = 80}, Shape{.head_dim = 200, .head_dim_v = 200}}) {
    std::vector<std::string> why_not;
    const Kernel* expected = core::choose_auto(kernels(), call(shape), &gpu, &why_not);
    ASSERT_NE(expected, nullptr);
    EXPECT_EQ(&choose_kernel(call(shape), target), expected);
    EXPECT_EQ(refusal(*expected, call(shape), target), "");
  }
  EXPECT_EQ(choose_kernel(call({.head_dim = 80, .head_dim_v = 80}), target, "v4").name, "v2");
}

TEST_F(Gpu, RefusalsNameWhatWouldWork) {
  const Target target{.backend = Backend::kCuda};
  ForwardParams causal = call();
  causal.mask.causal = true;
  try {
    choose_kernel(causal, target, "v4");
    FAIL();
  } catch (const ArgumentError& error) {
    EXPECT_EQ(error.kind(), ArgumentError::Kind::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("causal"), std::string::npos) << error.what();
  }
  try {
    choose_kernel(call({.len_kv = 1024}), target, "v0");
    FAIL();
  } catch (const ArgumentError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("equal lengths"), std::string::npos) << text;
    EXPECT_NE(text.find("'v1', 'v2', 'v3', 'v4'"), std::string::npos) << text;
  }
}

TEST_F(Gpu, ErrorOfScratchThatDoesNotFitAndTheNextCallWorks) {
  // 2^19 rows of 2^19 scores: 1 TiB. Nothing is read before the allocation fails.
  const OnDevice buffer(std::vector<float>(std::size_t{1} << 19, 0.0F));
  ForwardParams p = call({.batch = 1,
                          .heads_q = 1,
                          .heads_kv = 1,
                          .len_q = 1 << 19,
                          .len_kv = 1 << 19,
                          .head_dim = 1,
                          .head_dim_v = 1});
  p.q = p.k = p.v = p.out = buffer.data();
  try {
    forward(p, {.backend = Backend::kCuda}, "v0");
    FAIL();
  } catch (const CudaError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("'v0'"), std::string::npos) << text;
    EXPECT_NE(text.find("1099511627776 bytes"), std::string::npos) << text;
    EXPECT_NE(text.find("cudaErrorMemoryAllocation"), std::string::npos) << text;
  }
  const Inputs x({});
  DeviceCall next(x.q, x.k, x.v, x.scale());
  forward(next.params, {.backend = Backend::kCuda}, "v0");
  expect_close(next.fetch(), x.q, x.k, x.v, x.scale());
}

TEST_F(Gpu, TheCurrentDeviceIsLeftAsItWas) {
  if (cuda_devices().size() < 2) GTEST_SKIP() << "fewer than 2 GPUs";
  const Inputs x({});
  CUDA_OK(cudaSetDevice(1));
  DeviceCall there(x.q, x.k, x.v, x.scale());
  CUDA_OK(cudaSetDevice(0));
  for (const Kernel* kernel : kernels()) {
    if (kernel->backend != Backend::kCuda) continue;
    forward(there.params, {.backend = Backend::kCuda, .device = 1}, kernel->name);
    int device = -1;
    CUDA_OK(cudaGetDevice(&device));
    EXPECT_EQ(device, 0) << kernel->name;
  }
  CUDA_OK(cudaSetDevice(1));
  CUDA_OK(cudaDeviceSynchronize());
  expect_close(there.fetch(), x.q, x.k, x.v, x.scale());
  CUDA_OK(cudaSetDevice(0));
}

TEST_F(Gpu, DevicesAreDescribed) {
  for (const DeviceInfo& device : cuda_devices()) {
    EXPECT_FALSE(device.name.empty());
    EXPECT_GE(device.compute_capability, 75);
    EXPECT_GT(device.multiprocessors, 0);
    EXPECT_GE(device.shared_bytes_per_block, 48U * 1024);
    EXPECT_GT(device.memory_bytes, 0U);
  }
  EXPECT_GE(cuda_driver_version(), 12000);
}

}  // namespace
}  // namespace fastattn::testing
