// The CPU kernel against float64 on random inputs.
#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "cpu/attention.h"

namespace fastattn::testing {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr Mask kMasks[] = {{},
                           {.causal = true},
                           {.window_left = 20, .window_right = 7},
                           {.causal = true, .window_left = 70}};

class CpuForward : public ::testing::TestWithParam<DType> {
 protected:
  std::mt19937 random_{20240531};
  // randn or randn + 1/2
  Array random(int batch, int heads, int length, int dim, Layout layout = Layout::kContiguous) {
    return Array(GetParam(), batch, heads, length, dim, layout).randomise(random_);
  }
  Array shifted(int batch, int heads, int length, int dim, Layout layout = Layout::kContiguous) {
    return Array(GetParam(), batch, heads, length, dim, layout).randomise(random_, 1, 0.5F);
  }
};

TEST_P(CpuForward, LengthsAroundTheTiles) {
  for (const int length : {1, 17, 63, 64, 65, 127}) {
    for (const Mask& mask : kMasks) {
      SCOPED_TRACE(std::to_string(length) + (mask.causal ? " causal" : "") + " left " +
                   std::to_string(mask.window_left));
      check(random(2, 3, length, 64), random(2, 3, length, 64), shifted(2, 3, length, 64), mask);
    }
  }
}

TEST_P(CpuForward, LongRows) {
  for (const Mask& mask : kMasks) {
    check(shifted(1, 2, 1000, 64), shifted(1, 1, 1000, 64), random(1, 1, 1000, 64), mask);
  }
}

TEST_P(CpuForward, QueryAndKeyLengthsDiffer) {
  constexpr std::pair<int, int> kLengths[] = {{1, 17},   {1, 1000}, {63, 1},   {17, 64}, {64, 65},
                                              {127, 64}, {200, 33}, {65, 300}, {5, 0},   {49, 129}};
  for (const auto& [len_q, len_kv] : kLengths) {
    for (const Mask& mask : kMasks) {
      SCOPED_TRACE(std::to_string(len_q) + " x " + std::to_string(len_kv));
      check(random(2, 2, len_q, 40), random(2, 2, len_kv, 40), shifted(2, 2, len_kv, 40), mask);
    }
  }
}

// A034, A036: each head dim, with NaN in the padding behind the rows of q, k, v and out.
TEST_P(CpuForward, HeadDims) {
  for (const int dim : {1,  2,  3,  5,   7,   8,   12,  33,  40,  56,  64, 72,
                        80, 88, 96, 100, 112, 120, 128, 160, 192, 224, 256}) {
    SCOPED_TRACE(dim);
    const auto padded = [&](int length, int d) { return random(1, 2, length, d, Layout::kPadded); };
    check(padded(50, dim), padded(70, dim), padded(70, dim), {.causal = true}, Layout::kPadded);
  }
}

TEST_P(CpuForward, HeadDimOfValuesDiffers) {
  constexpr std::pair<int, int> kDims[] = {{192, 128}, {128, 64}, {64, 128}, {3, 256},
                                           {256, 1},   {33, 7},   {8, 17}};
  for (const auto& [dim, dim_v] : kDims) {
    SCOPED_TRACE(std::to_string(dim) + " and " + std::to_string(dim_v));
    check(random(1, 2, 40, dim), random(1, 2, 90, dim), shifted(1, 2, 90, dim_v));
  }
}

TEST_P(CpuForward, GroupedHeads) {
  constexpr std::tuple<int, int, int, int> kShapes[] = {
      {8, 2, 5, 9}, {8, 2, 130, 200}, {7, 1, 1, 300}, {6, 3, 17, 64}, {12, 4, 33, 33}};
  for (const auto& [heads_q, heads_kv, len_q, len_kv] : kShapes) {
    for (const Mask& mask : kMasks) {
      SCOPED_TRACE(std::to_string(heads_q) + ":" + std::to_string(heads_kv));
      check(random(2, heads_q, len_q, 32), random(2, heads_kv, len_kv, 32),
            shifted(2, heads_kv, len_kv, 32), mask);
    }
  }
}

TEST_P(CpuForward, Layouts) {
  for (const Layout layout :
       {Layout::kLengthFirst, Layout::kPadded, Layout::kReversed, Layout::kSharedHeads}) {
    SCOPED_TRACE(static_cast<int>(layout));
    const Layout out = layout == Layout::kSharedHeads ? Layout::kContiguous : layout;
    check(random(2, 4, 70, 64, layout), random(2, 4, 130, 64, layout),
          shifted(2, 4, 130, 64, layout), {.causal = true}, out);
    // Only one of the three differs from the others.
    check(random(2, 4, 70, 64), random(2, 4, 130, 64), shifted(2, 4, 130, 64, layout));
    check(random(2, 4, 70, 64), random(2, 4, 130, 64, layout), shifted(2, 4, 130, 64));
  }
  // Rows 4 KiB apart and more, which are gathered rather than read in place.
  check(random(1, 40, 20, 32, Layout::kLengthFirst), random(1, 40, 70, 32, Layout::kLengthFirst),
        shifted(1, 40, 70, 32, Layout::kLengthFirst));
}

TEST_P(CpuForward, LargeLogits) {
  Array q = random(1, 2, 100, 64);
  Array k = random(1, 2, 200, 64);
  for (Array* x : {&q, &k}) x->randomise(random_, 6);
  check(q, k, shifted(1, 2, 200, 64));
  check(q, k, shifted(1, 2, 200, 64), {.causal = true});
}

TEST_P(CpuForward, RandomCalls) {
  const auto pick = [this](std::initializer_list<int> from) {
    return from.begin()[std::uniform_int_distribution<std::size_t>(0, from.size() - 1)(random_)];
  };
  for (int round = 0; round < 60; ++round) {
    const int batch = pick({1, 2, 3});
    const int heads_kv = pick({1, 2, 3});
    const int heads_q = heads_kv * pick({1, 1, 2, 5});
    const int len_q = pick({1, 2, 15, 16, 17, 47, 48, 49, 95, 97, 130});
    const int len_kv = pick({0, 1, 7, 9, 63, 64, 66, 129, 191});
    const int dim = pick({1, 4, 15, 16, 31, 64, 65, 130});
    const int dim_v = pick({dim, dim, 1, 6, 16, 50, 136});
    const auto layout = [&] { return static_cast<Layout>(pick({0, 1, 2, 3})); };
    const Mask mask{.causal = pick({0, 1}) == 1,
                    .window_left = pick({-1, -1, 0, 5, 80}),
                    .window_right = pick({-1, -1, 0, 9, 100})};
    SCOPED_TRACE("round " + std::to_string(round) + ": " + std::to_string(batch) + " " +
                 std::to_string(heads_q) + ":" + std::to_string(heads_kv) + " " +
                 std::to_string(len_q) + "x" + std::to_string(len_kv) + " " + std::to_string(dim) +
                 "/" + std::to_string(dim_v) + " causal " + std::to_string(mask.causal) +
                 " window " + std::to_string(mask.window_left) + "," +
                 std::to_string(mask.window_right));
    check(random(batch, heads_q, len_q, dim, layout()),
          random(batch, heads_kv, len_kv, dim, layout()),
          shifted(batch, heads_kv, len_kv, dim_v, layout()), mask, layout());
  }
}

TEST_P(CpuForward, RunsRepeatBitForBit) {
  const Array q = random(2, 4, 300, 64);
  const Array k = random(2, 2, 400, 64);
  const Array v = random(2, 2, 400, 64);
  const Output first = run(q, k, v, 0.125F, {.causal = true});
  for (int i = 0; i < 5; ++i) {
    const Output again = run(q, k, v, 0.125F, {.causal = true});
    EXPECT_EQ(again.out.values(), first.out.values());
    EXPECT_EQ(again.lse, first.lse);
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, CpuForward, ::testing::ValuesIn(kDTypes),
                         [](const auto& info) { return std::string(to_string(info.param)); });

}  // namespace
}  // namespace fastattn::testing
