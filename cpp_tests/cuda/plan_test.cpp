// The launch figures that each rung is defined by (they need no GPU).
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "core/calls.h"
#include "fastattn/fastattn.h"

namespace fastattn::testing {
namespace {

LaunchPlan plan(std::string_view name, const Shape& shape = {}) {
  return find_kernel(name)->plan(call(shape));
}

struct Rung {
  const char* name;
  std::int64_t blocks;
  int threads;
  std::size_t dynamic_shared_bytes;
};

class LadderPlan : public ::testing::TestWithParam<Rung> {};

// B=4, H=12, M=N=2048, D=64.
TEST_P(LadderPlan, IsTheRungsOwn) {
  const Rung& rung = GetParam();
  const LaunchPlan found = plan(rung.name);
  EXPECT_EQ(found.blocks, rung.blocks);
  EXPECT_EQ(found.threads, rung.threads);
  EXPECT_EQ(found.dynamic_shared_bytes, rung.dynamic_shared_bytes);
}

INSTANTIATE_TEST_SUITE_P(Primary, LadderPlan,
                         ::testing::Values(Rung{"v1", 48, 128, 37'376},
                                           Rung{"v2", 1'536, 128, 58'368},
                                           Rung{"v3", 1'536, 256, 32'768},
                                           Rung{"v4", 1'536, 256, 32'896},
                                           Rung{"v5", 768, 128, 114'688}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Plan, SharedMemoryFollowsHeadDim) {
  // 2 * 32 * 128 + 2 * 32 * 128 + 32 * 32 + 4 * 32 floats, and 2 * 64 * 128 + 2 * 32 * 128 + ...
  EXPECT_EQ(plan("v1", {.head_dim = 128, .head_dim_v = 128}).dynamic_shared_bytes, 70'144U);
  EXPECT_EQ(plan("v2", {.head_dim = 128, .head_dim_v = 128}).dynamic_shared_bytes, 107'520U);
}

// The table of docs/ladder/v5.md, for 227 KB of shared memory; cpp_tests/emulation/gpu_test.cpp has
// all of it.
TEST(Plan, TilesOfV5FollowHeadDims) {
  struct Row {
    int head_dim, head_dim_v, block_q, threads;
    std::size_t bytes;
  };
  for (const Row& row : {Row{64, 64, 128, 128, 114'688}, Row{1, 1, 128, 128, 114'688},
                         Row{128, 64, 128, 128, 147'456}, Row{256, 1, 128, 128, 212'992},
                         Row{128, 128, 128, 256, 229'376}, Row{1, 65, 128, 256, 196'608},
                         Row{192, 128, 128, 256, 196'608}, Row{193, 128, 128, 256, 212'992},
                         Row{256, 256, 64, 256, 229'376}}) {
    const LaunchPlan found =
        plan("v5", {.len_q = 129, .head_dim = row.head_dim, .head_dim_v = row.head_dim_v});
    EXPECT_EQ(found.blocks, 48 * (128 / row.block_q + 1)) << row.head_dim << " " << row.head_dim_v;
    EXPECT_EQ(found.threads, row.threads) << row.head_dim << " " << row.head_dim_v;
    EXPECT_EQ(found.dynamic_shared_bytes, row.bytes) << row.head_dim << " " << row.head_dim_v;
  }
}

TEST(Plan, WorkspaceIsWhatTheRungKeepsInGlobalMemory) {
  constexpr std::size_t kRows = 4UL * 12 * 2048;
  EXPECT_EQ(plan("v0").workspace_bytes, kRows * 2048 * sizeof(float));
  EXPECT_EQ(plan("v1").workspace_bytes, kRows * 2 * sizeof(float));
  for (const char* name : {"v2", "v3", "v4", "v5"})
    EXPECT_EQ(plan(name).workspace_bytes, 0U) << name;
}

// V0 has a grid per kernel; the plan is the largest, and neither count wraps around.
TEST(Plan, NaivePlanCoversAllItsGrids) {
  EXPECT_EQ(plan("v0", {.len_q = 1, .len_kv = 1}).blocks, 12);  // 48 rows of 64 columns
  const Shape huge{.batch = 4,
                   .heads_q = 4,
                   .heads_kv = 4,
                   .len_q = 1 << 30,
                   .len_kv = 1 << 30,
                   .head_dim = 1,
                   .head_dim_v = 1};
  EXPECT_GT(plan("v0", huge).blocks, std::numeric_limits<std::int32_t>::max());
  EXPECT_GE(plan("v0", huge).workspace_bytes, std::size_t{1} << 62);
}

TEST(Plan, GridsArePastEveryDimensionLimit) {
  EXPECT_EQ(plan("v1", {.batch = 65536, .heads_q = 8, .heads_kv = 8, .len_q = 4}).blocks, 524'288);
  EXPECT_EQ(plan("v4", {.batch = 65536, .heads_q = 8, .heads_kv = 8, .len_q = 65}).blocks,
            1'048'576);
}

TEST(CudaRegistry, HoldsTheLadderInOrder) {
  std::vector<std::string_view> names;
  for (const Kernel* kernel : kernels()) {
    if (kernel->backend == Backend::kCuda) names.push_back(kernel->name);
  }
  const std::vector<std::string_view> ladder = {"v0", "v1", "v2", "v3", "v4", "v5", "v6"};
  ASSERT_GE(names.size(), ladder.size());
  EXPECT_TRUE(std::equal(ladder.begin(), ladder.end(), names.begin()));
}

TEST(CudaRegistry, CapabilitiesOfTheLadder) {
  for (const char* name : {"v0", "v1", "v2", "v3", "v4"}) {
    const Capabilities& takes = find_kernel(name)->capabilities;
    EXPECT_TRUE(takes.takes(DType::kFloat32)) << name;
    EXPECT_FALSE(takes.takes(DType::kFloat16) || takes.takes(DType::kBFloat16)) << name;
    EXPECT_FALSE(takes.causal || takes.window || takes.head_dim_v_differs) << name;
    EXPECT_EQ(takes.lengths_differ, std::string_view(name) != "v0") << name;
  }
  for (const char* name : {"v3", "v4"}) {
    EXPECT_EQ(find_kernel(name)->capabilities.head_dim_min, 64);
    EXPECT_EQ(find_kernel(name)->capabilities.head_dim_max, 64);
    EXPECT_EQ(find_kernel(name)->redirect, "v2");
  }
  for (const char* name : {"v5", "v6"}) {
    const Capabilities& takes = find_kernel(name)->capabilities;
    EXPECT_TRUE(takes.takes(DType::kFloat32)) << name;
    EXPECT_EQ(takes.takes(DType::kFloat16), std::string_view(name) == "v6");
    EXPECT_EQ(takes.takes(DType::kBFloat16), std::string_view(name) == "v6");
    EXPECT_TRUE(takes.causal && takes.window) << name;
    EXPECT_TRUE(takes.head_dim_v_differs && takes.lengths_differ && takes.grouped_heads) << name;
    EXPECT_EQ(takes.head_dim_min, 1) << name;
    EXPECT_EQ(takes.head_dim_max, 256) << name;
    EXPECT_EQ(takes.min_compute_capability, std::string_view(name) == "v6" ? 80 : 75);
  }
}

}  // namespace
}  // namespace fastattn::testing
