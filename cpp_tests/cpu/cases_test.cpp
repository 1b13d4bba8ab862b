// Small inputs on which attention libraries were reported to be wrong, with the right results.
#include <gtest/gtest.h>

#include <numeric>

#include "cpu/attention.h"

namespace fastattn::testing {
namespace {

constexpr DType kFloat = DType::kFloat32;

Array filled(DType dtype, int heads, int length, int dim, float value) {
  return Array(dtype, 1, heads, length, dim).fill(value);
}

Array zeros(int length, int dim, int heads = 1) { return filled(kFloat, heads, length, dim, 0); }

Array column(std::initializer_list<float> rows) {
  return Array(kFloat, 1, 1, static_cast<int>(rows.size()), 1).fill([&](int, int, int i, int) {
    return rows.begin()[i];
  });
}

// Row j is filled with first + j.
Array counting(int length, int dim, float first = 0) {
  return Array(kFloat, 1, 1, length, dim).fill([&](int, int, int i, int) {
    return first + static_cast<float>(i);
  });
}

void expect_rows(const Output& actual, const std::vector<float>& rows, float tolerance = 1e-6F) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for (int d = 0; d < actual.out.dim(); ++d) {
      EXPECT_NEAR(actual.out.get(0, 0, static_cast<int>(i), d), rows[i],
                  tolerance * (1 + std::abs(rows[i])))
          << "row " << i;
    }
  }
}

void expect_lse(const Output& actual, const std::vector<float>& lse) {
  ASSERT_EQ(actual.lse.size(), lse.size());
  for (std::size_t i = 0; i < lse.size(); ++i) {
    if (std::isinf(lse[i])) {
      EXPECT_EQ(actual.lse[i], lse[i]) << "row " << i;
    } else {
      EXPECT_NEAR(actual.lse[i], lse[i], 1e-6F * (1 + std::abs(lse[i]))) << "row " << i;
    }
  }
}

const float kLn2 = std::log(2.0F);
const float kLn3 = std::log(3.0F);

TEST(CpuCases, A001_RowsWithoutKeysWhenQueriesOutnumberKeys) {
  const Output r = run(zeros(5, 4), zeros(3, 4), counting(3, 4, 1), 0.5F, {.causal = true});
  expect_rows(r, {0, 0, 1, 1.5F, 2});
  expect_lse(r, {-kInf, -kInf, 0, kLn2, kLn3});
}

TEST(CpuCases, A003_A027_NoKeysAtAll) {
  const Output r = run(zeros(3, 8, 2), zeros(0, 8, 2), zeros(0, 8, 2), 0.5F);
  EXPECT_EQ(r.out.values(), std::vector<float>(48, 0.0F));
  EXPECT_EQ(r.lse, std::vector<float>(6, -kInf));
}

TEST(CpuCases, A005_EmptyStateIsNeutralInAMerge) {
  const Output r = run(zeros(4, 4), zeros(2, 4), counting(2, 4), 0.5F, {.causal = true});
  EXPECT_EQ(r.lse[0], -kInf);
  EXPECT_EQ(r.lse[1], -kInf);
  const float other = 0.7F;
  EXPECT_EQ(std::exp(r.lse[0] - std::log(std::exp(r.lse[0]) + std::exp(other))), 0.0F);
}

TEST(CpuCases, A007_FirstTileHiddenThenVeryNegativeScores) {
  for (const int heads : {1, 7}) {
    const Output r = run(filled(kFloat, heads, 88, 1, 1), filled(kFloat, 1, 448, 1, -1000),
                         counting(448, 1), 1, {.causal = true});
    for (int h = 0; h < heads; ++h) {
      EXPECT_NEAR(r.out.get(0, h, 2, 0), 181, 1e-3);
      EXPECT_NEAR(r.lse[static_cast<std::size_t>(h) * 88 + 2], -994.1056F, 1e-3);
    }
  }
  // The window hides whole tiles in front, too.
  const Output r = run(filled(kFloat, 1, 448, 1, 1), filled(kFloat, 1, 448, 1, -1000),
                       counting(448, 1), 1, {.window_left = 2, .window_right = 0});
  EXPECT_NEAR(r.out.get(0, 0, 300, 0), 299, 1e-3);
  EXPECT_NEAR(r.lse[300], -1000 + kLn3, 1e-3);
}

