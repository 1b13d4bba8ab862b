// The emulated instructions of tensor cores against plain models of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <utility>

#include "emulation/emulation.h"
#include "emulation/tensor.h"

namespace fastattn::emulated {
extern const testing::TensorKernels tensor_kernels;
}
namespace fastattn::checked {
extern const testing::TensorKernels tensor_kernels;
}

namespace fastattn {
namespace {

using emulation::CheckedRun;
using emulation::Report;
using testing::Product;
using testing::TensorKernels;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::string findings_of(const Report& report) {
  std::string text;
  for (const auto& each : report.findings) text += each.kind + ": " + each.message + "\n";
  return text;
}

// --- ldmatrix ------------------------------------------------------------------------------------

using Words = std::array<unsigned, 128>;

// Element [row][column] of matrix m is its number, all of them different.
std::uint16_t element(int matrix, int row, int column) {
  return static_cast<std::uint16_t>(64 * matrix + 8 * row + column);
}

Words matrix_rows() {
  Words rows;
  for (int row = 0; row < 32; ++row) {
    for (int i = 0; i < 4; ++i) {
      const unsigned low = element(row / 8, row % 8, 2 * i);
      const unsigned high = element(row / 8, row % 8, 2 * i + 1);
      rows[4 * row + i] = high << 16U | low;
    }
  }
  return rows;
}

Report load_checked(const Words& rows, Words& output, int stride, bool transposed) {
  CheckedRun run(1);
  run.allow("rows", rows.data(), sizeof(rows), false, true);
  run.allow("output", output.data(), sizeof(output), true, false);
  checked::tensor_kernels.load(rows.data(), output.data(), stride, transposed);
  return run.finish();
}

TEST(LoadMatrices, ElementsGoWhereTheInstructionPutsThem) {
  const Words rows = matrix_rows();
  for (const bool transposed : {false, true}) {
    Words output{};
    emulated::tensor_kernels.load(rows.data(), output.data(), 4, transposed);
    for (int lane = 0; lane < 32; ++lane) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        const int outer = lane / 4;
        const int inner = 2 * (lane % 4);
        const unsigned word = output[4 * lane + matrix];
        EXPECT_EQ(word & 0xffffU,
                  transposed ? element(matrix, inner, outer) : element(matrix, outer, inner));
        EXPECT_EQ(word >> 16U, transposed ? element(matrix, inner + 1, outer)
                                          : element(matrix, outer, inner + 1));
      }
    }
    Words checked_output{};
    const Report report = load_checked(rows, checked_output, 4, transposed);
    EXPECT_EQ(findings_of(report), "");
    EXPECT_EQ(checked_output, output);
  }
}

TEST(LoadMatrices, CountsAsAReadOf16BytesALane) {
  // Rows that lie one behind the other fill all banks; at 32 words the 8 of a matrix share four.
  for (const auto& [stride, turns] : {std::pair{4, 4}, {32, 32}, {36, 4}, {8, 8}, {16, 16}}) {
    Words output{};
    const Report report = load_checked(matrix_rows(), output, stride, false);
    EXPECT_EQ(report.counts.shared_read_requests, 1) << stride;
    EXPECT_EQ(report.counts.shared_read_transactions, turns) << stride;
    EXPECT_EQ(report.counts.shared_read_conflicts, turns - 4) << stride;
  }
}

// --- mma -----------------------------------------------------------------------------------------

// The numbers of a 16-bit format, in bits, without the code under test.
struct Format {
  int mantissa;
  int bias;

