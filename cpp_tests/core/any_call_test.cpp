// The kernels that take any call (masks, all head dims, groups, lengths), in each of their dtypes:
// the CPU kernel, the CUDA kernels on a GPU, and the same emulated on this host.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu/attention.h"
#include "fastattn/fastattn.h"
#if FASTATTN_HAVE_CUDA
#include "cuda/on_device.h"
#endif

namespace fastattn::testing {
namespace {

enum class Place : std::uint8_t { kHost, kEmulated, kGpu };

struct Implementation {
  const Kernel* kernel;
  DType dtype;
  Place place;
};

void PrintTo(const Implementation& x, std::ostream* stream) {
  *stream << x.kernel->name << " " << to_string(x.dtype);
}

std::vector<Implementation> implementations(Place place) {
  std::vector<Implementation> all;
  const bool emulated = place == Place::kEmulated;
  const Backend backend = place == Place::kGpu ? Backend::kCuda : Backend::kCpu;
  for (const Kernel* kernel : emulated ? emulated_kernels() : kernels()) {
    const Capabilities& takes = kernel->capabilities;
    if (!emulated && kernel->backend != backend) continue;
    if (!takes.causal || !takes.window || !takes.head_dim_v_differs) continue;
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      if (takes.takes(dtype)) all.push_back({kernel, dtype, place});
    }
  }
  return all;
}

constexpr Mask kMasks[] = {{},
                           {.causal = true},
                           {.window_left = 20, .window_right = 7},
                           {.causal = true, .window_left = 70}};

class AnyCall : public ::testing::TestWithParam<Implementation> {
 protected:
  void SetUp() override {
    if (GetParam().place == Place::kGpu && cuda_devices().empty()) GTEST_SKIP() << "no CUDA device";
  }

  static DType dtype() { return GetParam().dtype; }
  static bool emulated() { return GetParam().place == Place::kEmulated; }

  Array random(int batch, int heads, int length, int dim, Layout layout = Layout::kContiguous,
               float mean = 0) {
    return Array(dtype(), batch, heads, length, dim, layout).randomise(random_, 1, mean);
  }

  static Output run(const Array& q, const Array& k, const Array& v, float scale,
                    const Mask& mask = {}, Layout out = Layout::kContiguous) {
#if FASTATTN_HAVE_CUDA
    if (GetParam().place == Place::kGpu) {
      DeviceCall call(q, k, v, scale, out, mask);
      forward(call.params, {.backend = Backend::kCuda}, GetParam().kernel->name);
      return call.fetch();
    }
#endif
    Output output(q, v, out);
    forward(params_of(q, k, v, output, scale, mask), {}, GetParam().kernel->name);
    EXPECT_EQ(output.out.count_stray_writes(), 0);
    return output;
  }
  static Output run(const Array& q, const Array& k, const Array& v, const Mask& mask = {}) {
    return run(q, k, v, default_scale(q), mask);
  }

  static void check(const Array& q, const Array& k, const Array& v, float scale,
                    const Mask& mask = {}, Layout out = Layout::kContiguous) {
    expect_close(run(q, k, v, scale, mask, out), q, k, v, scale, mask);
  }
  static void check(const Array& q, const Array& k, const Array& v, const Mask& mask = {}) {
    check(q, k, v, default_scale(q), mask);
  }

  float sign() { return std::uniform_int_distribution<int>(0, 1)(random_) == 0 ? -1.0F : 1.0F; }

  std::mt19937 random_{20240531};
};

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AnyCall);

TEST_P(AnyCall, LengthsAndMasks) {
  constexpr std::pair<int, int> kLengths[] = {{1, 1},    {1, 130},  {65, 65},   {128, 129},
                                              {63, 127}, {200, 70}, {130, 200}, {5, 0}};
  for (const auto& [len_q, len_kv] : kLengths) {
    for (const Mask& mask : kMasks) {
      SCOPED_TRACE(std::to_string(len_q) + " x " + std::to_string(len_kv) + " left " +
                   std::to_string(mask.window_left) + (mask.causal ? " causal" : ""));
      check(random(1, 2, len_q, 64), random(1, 1, len_kv, 64), random(1, 1, len_kv, 64), mask);
    }
  }
}

