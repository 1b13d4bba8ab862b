// Validation, the choice of a kernel and what its errors say.
#include <gtest/gtest.h>

#include <climits>
#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <string>

#include "core/calls.h"
#include "fastattn/fastattn.h"

namespace fastattn::testing {
namespace {

using Kind = ArgumentError::Kind;

void expect_error(Kind kind, const std::vector<std::string>& parts,
                  const std::function<void()>& run) {
  try {
    run();
    FAIL() << "no error";
  } catch (const ArgumentError& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << "'" << part << "' is missing in: " << error.what();
    }
  }
}

TEST(Registry, NamesAreUniqueAndFound) {
  std::set<std::string_view> names;
  for (const Kernel* kernel : kernels()) {
    EXPECT_TRUE(names.insert(kernel->name).second) << kernel->name;
    EXPECT_EQ(find_kernel(kernel->name), kernel);
    EXPECT_FALSE(kernel->title.empty());
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      if (!kernel->capabilities.takes(dtype)) continue;
      EXPECT_NE(kernel->arithmetic.find(to_string(dtype)), std::string_view::npos)
          << kernel->name << ": '" << kernel->arithmetic << "' says nothing of "
          << to_string(dtype);
    }
    EXPECT_NE(kernel->run, nullptr);
    EXPECT_LE(kernel->capabilities.head_dim_min, kernel->capabilities.head_dim_max);
    EXPECT_TRUE(kernel->redirect.empty() || find_kernel(kernel->redirect) != nullptr);
    EXPECT_EQ(kernel->plan != nullptr, kernel->backend == Backend::kCuda);
  }
  EXPECT_TRUE(names.contains("cpu"));
  EXPECT_EQ(find_kernel("v99"), nullptr);
}

TEST(Choose, AutoOnTheCpuIsTheCpuKernel) {
  EXPECT_EQ(choose_kernel(call(), {}).name, "cpu");
  EXPECT_EQ(choose_kernel(call(), {}, "cpu").name, "cpu");
}

TEST(Choose, UnknownKernelListsTheKnown) {
  expect_error(Kind::kValue, {"kernel", "'v99'", "'auto'", "'cpu'"},
               [] { choose_kernel(call(), {}, "v99"); });
}

TEST(Choose, HeadDimBeyondTheKernel) {
  expect_error(Kind::kUnsupported, {"head_dim 512", "1 to 256"},
               [] { choose_kernel(call({.head_dim = 512, .head_dim_v = 512}), {}, "cpu"); });
  expect_error(Kind::kUnsupported, {"head_dim 512", "1 to 256"},
               [] { choose_kernel(call({.head_dim = 512, .head_dim_v = 512}), {}); });
}

TEST(Choose, CudaKernelWithCpuArrays) {
  if (!emulated_kernels().empty()) {
    const Kernel& kernel = choose_kernel(call(), {}, "v4");
    EXPECT_EQ(kernel.name, "v4");
    EXPECT_EQ(kernel.backend, Backend::kCpu);
    EXPECT_EQ(choose_kernel(call({.head_dim = 80, .head_dim_v = 80}), {}, "v4").name, "v2");
    expect_error(Kind::kUnsupported, {"'v2'", "'v4' redirects", "head_dim 129", "'cpu'"},
                 [] { choose_kernel(call({.head_dim = 129, .head_dim_v = 129}), {}, "v4"); });
    return;
  }
#if FASTATTN_HAVE_CUDA
  expect_error(Kind::kValue, {"'v4'", "cuda", "cpu"}, [] { choose_kernel(call(), {}, "v4"); });
#else
  expect_error(Kind::kUnsupported, {"'v4'", "CUDA", "FASTATTN_CUDA=ON"},
               [] { choose_kernel(call(), {}, "v4"); });
#endif
}

// Never "auto": AutoOnTheCpuIsTheCpuKernel.
TEST(Registry, EmulatedKernelsAreTheCudaKernelsForTheHost) {
  for (const Kernel* kernel : emulated_kernels()) {
    EXPECT_EQ(kernel->backend, Backend::kCpu) << kernel->name;
    EXPECT_EQ(kernel->capabilities.min_compute_capability, 0) << kernel->name;
    const Kernel* on_gpu = find_kernel(kernel->name);  // null without CUDA
    if (on_gpu == nullptr) continue;
    EXPECT_EQ(on_gpu->backend, Backend::kCuda) << kernel->name;
    EXPECT_EQ(on_gpu->title, kernel->title);
    EXPECT_EQ(on_gpu->arithmetic, kernel->arithmetic);
    EXPECT_EQ(on_gpu->redirect, kernel->redirect);
  }
}

#if !FASTATTN_HAVE_CUDA
TEST(Choose, CudaArraysInACpuOnlyBuild) {
  expect_error(Kind::kUnsupported, {"CUDA", "FASTATTN_CUDA=ON"},
               [] { choose_kernel(call(), {.backend = Backend::kCuda}); });
}
#endif