  [[nodiscard]] double value(std::uint16_t bits) const {
    const int field = bits >> mantissa & (2 * bias + 1);
    const int fraction = bits & ((1 << mantissa) - 1);
    const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
    if (field == 2 * bias + 1) return fraction == 0 ? sign * kInf : kNaN;
    if (field == 0) return sign * std::ldexp(fraction, 1 - bias - mantissa);
    return sign * std::ldexp(fraction + (1 << mantissa), field - bias - mantissa);
  }
  [[nodiscard]] int exponent(std::uint16_t bits) const {
    return std::max(bits >> mantissa & (2 * bias + 1), 1) - bias;
  }
  // Of a number that the format has.
  [[nodiscard]] std::uint16_t bits(double number) const {
    for (int positive = 0; positive <= 0x7fff; ++positive) {
      const auto candidate = static_cast<std::uint16_t>(positive);
      if (value(candidate) == std::abs(number)) {
        return static_cast<std::uint16_t>(candidate | (std::signbit(number) ? 0x8000 : 0));
      }
    }
    ADD_FAILURE() << number << " is no number of the format";
    return 0;
  }
};
constexpr Format kF16 = {.mantissa = 10, .bias = 15};
constexpr Format kBF16 = {.mantissa = 7, .bias = 127};

struct Problem {
  std::array<std::array<std::uint16_t, 16>, 16> a{};
  std::array<std::array<std::uint16_t, 8>, 16> b{};
  std::array<std::array<float, 8>, 16> d{};
};
using Result = std::array<std::array<float, 8>, 16>;

// A and B in the registers of the lanes, as PTX ISA's figures of m16n8k16 show them.
void lay_out(const Problem& problem, unsigned* a, unsigned* b) {
  const auto pair = [](std::uint16_t low, std::uint16_t high) {
    return static_cast<unsigned>(high) << 16U | low;
  };
  for (int lane = 0; lane < 32; ++lane) {
    const int group = lane / 4;
    const int in_group = lane % 4;
    for (int i = 0; i < 8; i += 2) {
      const int row = (i < 2 || (i >= 4 && i < 6)) ? group : group + 8;
      const int column = in_group * 2 + (i < 4 ? 0 : 8);
      a[4 * lane + i / 2] = pair(problem.a[row][column], problem.a[row][column + 1]);
    }
    for (int i = 0; i < 4; i += 2) {
      const int row = in_group * 2 + (i < 2 ? 0 : 8);
      b[2 * lane + i / 2] = pair(problem.b[row][group], problem.b[row + 1][group]);
    }
  }
}

// Where the figures have element i of a lane's part of D.
template <class Rows>
auto& element_of(Rows& rows, int lane, int i) {
  return rows[lane / 4 + (i < 2 ? 0 : 8)][lane % 4 * 2 + (i & 1)];
}

Result multiply(const TensorKernels& kernels, Product product, const Problem& problem,
                CheckedRun* run = nullptr) {
  std::array<unsigned, 128> a{};
  std::array<unsigned, 64> b{};
  std::array<float, 128> d{};
  lay_out(problem, a.data(), b.data());
  for (int i = 0; i < 128; ++i) d[i] = element_of(problem.d, i / 4, i % 4);
  if (run != nullptr) {
    run->allow("a", a.data(), sizeof(a), false, true);
    run->allow("b", b.data(), sizeof(b), false, true);
    run->allow("d", d.data(), sizeof(d), true, true);
  }
  kernels.multiply(product, a.data(), b.data(), d.data());
  Result result;
  for (int i = 0; i < 128; ++i) element_of(result, i / 4, i % 4) = d[i];
  return result;
}

// One sum of 16 products and what was there, by the rule in tensor_core.h.
float sum_of(const Format& format, const std::array<std::uint16_t, 16>& a,
             const std::array<std::uint16_t, 16>& b, float d) {
  double plain = d;
  int largest = std::max(d == 0.0F ? -126 : std::ilogb(d), -126);
  for (int k = 0; k < 16; ++k) {
    const double product = format.value(a[k]) * format.value(b[k]);
    plain += product;
    if (product != 0.0) {
      largest = std::max(largest, format.exponent(a[k]) + format.exponent(b[k]));
    }
  }
  if (!std::isfinite(plain)) return static_cast<float>(plain);
  const auto cut = [largest](double x) { return std::trunc(std::ldexp(x, 25 - largest)); };
  double sum = cut(d);
  for (int k = 0; k < 16; ++k) sum += cut(format.value(a[k]) * format.value(b[k]));
  const double exact = std::ldexp(sum, largest - 25);
  if (std::abs(exact) >= 0x1p128) return std::copysign(kInf, static_cast<float>(exact));
  const int last_bit = exact == 0.0 ? 0 : std::max(std::ilogb(exact), -126) - 23;
  return static_cast<float>(std::ldexp(std::trunc(std::ldexp(exact, -last_bit)), last_bit));
}

