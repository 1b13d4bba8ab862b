// Which kernel "auto" takes: the rules, and what follows where they name a kernel that can't.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "core/auto_rules.h"
#include "core/calls.h"
#include "core/choose.h"
#include "fastattn/fastattn.h"

namespace fastattn::testing {
namespace {

using core::AutoRule;
using core::GpuClass;

DeviceInfo gpu(const char* name, int compute_capability, std::size_t shared_bytes = 100 << 10) {
  return {.ordinal = 0,
          .name = name,
          .compute_capability = compute_capability,
          .multiprocessors = 100,
          .shared_bytes_per_block = shared_bytes,
          .memory_bytes = std::size_t{1} << 34};
}

const DeviceInfo kH200 = gpu("NVIDIA H200", 90, 227 << 10);
const DeviceInfo kL40S = gpu("NVIDIA L40S", 89);
const DeviceInfo k4090 = gpu("NVIDIA GeForce RTX 4090", 89);

TEST(GpuClass, GeForceCardsAreHalfRate) {
  for (const char* name : {"NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3080 Laptop GPU",
                           "GeForce RTX 2080 Ti", "NVIDIA GeForce RTX 5090"}) {
    EXPECT_EQ(core::gpu_class(gpu(name, 89)), GpuClass::kHalfRate) << name;
  }
  for (const char* name : {"NVIDIA H200", "NVIDIA L40S", "NVIDIA A100-SXM4-80GB",
                           "NVIDIA RTX 6000 Ada Generation", "NVIDIA A10", ""}) {
    EXPECT_EQ(core::gpu_class(gpu(name, 89)), GpuClass::kFullRate) << name;
  }
}

TEST(AutoRule, HoldsUpToItsLimits) {
  const AutoRule rule{.gpu = GpuClass::kFullRate,
                      .dtype = DType::kFloat32,
                      .head_dim_max = 64,
                      .queries_max = 512,
                      .keys_max = 1024,
                      .work_max = 2LL * 3 * 512 * 1024,
                      .kernel = "v5"};
  const Shape most{.batch = 2, .heads_q = 3, .heads_kv = 3, .len_q = 512, .len_kv = 1024};
  const auto holds = [&](const Shape& shape) {
    return rule.holds(GpuClass::kFullRate, call(shape));
  };
  EXPECT_TRUE(holds(most));
  EXPECT_FALSE(rule.holds(GpuClass::kHalfRate, call(most)));
  Shape more = most;
  more.head_dim = 65;
  EXPECT_FALSE(holds(more));
  more = most;
  more.head_dim_v = 65;
  EXPECT_FALSE(holds(more));
  more = most;
  more.len_q = 513, more.batch = 1;
  EXPECT_FALSE(holds(more));
  more = most;
  more.len_kv = 1025, more.batch = 1;
  EXPECT_FALSE(holds(more));
  more = most;
  more.batch = 3;  // the work alone
  EXPECT_FALSE(holds(more));
  ForwardParams half = call(most);
  half.dtype = DType::kFloat16;
  EXPECT_FALSE(rule.holds(GpuClass::kFullRate, half));
}

TEST(AutoRule, NoLimitIsNone) {
  const AutoRule rule{.gpu = GpuClass::kHalfRate,
                      .dtype = DType::kBFloat16,
                      .head_dim_max = 0,
                      .queries_max = 0,
                      .keys_max = 0,
                      .work_max = 0,
                      .kernel = "v5"};
  constexpr int kMost = std::numeric_limits<int>::max();
  ForwardParams params = call({.batch = kMost, .heads_q = kMost, .len_q = kMost, .len_kv = kMost});
  params.dtype = DType::kBFloat16;
  EXPECT_TRUE(rule.holds(GpuClass::kHalfRate, params));
}

// Kernels that are not there, so that the choice is tested in every build.
template <std::size_t kSharedBytes = 1024>
Kernel made_up(std::string_view name, int min_compute_capability) {
  return {.name = name,
          .title = name,
          .arithmetic = "none",
          .backend = Backend::kCuda,
          .capabilities = {.head_dim_max = 256,
                           .lengths_differ = true,
                           .grouped_heads = true,
                           .min_compute_capability = min_compute_capability},
          .plan = [](const ForwardParams& p) -> LaunchPlan {
            return {.blocks = p.batch, .threads = 128, .dynamic_shared_bytes = kSharedBytes};
          },
          .run = nullptr};
}

std::string choose(const std::vector<const Kernel*>& candidates, const ForwardParams& params,
                   const DeviceInfo* on, std::vector<std::string>* why_not = nullptr) {
  std::vector<std::string> ignored;
  const Kernel* kernel =
      core::choose_auto(candidates, params, on, why_not == nullptr ? &ignored : why_not);
  return kernel == nullptr ? "none" : std::string(kernel->name);
}

TEST(Auto, ARuleComesBeforeLadderOrder) {
  const Kernel v5 = made_up("v5", 75), v99 = made_up("v99", 80);
  EXPECT_EQ(choose({&v5, &v99}, call(), &k4090), "v5");
  // No rule is about v99.
  const Kernel v98 = made_up("v98", 80);
  EXPECT_EQ(choose({&v98, &v99}, call(), &k4090), "v99");
  EXPECT_EQ(choose({&v98, &v99}, call(), &kH200), "v99");
  EXPECT_EQ(choose({&v98, &v99}, call(), &kL40S), "v99");
}

TEST(Auto, WhatARuleNamesButCanNotRunIsPassedOver) {
  const Kernel v99 = made_up("v99", 80);
  const Kernel v5_newer = made_up("v5", 90);
  EXPECT_EQ(choose({&v5_newer, &v99}, call(), &k4090), "v99");
  EXPECT_EQ(choose({&v99}, call(), &k4090), "v99");  // a build without it
  const Kernel v5_large = made_up<std::size_t{1} << 20>("v5", 75);
  std::vector<std::string> why_not;
  EXPECT_EQ(choose({&v5_large}, call(), &k4090, &why_not), "none");
  ASSERT_EQ(why_not.size(), 1U);
  EXPECT_NE(why_not[0].find("'v5' does not take head_dim 64 on NVIDIA GeForce RTX 4090"),
            std::string::npos)
      << why_not[0];
}

TEST(Auto, OfTheCpuItIsTheLastThatTakesTheCall) {
  Kernel a = made_up("v5", 0), b = made_up("b", 0), c = made_up("c", 0);
  a.backend = b.backend = Backend::kCpu;
  b.capabilities.head_dim_max = 32;
  EXPECT_EQ(choose({&a, &b, &c}, call(), nullptr), "v5");
  EXPECT_EQ(choose({&a, &b, &c}, call({.head_dim = 32, .head_dim_v = 32}), nullptr), "b");
}

#if FASTATTN_HAVE_CUDA
// The kernels of this build on GPUs that are not there.
std::string choose_of_build(const ForwardParams& params, const DeviceInfo& on) {
  std::vector<std::string> why_not;
  const Kernel* kernel = core::choose_auto(kernels(), params, &on, &why_not);
  return kernel == nullptr ? "none" : std::string(kernel->name);
}

TEST(Auto, Float32OnGeForceIsMultiplyAdds) {
  const DeviceInfo roomy = gpu("NVIDIA GeForce RTX 4090", 89, 227 << 10);
  for (const int length : {1, 64, 2048, 16384}) {
    EXPECT_EQ(choose_of_build(call({.len_q = length, .len_kv = length}), roomy), "v5") << length;
  }
}

TEST(Auto, EveryCallThatSomeKernelTakesHasAKernel) {
  for (const DeviceInfo& on : {kH200, kL40S, k4090, gpu("Tesla T4", 75, 64 << 10)}) {
    for (const int dim : {1, 64, 128, 256}) {
      const ForwardParams params = call({.head_dim = dim, .head_dim_v = dim});
      EXPECT_NE(choose_of_build(params, on), "none") << on.name << ' ' << dim;
    }
  }
}
#endif

}  // namespace
}  // namespace fastattn::testing