TEST_P(AnyCall, LongestWindows) {
  constexpr int kMost = std::numeric_limits<int>::max();
  const Array q = random(1, 1, 70, 16);
  const Array k = random(1, 1, 90, 16);
  const Output causal = run(q, k, k, {.causal = true});
  for (const Mask& mask : {Mask{.window_left = kMost, .window_right = 0},
                           Mask{.causal = true, .window_left = kMost, .window_right = kMost}}) {
    const Output windowed = run(q, k, k, mask);
    EXPECT_EQ(windowed.out.values(), causal.out.values());
    EXPECT_EQ(windowed.lse, causal.lse);
  }
}

// NaN behind each row shows what reads too far.
TEST_P(AnyCall, HeadDims) {
  for (const int dim : {1, 2, 3, 7, 8, 12, 16, 33, 40, 64, 72, 80, 96, 100, 128, 160, 192, 256}) {
    SCOPED_TRACE(dim);
    const auto padded = [&](int length) { return random(1, 1, length, dim, Layout::kPadded); };
    const Array q = padded(20);
    check(q, padded(70), padded(70), default_scale(q), {.causal = true}, Layout::kPadded);
  }
}

TEST_P(AnyCall, HeadDimsOfValues) {
  constexpr std::pair<int, int> kDims[] = {{192, 128}, {128, 64}, {64, 128}, {3, 256},
                                           {256, 1},   {33, 7},   {8, 40},   {65, 72}};
  for (const auto& [dim, dim_v] : kDims) {
    SCOPED_TRACE(std::to_string(dim) + " and " + std::to_string(dim_v));
    check(random(1, 1, 40, dim), random(1, 1, 90, dim), random(1, 1, 90, dim_v),
          {.window_left = 50});
  }
}

// Whatever the strides and the alignment: the same bits.
TEST_P(AnyCall, StridedAndMisalignedViews) {
  for (const auto& [dim, dim_v] : {std::pair{40, 24}, {64, 64}, {33, 7}}) {
    const Mask mask{.causal = true, .window_left = 60};
    std::vector<float> first, first_lse;
    for (const Layout layout :
         {Layout::kContiguous, Layout::kLengthFirst, Layout::kPadded, Layout::kReversed}) {
      SCOPED_TRACE("layout " + std::to_string(static_cast<int>(layout)) +
                   " D=" + std::to_string(dim));
      random_.seed(1);
      const Array q = random(2, 4, 33, dim, layout);
      const Array k = random(2, 2, 70, dim, layout);
      const Array v = random(2, 2, 70, dim_v, layout);
      const float scale = default_scale(q);
      const Output found = run(q, k, v, scale, mask, layout);
      expect_close(found, q, k, v, scale, mask);
      if (layout == Layout::kContiguous) {
        first = found.out.values();
        first_lse = found.lse;
      }
      EXPECT_EQ(found.out.values(), first);
      EXPECT_EQ(found.lse, first_lse);
    }
  }
}

TEST_P(AnyCall, GroupedHeads) {
  for (const auto& [heads_q, heads_kv] : {std::pair{8, 2}, {7, 1}, {6, 3}}) {
    for (const auto& [len_q, len_kv] : {std::pair{5, 9}, {70, 100}}) {
      SCOPED_TRACE(std::to_string(heads_q) + ":" + std::to_string(heads_kv));
      check(random(1, heads_q, len_q, 32), random(1, heads_kv, len_kv, 32),
            random(1, heads_kv, len_kv, 32), {.causal = true});
    }
  }
}

TEST_P(AnyCall, Scales) {
  const Array q = random(1, 1, 40, 32, Layout::kContiguous, 0.5F);
  const Array k = random(1, 1, 100, 32, Layout::kContiguous, 0.5F);
  for (const float scale : {0.0F, -0.125F, 1.0F, 30.0F}) {
    SCOPED_TRACE(scale);
    check(q, k, k, scale, {.causal = true});
  }
}