void expect_model(const Result& result, const Problem& problem, const Format& format) {
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      std::array<std::uint16_t, 16> b;
      for (int k = 0; k < 16; ++k) b[k] = problem.b[k][column];
      const float expected = sum_of(format, problem.a[row], b, problem.d[row][column]);
      const float found = result[row][column];
      if (std::isnan(expected)) {
        EXPECT_EQ(std::bit_cast<std::uint32_t>(found), 0x7fffffffU);
      } else {
        ASSERT_EQ(found, expected) << std::hexfloat << " at " << row << ", " << column;
      }
    }
  }
}

TEST(Multiply, SumsThatFp32HoldsAreExact) {
  std::mt19937 random(1);
  const auto number = [&random] { return static_cast<int>(random() % 17) - 8; };
  for (const Format& format : {kF16, kBF16}) {
    Problem problem;
    Result expected;
    for (auto& row : problem.a) {
      for (auto& each : row) each = format.bits(number());
    }
    for (auto& row : problem.b) {
      for (auto& each : row) each = format.bits(number());
    }
    for (auto& row : problem.d) {
      for (auto& each : row) each = static_cast<float>(100 * number());
    }
    const auto product = [&](int row, int column) {
      double sum = 0.0;
      for (int k = 0; k < 16; ++k) {
        sum += format.value(problem.a[row][k]) * format.value(problem.b[k][column]);
      }
      return static_cast<float>(sum);
    };
    const bool is_f16 = format.mantissa == kF16.mantissa;
    for (const bool from_zero : {false, true}) {
      const Product kind = is_f16 ? (from_zero ? Product::kF16Zero : Product::kF16)
                                  : (from_zero ? Product::kBF16Zero : Product::kBF16);
      for (int row = 0; row < 16; ++row) {
        for (int column = 0; column < 8; ++column) {
          expected[row][column] =
              product(row, column) + (from_zero ? 0.0F : problem.d[row][column]);
        }
      }
      EXPECT_EQ(multiply(emulated::tensor_kernels, kind, problem), expected);
      CheckedRun run(2);
      EXPECT_EQ(multiply(checked::tensor_kernels, kind, problem, &run), expected);
      const Report report = run.finish();
      EXPECT_EQ(findings_of(report), "");
      EXPECT_EQ(report.counts.mmas, 1);
    }
  }
}

// Any bits at all, so also subnormals, infinities and NaN; sums of a narrower range of exponents,
// where many products count, come with `spread`.
void compare_random(const Format& format, Product product, int spread, unsigned seed) {
  std::mt19937 random(seed);
  const auto bits = [&] {
    if (spread == 0) return static_cast<std::uint16_t>(random());
    const int field = format.bias + static_cast<int>(random() % (2 * spread + 1)) - spread;
    return static_cast<std::uint16_t>((random() & 1U) << 15U |
                                      static_cast<unsigned>(field) << format.mantissa |
                                      (random() & ((1U << format.mantissa) - 1)));
  };
  Problem problem;
  for (auto& row : problem.a) std::ranges::generate(row, bits);
  for (auto& row : problem.b) std::ranges::generate(row, bits);
  for (auto& row : problem.d) {
    for (float& each : row) {
      const auto any = static_cast<std::uint32_t>(random());
      each = spread == 0 ? std::bit_cast<float>(any)
                         : std::ldexp(static_cast<float>(static_cast<std::int32_t>(any)),
                                      static_cast<int>(random() % 16) - 38);
    }
  }
  expect_model(multiply(emulated::tensor_kernels, product, problem), problem, format);
}

TEST(Multiply, AddsUpAsTheModelSays) {
  for (unsigned seed = 0; seed < 50; ++seed) {
    for (const int spread : {0, 1, 3, 8, 13}) {
      compare_random(kF16, Product::kF16, spread, seed);
      compare_random(kBF16, Product::kBF16, spread, seed);
    }
  }
}