TEST(CpuCases, A008_NoHiddenKeyBeatsAVeryNegativeScore) {
  const Output r = run(column({-20000, 0}), column({1, 0}), column({1, 100}), 1, {.causal = true});
  expect_rows(r, {1, 50.5F});
  expect_lse(r, {-20000, kLn2});
}

TEST(CpuCases, A010_CausalIsBottomRightAligned) {
  std::mt19937 random(10);
  const auto normal = [&](int length) { return Array(kFloat, 1, 2, length, 16).randomise(random); };
  const Array k = normal(5);
  const Array v = normal(5);
  const Array one = normal(1);
  EXPECT_EQ(run(one, k, v, 0.25F, {.causal = true}).out.values(),
            run(one, k, v, 0.25F).out.values());
  const Output r = run(zeros(2, 4), zeros(5, 4), counting(5, 4), 1, {.causal = true});
  expect_rows(r, {1.5F, 2});
}

TEST(CpuCases, A012_WindowsThatEqualOtherMasks) {
  std::mt19937 random(12);
  for (const int length : {6, 700}) {
    const Array q = Array(kFloat, 1, 1, length, 16).randomise(random);
    const Array k = Array(kFloat, 1, 1, length, 16).randomise(random);
    const Array v = Array(kFloat, 1, 1, length, 16).randomise(random);
    const auto out = [&](const Mask& mask) { return run(q, k, v, 0.25F, mask).out.values(); };
    const std::vector<float> causal = out({.causal = true});
    EXPECT_EQ(out({.window_left = -1, .window_right = 0}), causal);
    EXPECT_EQ(out({.window_left = length, .window_right = 0}), causal);
    EXPECT_EQ(out({.window_left = length - 1, .window_right = 0}), causal);
    EXPECT_EQ(out({.window_left = length - 1, .window_right = length - 1}), out({}));
  }
}

TEST(CpuCases, A015_A016_WindowCountsTheRowItselfAndZeroIsALimit) {
  const Array q = zeros(4, 2);
  const Array v = counting(4, 2);
  const auto windowed = [&](int left, int right) {
    return run(q, q, v, 1, {.window_left = left, .window_right = right});
  };
  expect_rows(windowed(1, 0), {0, 0.5F, 1.5F, 2.5F});
  expect_rows(windowed(3, 0), {0, 0.5F, 1, 1.5F});
  expect_rows(windowed(3, -1), {1.5F, 1.5F, 1.5F, 1.5F});
  EXPECT_EQ(windowed(0, 0).out.values(), v.values());
}

TEST(CpuCases, LargestWindowsDoNotOverflow) {
  constexpr int kMost = std::numeric_limits<int>::max();
  const Output r = run(zeros(4, 2), zeros(4, 2), counting(4, 2), 1,
                       {.window_left = kMost, .window_right = kMost});
  expect_rows(r, {1.5F, 1.5F, 1.5F, 1.5F});
}

TEST(CpuCases, A017_NegativeWindowIsRefused) {
  EXPECT_THROW(
      run(zeros(4, 2), zeros(4, 2), zeros(4, 2), 1, {.window_left = -1, .window_right = -3}),
      ArgumentError);
}

TEST(CpuCases, A018_WhatARowCannotSeeNeverReachesIt) {
  std::mt19937 random(18);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const int length : {3, 100}) {
      const Array q = Array(dtype, 1, 2, length, 24).randomise(random);
      const Array k = Array(dtype, 1, 2, length, 24).randomise(random);
      const Array v = Array(dtype, 1, 2, length, 24).randomise(random);
      const int bad = length - 1;
      Array bad_k = k;
      Array bad_v = v;
      for (int h = 0; h < 2; ++h) {
        for (int d = 0; d < 24; ++d) {
          bad_k.set(0, h, bad, d, kNaN);
          bad_v.set(0, h, bad, d, kInf);
        }
      }
      const Output clean = run(q, k, v, 0.2F, {.causal = true});
      const Output dirty = run(q, bad_k, bad_v, 0.2F, {.causal = true});
      for (int h = 0; h < 2; ++h) {
        for (int i = 0; i < length; ++i) {
          for (int d = 0; d < 24; ++d) {
            if (i < bad) {
              EXPECT_EQ(dirty.out.get(0, h, i, d), clean.out.get(0, h, i, d));
            } else {
              EXPECT_TRUE(std::isnan(dirty.out.get(0, h, i, d)));
            }
          }
          const auto row = static_cast<std::size_t>(h * length + i);
          if (i < bad) {
            EXPECT_EQ(dirty.lse[row], clean.lse[row]);
          } else {
            EXPECT_TRUE(std::isnan(dirty.lse[row]));
          }
        }
      }
    }
  }
}