// Rows that see no key at all, and rows that see one, whatever hidden keys hold.
TEST_P(AnyCall, HiddenKeysReachNoRow) {
  for (const float special : {kNaN, kInf, -kInf}) {
    const Array q = random(1, 1, 150, 24);
    const Array k = random(1, 1, 140, 24);
    const Array v = random(1, 1, 140, 24);
    for (const Mask& mask : {kMasks[1], kMasks[2]}) {
      const Output clean = run(q, k, v, mask);
      for (const int key : {0, 63, 64, 127, 128, 139}) {
        Array bad_k = k;
        Array bad_v = v;
        bad_k.set(0, 0, key, 3, special);
        for (int d = 0; d < 24; ++d) bad_v.set(0, 0, key, d, special);
        const Output found = run(q, bad_k, bad_v, mask);
        for (int row = 0; row < 150; ++row) {
          if (sees(mask, row, key, 150, 140)) continue;
          for (int d = 0; d < 24; ++d) {
            ASSERT_EQ(found.out.get(0, 0, row, d), clean.out.get(0, 0, row, d))
                << row << " " << key;
          }
          ASSERT_EQ(found.lse[static_cast<std::size_t>(row)],
                    clean.lse[static_cast<std::size_t>(row)]);
        }
        expect_close(found, q, bad_k, bad_v, default_scale(q), mask);
      }
    }
  }
}

// In half precision a sum of ones would stop at 2048, and overflow at 65504.
TEST_P(AnyCall, SumsOverManyKeys) {
  const int keys = emulated() ? 3000 : 70000;
  Array q(dtype(), 1, 1, 2, 8);
  Array k(dtype(), 1, 1, keys, 8);
  Array v(dtype(), 1, 1, keys, 8);
  q.fill(0.0F);
  k.fill(0.0F);
  v.fill(1.0F);
  const Output found = run(q, k, v);
  for (const float value : found.out.values()) ASSERT_NEAR(value, 1.0F, 0x1p-23F);
  for (const float value : found.lse) ASSERT_NEAR(value, std::log(keys), 1e-5);
}

// Scores of +-1e5, and those that float16 could not hold before they are scaled.
TEST_P(AnyCall, LargeScores) {
  Array q(dtype(), 1, 1, 40, 32);
  Array large(dtype(), 1, 1, 40, 32);
  Array k(dtype(), 1, 1, 100, 32);
  q.fill([&](int, int, int, int) { return sign(); });
  large.fill([&](int b, int h, int i, int d) { return 1000 * q.get(b, h, i, d); });
  k.fill([&](int, int, int, int) { return 100 * sign(); });
  const Array v = random(1, 1, 100, 32);
  for (const float scale : {30.0F, -30.0F}) check(q, k, v, scale, {.causal = true});
  check(large, k, v, 1e-5F, {.causal = true});
}

TEST_P(AnyCall, AloneAndInABatch) {
  const Array q = random(3, 4, 70, 40);
  const Array k = random(3, 2, 90, 40);
  const Array v = random(3, 2, 90, 24);
  const Output whole = run(q, k, v, {.causal = true});
  const auto part = [&](const Array& x, int batch, int first, int heads) {
    Array one(x.dtype(), 1, heads, x.length(), x.dim());
    one.fill([&](int, int h, int i, int d) { return x.get(batch, first + h, i, d); });
    return one;
  };
  for (int batch = 0; batch < 3; ++batch) {
    for (int head = 0; head < 2; ++head) {
      const Output alone = run(part(q, batch, 2 * head, 2), part(k, batch, head, 1),
                               part(v, batch, head, 1), {.causal = true});
      EXPECT_EQ(alone.out.values(), part(whole.out, batch, 2 * head, 2).values());
    }
  }
}

std::string name_of(const ::testing::TestParamInfo<Implementation>& info) {
  return std::string(info.param.kernel->name) + "_" + std::string(to_string(info.param.dtype));
}

INSTANTIATE_TEST_SUITE_P(Host, AnyCall, ::testing::ValuesIn(implementations(Place::kHost)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Emulated, AnyCall, ::testing::ValuesIn(implementations(Place::kEmulated)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Gpu, AnyCall, ::testing::ValuesIn(implementations(Place::kGpu)), name_of);

}  // namespace
}  // namespace fastattn::testing