// Row 0 of A against column 0 of B, each given by its first elements.
float first_sum(const Format& format, const std::vector<double>& a, const std::vector<double>& b,
                float d) {
  Problem problem;
  for (std::size_t k = 0; k < a.size(); ++k) problem.a[0][k] = format.bits(a[k]);
  for (std::size_t k = 0; k < b.size(); ++k) problem.b[k][0] = format.bits(b[k]);
  problem.d[0][0] = d;
  const Product product = format.bias == kF16.bias ? Product::kF16 : Product::kBF16;
  return multiply(emulated::tensor_kernels, product, problem)[0][0];
}

TEST(Multiply, WhatIsCutOff) {
  using Numbers = std::vector<double>;
  // 24 units of 2^-26 in all, but each product is below 2^-25.
  EXPECT_EQ(first_sum(kF16, Numbers(16, 0x1.8p-13), Numbers(16, 0x1p-13), 1.0F), 1.0F);
  EXPECT_EQ(first_sum(kF16, Numbers(16, 0x1.8p-13), Numbers(16, 0x1p-13), -1.0F), -1.0F);
  // One bit higher all of them count.
  EXPECT_EQ(first_sum(kF16, Numbers(16, 0x1p-13), Numbers(16, 0x1p-12), 1.0F), 1.0F + 0x1p-21F);
  // Towards zero, not to the nearest.
  EXPECT_EQ(first_sum(kF16, {0x1.8p-12}, {0x1p-12}, 1.0F), 1.0F);
  EXPECT_EQ(first_sum(kF16, {-0x1p-13}, {0x1p-12}, 1.0F), 1.0F - 0x1p-24F);
  // The exponent of 1.5 * 1.5 is 0, though it is more than 2.
  Numbers a(9, 0x1p-13);
  Numbers b(9, 0x1p-12);
  a[0] = b[0] = 1.5;
  EXPECT_EQ(first_sum(kF16, a, b, 0.0F), 2.25F + 0x1p-22F);
}

TEST(Multiply, TheEndsOfTheRange) {
  EXPECT_EQ(first_sum(kF16, {0x1p-24}, {0x1p-24}, 0.0F), 0x1p-48F);  // both subnormal
  EXPECT_EQ(first_sum(kF16, {65504.0}, {65504.0}, 0.0F), 65504.0F * 65504.0F);
  constexpr float kMost = std::numeric_limits<float>::max();
  EXPECT_EQ(first_sum(kBF16, {0x1p51}, {0x1p52}, kMost), kMost);
  EXPECT_EQ(first_sum(kBF16, {0x1p100}, {0x1p100}, 0.0F), kInf);
  EXPECT_EQ(first_sum(kBF16, {0x1p-75}, {0x1p-74}, 0.0F), 0x1p-149F);
  EXPECT_EQ(first_sum(kBF16, {0x1p-75}, {0x1p-75}, 0.0F), 0.0F);
}

TEST(Multiply, InfinitiesAndNaN) {
  EXPECT_EQ(first_sum(kF16, {kInf}, {2.0}, 1.0F), kInf);
  EXPECT_EQ(first_sum(kF16, {1.0}, {2.0}, -kInf), -kInf);
  EXPECT_TRUE(std::isnan(first_sum(kF16, {kInf}, {0.0}, 1.0F)));
  EXPECT_TRUE(std::isnan(first_sum(kF16, {kInf}, {1.0}, -kInf)));
  EXPECT_TRUE(std::isnan(first_sum(kBF16, {kInf, kInf}, {1.0, -1.0}, 0.0F)));
  EXPECT_TRUE(std::isnan(first_sum(kBF16, {1.0}, {1.0}, kNaN)));
  // The other rows and columns of the same instruction are as they were.
  Problem problem;
  problem.a[3][2] = kF16.bits(kInf);
  problem.b[2][5] = kF16.bits(1.0);
  problem.a[4][2] = kF16.bits(3.0);
  const Result result = multiply(emulated::tensor_kernels, Product::kF16, problem);
  EXPECT_EQ(result[3][5], kInf);
  EXPECT_TRUE(std::isnan(result[3][4]));
  EXPECT_EQ(result[4][5], 3.0F);
  EXPECT_EQ(result[4][4], 0.0F);
}