TEST(CpuCases, SpecialValuesFollowIeeeWhereTheyAreSeen) {
  // A score of -inf has weight 0; only such scores leave no weight, so out 0; +inf: inf - inf.
  const Output r = run(filled(kFloat, 1, 1, 1, 1), column({-kInf, 0}), column({5, 3}), 1);
  expect_rows(r, {3});
  expect_lse(r, {0});
  const Output none = run(filled(kFloat, 1, 1, 1, 1), column({-kInf, -kInf}), column({5, 3}), 1);
  EXPECT_EQ(none.out.get(0, 0, 0, 0), 0);
  EXPECT_EQ(none.lse[0], -kInf);
  const Output all = run(filled(kFloat, 1, 1, 1, 1), column({kInf, 0}), column({5, 3}), 1);
  EXPECT_TRUE(std::isnan(all.out.get(0, 0, 0, 0)));
  EXPECT_TRUE(std::isnan(all.lse[0]));
  // An infinite value that is seen comes out, in its column only.
  Array v = counting(70, 20);
  v.set(0, 0, 69, 3, kInf);
  const Output seen = run(zeros(70, 4), zeros(70, 4), v, 1, {.causal = true});
  EXPECT_EQ(seen.out.get(0, 0, 69, 3), kInf);
  EXPECT_TRUE(std::isfinite(seen.out.get(0, 0, 69, 2)));
  EXPECT_TRUE(std::isfinite(seen.out.get(0, 0, 68, 3)));
}

TEST(CpuCases, A021_ScratchOfAnEarlierCallIsNotRead) {
  std::mt19937 random(21);
  const Array bad = filled(kFloat, 1, 128, 64, kNaN);
  for (int length = 1; length <= 17; ++length) {
    const Array q = Array(kFloat, 1, 1, length, 64).randomise(random);
    const Array k = Array(kFloat, 1, 1, length, 64).randomise(random);
    run(bad, bad, bad, 0.125F);
    check(q, k, k);
  }
}

TEST(CpuCases, A022_EqualHugeScoresWeighExactlyOne) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int keys : {1, 5, 64}) {
      const Output r = run(filled(dtype, 1, 1, 64, 133120), filled(dtype, 1, keys, 64, 133120),
                           filled(dtype, 1, keys, 64, 133120), 0.125F);
      for (const float x : r.out.values()) EXPECT_EQ(x, 133120);
      EXPECT_NEAR(r.lse[0], 1.4177e11, 1e7);
    }
  }
}

TEST(CpuCases, A024_ScoresBeyondHalfPrecision) {
  Array v(DType::kFloat16, 1, 1, 2, 4);
  v.fill([](int, int, int i, int) { return i == 0 ? 1 : 3; });
  const Array q = filled(DType::kFloat16, 1, 2, 128, 256);
  const Output r = run(q, q, v, default_scale(q));
  for (const float x : r.out.values()) EXPECT_EQ(x, 2);
  EXPECT_NEAR(r.lse[0], 128.0 * 256 * 256 / std::sqrt(128.0) + std::log(2.0), 0.13);  // 2 ulp
}