TEST(Choose, RefusalOfTheOtherBackendSaysSo) {
  for (const Kernel* kernel : kernels()) {
    const Target other{.backend =
                           kernel->backend == Backend::kCpu ? Backend::kCuda : Backend::kCpu};
    EXPECT_NE(refusal(*kernel, call(), other), "") << kernel->name;
  }
}

struct Wrong {
  const char* name;
  std::vector<std::string> parts;
  std::function<void(ForwardParams&)> change;
};

class Validate : public ::testing::TestWithParam<Wrong> {};

TEST_P(Validate, Throws) {
  ForwardParams params = call();
  GetParam().change(params);
  expect_error(Kind::kValue, GetParam().parts, [&] { choose_kernel(params, {}); });
  expect_error(Kind::kValue, GetParam().parts, [&] { forward(params); });
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

INSTANTIATE_TEST_SUITE_P(
    Core, Validate,
    ::testing::Values(
        Wrong{"batch", {"batch", "-1"}, [](ForwardParams& p) { p.batch = -1; }},
        Wrong{"heads_q", {"heads_q", "-2"}, [](ForwardParams& p) { p.heads_q = -2; }},
        Wrong{"heads_kv", {"heads_kv", "-1"}, [](ForwardParams& p) { p.heads_kv = -1; }},
        Wrong{"len_q", {"len_q", "-1"}, [](ForwardParams& p) { p.len_q = -1; }},
        Wrong{"len_kv", {"len_kv", "-7"}, [](ForwardParams& p) { p.len_kv = -7; }},
        Wrong{"len_q_long", {"len_q", "2147483392"}, [](ForwardParams& p) { p.len_q = INT_MAX; }},
        Wrong{"len_kv_long",
              {"len_kv", "2147483393"},
              [](ForwardParams& p) { p.len_kv = kMaxLength + 1; }},
        Wrong{"head_dim", {"head_dim", "0"}, [](ForwardParams& p) { p.head_dim = 0; }},
        Wrong{"head_dim_v", {"head_dim_v", "0"}, [](ForwardParams& p) { p.head_dim_v = 0; }},
        Wrong{"group", {"heads", "12", "5"}, [](ForwardParams& p) { p.heads_kv = 5; }},
        Wrong{"no_kv_heads", {"heads", "12", "0"}, [](ForwardParams& p) { p.heads_kv = 0; }},
        Wrong{"scale_nan", {"scale", "nan"}, [](ForwardParams& p) { p.scale = kNan; }},
        Wrong{"scale_inf", {"scale", "inf"}, [](ForwardParams& p) { p.scale = INFINITY; }},
        Wrong{"left", {"window_left", "-3"}, [](ForwardParams& p) { p.mask.window_left = -3; }},
        Wrong{"right", {"window_right", "-2"}, [](ForwardParams& p) { p.mask.window_right = -2; }},
        Wrong{"dtype", {"dtype", "33"}, [](ForwardParams& p) { p.dtype = static_cast<DType>(33); }},
        Wrong{"too_many",
              {"q", "64 bits"},
              [](ForwardParams& p) { p.batch = p.len_q = p.heads_q = p.heads_kv = 1 << 30; }},
        Wrong{"q_null", {"q", "null"}, [](ForwardParams& p) { p.q = nullptr; }},
        Wrong{"k_null", {"k", "null"}, [](ForwardParams& p) { p.k = nullptr; }},
        Wrong{"v_null", {"v", "null"}, [](ForwardParams& p) { p.v = nullptr; }},
        Wrong{"out_null", {"out", "null"}, [](ForwardParams& p) { p.out = nullptr; }}),
    [](const auto& info) { return std::string(info.param.name); });

// Nothing is read or written: the pointers may be null.
TEST(Forward, EmptyCallsDoNothing) {
  for (const Shape& shape : {Shape{.batch = 0}, Shape{.len_q = 0},
                             Shape{.heads_q = 0, .heads_kv = 0}, Shape{.batch = 0, .len_kv = 0}}) {
    ForwardParams params = call(shape);
    params.out = nullptr;
    params.q = nullptr;
    if (shape.batch == 0) params.k = params.v = nullptr;
    EXPECT_EQ(forward(params).name, "cpu");
  }
}

TEST(BuildInfo, IsFilledIn) {
  const BuildInfo info = build_info();
  EXPECT_EQ(info.version, FASTATTN_VERSION);
  EXPECT_EQ(info.cuda, FASTATTN_HAVE_CUDA == 1);
  EXPECT_EQ(info.cuda_archs.empty(), !info.cuda);
  EXPECT_EQ(info.cuda_toolkit.empty(), !info.cuda);
  EXPECT_FALSE(info.cpu_instruction_set.empty());
  EXPECT_FALSE(info.threading.empty());
  EXPECT_GE(cpu_threads(), 1);
  EXPECT_EQ(cuda_devices().empty() || info.cuda, true);
}

}  // namespace
}  // namespace fastattn::testing