// --- cvt -----------------------------------------------------------------------------------------

std::uint16_t nearest(const Format& format, float x) {
  if (std::isnan(x)) return 0x7fff;
  const int least = 1 - format.bias - format.mantissa;
  const double magnitude = std::abs(static_cast<double>(x));
  const int last_bit =
      magnitude == 0.0 ? least : std::max(std::ilogb(magnitude) - format.mantissa, least);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(magnitude, -last_bit)), last_bit);
  const int sign = std::signbit(x) ? 0x8000 : 0;
  const auto infinity = static_cast<std::uint16_t>((2 * format.bias + 1) << format.mantissa);
  if (rounded >= std::ldexp(1.0, format.bias + 1)) return infinity | sign;
  // Numbers follow each other as their bits do.
  int low = 0;
  int high = infinity;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (format.value(static_cast<std::uint16_t>(middle)) <= rounded ? low : high) = middle;
  }
  return static_cast<std::uint16_t>(low | sign);
}

TEST(Convert, RoundsToNearestTiesToEven) {
  std::vector<float> numbers = {0.0F,
                                -0.0F,
                                1.0F,
                                65504.0F,
                                65519.996F,
                                65520.0F,
                                -65520.0F,
                                1e30F,
                                kInf,
                                -kInf,
                                kNaN,
                                -kNaN,
                                0x1p-24F,
                                0x1p-25F,
                                0x1.000002p-25F,
                                0x1.8p-24F,
                                -0x1.8p-24F,
                                0x1p-26F,
                                0x1.ffcp-15F,
                                0x1.ffep-15F,
                                0x1p-14F,
                                0x1.002p0F,
                                0x1.006p0F,
                                0x1.00200001p0F,
                                0x1.01p0F,
                                0x1.03p0F,
                                0x1.010002p0F,
                                0x1p-149F,
                                0x1p-133F,
                                0x1p-134F,
                                0x1.8p-133F,
                                std::numeric_limits<float>::max(),
                                0x1.fep127F,
                                0x1.fefffep127F,
                                0x1.ffp127F};
  std::mt19937 random(3);
  while (numbers.size() < 4096) {
    numbers.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
    numbers.push_back(
        std::ldexp(static_cast<float>(random() % 65536), static_cast<int>(random() % 48) - 40));
  }
  numbers.resize(4096);
  for (std::size_t first = 0; first < numbers.size(); first += 64) {
    std::array<unsigned, 64> pairs{};
    std::array<float, 128> back{};
    emulated::tensor_kernels.convert(&numbers[first], pairs.data(), back.data());
    for (int i = 0; i < 64; ++i) {
      const float x = numbers[first + i];
      const auto half = [&](int kind) {
        return static_cast<std::uint16_t>(pairs[32 * kind + i / 2] >> (16 * (i % 2)));
      };
      EXPECT_EQ(half(0), nearest(kF16, x)) << x;
      EXPECT_EQ(half(1), nearest(kBF16, x)) << x;
      if (std::isnan(x)) {
        EXPECT_TRUE(std::isnan(back[i]) && std::isnan(back[64 + i]));
      } else {
        EXPECT_EQ(back[i], kF16.value(half(0)));
        EXPECT_EQ(back[64 + i], kBF16.value(half(1)));
      }
    }
  }
}

// --- what sums over a head dim cut off -----------------------------------------------------------

// Of `found`, by which part they fall short of `exact`: large sums, whose errors cost most, count
// most.
class Shortfall {
 public:
  void add(float found, double exact) {
    short_ += (exact - found) * exact;
    squares_ += exact * exact;
  }
  [[nodiscard]] double relative() const { return short_ / squares_; }

 private:
  double short_ = 0.0;
  double squares_ = 0.0;
};