TEST(CpuCases, A026_ScaleZeroAndNegative) {
  std::mt19937 random(26);
  const Array q = Array(kFloat, 1, 1, 6, 8).randomise(random);
  const Array k = Array(kFloat, 1, 1, 6, 8).randomise(random);
  const Output zero = run(q, k, counting(6, 2), 0, {.causal = true});
  expect_rows(zero, {0, 0.5F, 1, 1.5F, 2, 2.5F});
  for (int i = 0; i < 6; ++i) EXPECT_NEAR(zero.lse[std::size_t(i)], std::log(i + 1.0F), 1e-6F);
  Array minus_q = q;
  minus_q.fill([&](int b, int h, int i, int d) { return -q.get(b, h, i, d); });
  EXPECT_EQ(run(q, k, k, -1).out.values(), run(minus_q, k, k, 1).out.values());
  for (const float scale : {kNaN, kInf, -kInf}) {
    EXPECT_THROW(run(q, k, k, scale), ArgumentError);
  }
}

TEST(CpuCases, A027_EmptyBatchesHeadsAndQueries) {
  const auto empty = [](int batch, int heads, int length) {
    return Array(kFloat, batch, heads, length, 8);
  };
  EXPECT_TRUE(run(empty(0, 2, 3), empty(0, 2, 3), empty(0, 2, 3), 1).lse.empty());
  EXPECT_TRUE(run(empty(2, 0, 3), empty(2, 0, 3), empty(2, 0, 3), 1).lse.empty());
  EXPECT_TRUE(run(empty(2, 2, 0), empty(2, 2, 3), empty(2, 2, 3), 1).lse.empty());
}

TEST(CpuCases, A033_EveryChannelComesOut) {
  for (const int dim : {48, 64}) {
    Array v(kFloat, 1, 1, 3, dim);
    v.fill([](int, int, int, int d) { return d; });
    const Output r = run(zeros(3, dim), zeros(3, dim), v, 1);
    for (int d = 0; d < dim; ++d) EXPECT_NEAR(r.out.get(0, 0, 1, d), d, 1e-5 * d);
  }
}

TEST(CpuCases, A035_HeadDimBeyondTheLimit) {
  for (const int dim : {257, 512}) {
    try {
      run(zeros(2, dim), zeros(2, dim), zeros(2, dim), 1);
      FAIL() << "head dim " << dim << " was taken";
    } catch (const ArgumentError& error) {
      EXPECT_EQ(error.kind(), ArgumentError::Kind::kUnsupported);
      EXPECT_NE(std::string(error.what()).find(std::to_string(dim)), std::string::npos);
    }
  }
  expect_rows(run(zeros(2, 4), zeros(2, 4), counting(2, 4), 1), {0.5F, 0.5F});
}

TEST(CpuCases, A039_GroupsOfHeadsAreContiguous) {
  Array v(kFloat, 1, 2, 3, 4);
  v.fill([](int, int h, int, int) { return h; });
  const Output r = run(zeros(2, 4, 6), zeros(3, 4, 2), v, 1);
  for (int h = 0; h < 6; ++h) EXPECT_EQ(r.out.get(0, h, 0, 0), h / 3);
}

TEST(CpuCases, A041_HeadCountsThatDoNotDivide) {
  for (const auto& [heads_q, heads_kv] : {std::pair{3, 2}, {33, 2}, {2, 4}}) {
    EXPECT_THROW(run(zeros(2, 4, heads_q), zeros(2, 4, heads_kv), zeros(2, 4, heads_kv), 1),
                 ArgumentError);
  }
}

TEST(CpuCases, A044_GroupedHeadsEqualRepeatedHeads) {
  std::mt19937 random(44);
  for (const auto& [len_q, len_kv] : {std::pair{5, 9}, {130, 200}}) {
    const Array q = Array(kFloat, 1, 8, len_q, 32).randomise(random);
    const Array k = Array(kFloat, 1, 2, len_kv, 32).randomise(random);
    const Array v = Array(kFloat, 1, 2, len_kv, 32).randomise(random);
    const auto repeat = [&](const Array& x) {
      return Array(kFloat, 1, 8, len_kv, 32).fill([&](int b, int h, int i, int d) {
        return x.get(b, h / 4, i, d);
      });
    };
    const Output grouped = run(q, k, v, 0.2F, {.causal = true});
    const Output repeated = run(q, repeat(k), repeat(v), 0.2F, {.causal = true});
    EXPECT_EQ(grouped.out.values(), repeated.out.values());
    EXPECT_EQ(grouped.lse, repeated.lse);
  }
}

