// The instructions of tensor cores on a GPU give what the emulation gives, bit for bit.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>

#include "cuda/device.h"
#include "emulation/tensor.cu"

namespace fastattn::emulated {
extern const testing::TensorKernels tensor_kernels;
}

namespace fastattn::testing {

// A copy of an array on the current device.
template <class T, std::size_t kSize>
class OnDevice {
 public:
  explicit OnDevice(const std::array<T, kSize>& host = {})
      : data_(static_cast<T*>(cuda::allocate(sizeof(host)))) {
    cuda::copy_to_device(data_, host.data(), sizeof(host), nullptr);
  }
  ~OnDevice() { cuda::deallocate(data_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::array<T, kSize> read() const {
    std::array<T, kSize> host;
    cuda::copy_to_host(host.data(), data_, sizeof(host), nullptr);
    cuda::synchronize_device();
    return host;
  }

 private:
  T* data_;
};

namespace {

class GpuTensorCore : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto devices = cuda::list_devices();
    if (devices.empty()) GTEST_SKIP() << "no GPU";
    compute_capability_ = devices.front().compute_capability;
    if (compute_capability_ < 80)
      GTEST_SKIP() << devices.front().name << " has no such instruction";
  }

  // How sums are cut off is each architecture's own; the emulation has Hopper's.
  void needs_hopper() const {
    if (compute_capability_ != 90) GTEST_SKIP() << "the emulation's rule is that of Hopper";
  }

  std::mt19937 random_{11};

 private:
  int compute_capability_ = 0;
};

// One rounding apart is a difference; one NaN or zero for another is none.
template <std::size_t kSize>
int differences(const std::array<float, kSize>& found, const std::array<float, kSize>& expected,
                std::string& first) {
  int count = 0;
  for (std::size_t i = 0; i < kSize; ++i) {
    if (found[i] == expected[i] || (std::isnan(found[i]) && std::isnan(expected[i]))) continue;
    if (count++ == 0) {
      std::array<char, 128> text;
      std::snprintf(text.data(), text.size(), "element %zu: the GPU has %a, the emulation %a", i,
                    found[i], expected[i]);
      first = text.data();
    }
  }
  return count;
}

struct Fragments {
  std::array<unsigned, 128> a;
  std::array<unsigned, 64> b;
  std::array<float, 128> d;
};

// Numbers of a 16-bit format whose exponents are at most `spread` from 0; -1: any bits at all.
Fragments random_fragments(std::mt19937& random, bool is_f16, int spread) {
  const unsigned mantissa = is_f16 ? 10 : 7;
  const int bias = is_f16 ? 15 : 127;
  const auto number = [&] {
    if (spread < 0) return static_cast<unsigned>(random() & 0xffffU);
    const int field = bias + static_cast<int>(random() % (2 * spread + 1)) - spread;
    return static_cast<unsigned>((random() & 1U) << 15U | static_cast<unsigned>(field) << mantissa |
                                 (random() & ((1U << mantissa) - 1)));
  };
  Fragments fragments;
  for (unsigned& each : fragments.a) each = number() << 16U | number();
  for (unsigned& each : fragments.b) each = number() << 16U | number();
  for (float& each : fragments.d) {
    const auto bits = static_cast<std::uint32_t>(random());
    each = spread < 0 ? std::bit_cast<float>(bits)
                      : std::ldexp(static_cast<float>(static_cast<std::int32_t>(bits)),
                                   static_cast<int>(random() % 16) - 38);
  }
  return fragments;
}

void expect_same_products(std::mt19937& random, Product product, int spread) {
  const bool is_f16 = product == Product::kF16 || product == Product::kF16Zero;
  int wrong = 0;
  std::string first;
  for (int round = 0; round < 500; ++round) {
    const Fragments fragments = random_fragments(random, is_f16, spread);
    std::array<float, 128> expected = fragments.d;
    emulated::tensor_kernels.multiply(product, fragments.a.data(), fragments.b.data(),
                                      expected.data());
    const OnDevice a(fragments.a);
    const OnDevice b(fragments.b);
    const OnDevice d(fragments.d);
    cuda::tensor_kernels.multiply(product, a.data(), b.data(), d.data());
    std::string text;
    const int here = differences(d.read(), expected, text);
    if (wrong == 0) first = text;
    wrong += here;
  }
  EXPECT_EQ(wrong, 0) << "of 64000 sums, exponents within " << spread << "; " << first;
}

TEST_F(GpuTensorCore, SumsOfF16) {
  needs_hopper();
  for (const int spread : {0, 2, 5, 9, 13}) expect_same_products(random_, Product::kF16, spread);
}

TEST_F(GpuTensorCore, SumsOfF16FromZero) {
  needs_hopper();
  for (const int spread : {0, 5, 13}) expect_same_products(random_, Product::kF16Zero, spread);
}

TEST_F(GpuTensorCore, SumsOfBF16) {
  needs_hopper();
  for (const int spread : {0, 5, 13}) expect_same_products(random_, Product::kBF16, spread);
  for (const int spread : {0, 30}) expect_same_products(random_, Product::kBF16Zero, spread);
}

TEST_F(GpuTensorCore, SumsOfAnyF16) {
  needs_hopper();
  expect_same_products(random_, Product::kF16, -1);
}

TEST_F(GpuTensorCore, SumsOfAnyBF16) {
  needs_hopper();
  expect_same_products(random_, Product::kBF16, -1);
}

TEST_F(GpuTensorCore, LoadsMatrices) {
  std::array<unsigned, 128> rows;
  for (unsigned& each : rows) each = static_cast<unsigned>(random_());
  const OnDevice on_device(rows);
  for (const bool transposed : {false, true}) {
    for (const int stride : {4, 12, 32}) {
      std::array<unsigned, 128> expected{};
      emulated::tensor_kernels.load(rows.data(), expected.data(), stride, transposed);
      const OnDevice<unsigned, 128> found;
      cuda::tensor_kernels.load(on_device.data(), found.data(), stride, transposed);
      EXPECT_EQ(found.read(), expected);
    }
  }
}

TEST_F(GpuTensorCore, Converts) {
  for (int round = 0; round < 500; ++round) {
    std::array<float, 64> numbers;
    for (float& each : numbers) {
      const auto bits = static_cast<std::uint32_t>(random_());
      each = round % 2 == 0 ? std::bit_cast<float>(bits)
                            : std::ldexp(static_cast<float>(bits >> 16U),  // many ties
                                         static_cast<int>(bits % 48) - 40);
    }
    std::array<unsigned, 64> expected_pairs{};
    std::array<float, 128> expected_back{};
    emulated::tensor_kernels.convert(numbers.data(), expected_pairs.data(), expected_back.data());
    const OnDevice input(numbers);
    const OnDevice<unsigned, 64> pairs;
    const OnDevice<float, 128> back;
    cuda::tensor_kernels.convert(input.data(), pairs.data(), back.data());
    ASSERT_EQ(pairs.read(), expected_pairs);
    std::string first;
    ASSERT_EQ(differences(back.read(), expected_back, first), 0) << first;
  }
}

TEST_F(GpuTensorCore, CopiesAndVotes) {
  std::array<float, 64> numbers;
  std::array<int, 32> inside;
  for (float& each : numbers) each = static_cast<float>(static_cast<int>(random_() % 100) - 50);
  for (int& each : inside) each = static_cast<int>(random_() % 2);
  const OnDevice input(numbers);
  const OnDevice inside_on_device(inside);
  std::array<float, 64> expected{};
  emulated::tensor_kernels.copy_by_8(numbers.data(), inside.data(), expected.data());
  const OnDevice<float, 64> copied;
  cuda::tensor_kernels.copy_by_8(input.data(), inside_on_device.data(), copied.data());
  EXPECT_EQ(copied.read(), expected);

  std::array<int, 192> expected_votes{};
  emulated::tensor_kernels.vote_at_barrier(numbers.data(), expected_votes.data());
  const OnDevice<int, 192> votes;
  cuda::tensor_kernels.vote_at_barrier(input.data(), votes.data());
  const auto found = votes.read();
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(i < 64 ? found[i] : found[i] != 0, expected_votes[i]) << i;
  }
}

}  // namespace
}  // namespace fastattn::testing