// Why V6 adds up float32 scores in runs of 32 columns, outside of the tensor core: numbers of one
// sign show it best, as each step cuts off a part of the sum so far.
TEST(Scores, FallShortByLessInRunsOf32Columns) {
  constexpr int kRun = 32 / 16;
  std::map<int, double> whole;
  std::map<int, double> in_runs;
  for (const int head_dim : {64, 256}) {
    const int steps = head_dim / 16;
    std::mt19937 random(static_cast<unsigned>(head_dim));
    std::normal_distribution<float> normal;
    const auto number = [&] { return nearest(kF16, std::abs(normal(random))); };
    Shortfall of_whole;
    Shortfall of_runs;
    for (int round = 0; round < 20; ++round) {
      std::vector<unsigned> a(128 * steps);
      std::vector<unsigned> b(64 * steps);
      std::array<std::array<double, 8>, 16> exact{};
      for (int step = 0; step < steps; ++step) {
        Problem problem;
        for (auto& row : problem.a) std::ranges::generate(row, number);
        for (auto& row : problem.b) std::ranges::generate(row, number);
        lay_out(problem, &a[128 * step], &b[64 * step]);
        for (int k = 0; k < 16; ++k) {
          std::array<double, 8> row;
          for (int n = 0; n < 8; ++n) row[n] = kF16.value(problem.b[k][n]);
          for (int m = 0; m < 16; ++m) {
            const double left = kF16.value(problem.a[m][k]);
            for (int n = 0; n < 8; ++n) exact[m][n] += left * row[n];
          }
        }
      }
      std::array<float, 128> sums;
      std::array<float, 128> sums_of_runs;
      emulated::tensor_kernels.score(steps, kRun, a.data(), b.data(), sums.data(),
                                     sums_of_runs.data());
      for (int i = 0; i < 128; ++i) {
        const double value = element_of(exact, i / 4, i % 4);
        of_whole.add(sums[i], value);
        of_runs.add(sums_of_runs[i], value);
      }
    }
    whole[head_dim] = of_whole.relative();
    in_runs[head_dim] = of_runs.relative();
  }
  EXPECT_GT(whole[64], 0x1p-24);
  EXPECT_GT(whole[256], 4 * whole[64]);
  EXPECT_LT(in_runs[64], 0.7 * whole[64]);
  EXPECT_LT(in_runs[256], 1.1 * in_runs[64]);
}

// --- cp.async, barriers --------------------------------------------------------------------------

TEST(Copy, EightBytesOrZeros) {
  alignas(16) std::array<float, 64> input;
  for (int i = 0; i < 64; ++i) input[i] = static_cast<float>(i + 1);
  std::array<int, 32> inside;
  std::array<float, 64> expected = input;
  for (int lane = 0; lane < 32; ++lane) {
    inside[lane] = lane % 3 == 0 ? 0 : 1;
    if (inside[lane] == 0) expected[2 * lane] = expected[2 * lane + 1] = 0.0F;
  }
  std::array<float, 64> output{};
  emulated::tensor_kernels.copy_by_8(input.data(), inside.data(), output.data());
  EXPECT_EQ(output, expected);
  CheckedRun run(0);
  run.allow("input", input.data(), sizeof(input), false, true);
  run.allow("inside", inside.data(), sizeof(inside), false, true);
  run.allow("output", output.data(), sizeof(output), true, false);
  output = {};
  checked::tensor_kernels.copy_by_8(input.data(), inside.data(), output.data());
  const Report report = run.finish();
  EXPECT_EQ(findings_of(report), "");
  EXPECT_EQ(output, expected);
  EXPECT_EQ(report.counts.shared_write_transactions, 2);  // 8 bytes a lane: half a warp a turn
}

TEST(Barrier, CountsVotes) {
  for (const int positive : {0, 1, 40, 64}) {
    std::array<float, 64> input{};
    std::fill_n(input.rbegin(), positive, 1.0F);
    std::array<int, 192> output{};
    emulated::tensor_kernels.vote_at_barrier(input.data(), output.data());
    for (int i = 0; i < 64; ++i) {
      EXPECT_EQ(output[i], positive);
      EXPECT_EQ(output[64 + i] != 0, positive > 0);
      EXPECT_EQ(output[128 + i] != 0, positive == 64);
    }
  }
}

}  // namespace
}  // namespace fastattn