TEST(CpuCases, A050_LseIsInNaturalUnits) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const Array zero = filled(dtype, 1, 4, 8, 0);
    EXPECT_NEAR(run(zero, zero, zero, 1).lse[0], 1.386294F, 1e-6F);
  }
}

TEST(CpuCases, LseMayBeLeftOut) {
  Array q = counting(3, 4);
  Array out(kFloat, 1, 1, 3, 4);
  ForwardParams params{.q = q.data(),
                       .k = q.data(),
                       .v = q.data(),
                       .out = out.data(),
                       .q_stride = q.stride(),
                       .k_stride = q.stride(),
                       .v_stride = q.stride(),
                       .out_stride = out.stride(),
                       .batch = 1,
                       .heads_q = 1,
                       .heads_kv = 1,
                       .len_q = 3,
                       .len_kv = 3,
                       .head_dim = 4,
                       .head_dim_v = 4,
                       .scale = 0};
  forward(params);
  EXPECT_EQ(out.values(), std::vector<float>(12, 1.0F));
}

TEST(CpuCases, A055_ManyBatchesAndHeads) {
  std::mt19937 random(55);
  for (const auto& [batch, heads, length, dim] :
       {std::tuple{65536, 2, 1, 4}, {1, 65536, 2, 4}, {65536, 1, 3, 1}}) {
    const Array q = Array(kFloat, batch, heads, length, dim).randomise(random);
    check(q, q, q, {.causal = true});
  }
}

TEST(CpuCases, A053_OffsetsBeyond32Bits) {
  // Two batches 2^31 + 8 elements apart in one mapping of which only the touched pages exist.
  constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 8;
  constexpr int kRows = 4;
  constexpr int kDim = 8;
  std::vector<float, std::allocator<float>> near(kRows * kDim);
  std::iota(near.begin(), near.end(), 1.0F);
  void* memory = std::calloc(static_cast<std::size_t>(kFar + kRows * kDim), sizeof(float));
  if (memory == nullptr) GTEST_SKIP() << "no 8 GiB of address space";
  auto* far = static_cast<float*>(memory);
  std::copy(near.begin(), near.end(), far);
  std::copy(near.rbegin(), near.rend(), far + kFar);
  Array out(kFloat, 2, 1, kRows, kDim);
  const Strides stride{kFar, 0, kDim};
  forward({.q = far,
           .k = far,
           .v = far,
           .out = out.data(),
           .q_stride = stride,
           .k_stride = stride,
           .v_stride = stride,
           .out_stride = out.stride(),
           .batch = 2,
           .heads_q = 1,
           .heads_kv = 1,
           .len_q = kRows,
           .len_kv = kRows,
           .head_dim = kDim,
           .head_dim_v = kDim,
           .scale = 0.01F});
  Array both(kFloat, 2, 1, kRows, kDim);
  both.fill([&](int b, int, int i, int d) {
    const int at = i * kDim + d;
    return near[static_cast<std::size_t>(b == 0 ? at : kRows * kDim - 1 - at)];
  });
  std::free(memory);
  EXPECT_EQ(out.values(), run(both, both, both, 0.01F).out.values());
}

TEST(CpuCases, A062_A065_NegativeAndZeroStridesEqualCopies) {
  std::mt19937 random(62);
  for (const Layout layout : {Layout::kReversed, Layout::kSharedHeads}) {
    const Array q = Array(kFloat, 2, 4, 33, 32).randomise(random);
    const Array k = Array(kFloat, 2, 4, 70, 32, layout).randomise(random);
    const Array v = Array(kFloat, 2, 4, 70, 32, layout).randomise(random);
    const auto copy = [](const Array& x) {
      return Array(kFloat, 2, 4, 70, 32).fill([&](int b, int h, int i, int d) {
        return x.get(b, h, i, d);
      });
    };
    EXPECT_EQ(run(q, k, v, 0.2F).out.values(), run(q, copy(k), copy(v), 0.2F).out.values());
  }
}

}  // namespace
}  // namespace fastattn::testing
