#include "emulation/tensor_core.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace fastattn::emulation {
namespace {

constexpr int kRows = 16;                    // of A and D
constexpr int kDepth = 16;                   // columns of A, rows of B
constexpr int kColumns = 8;                  // of B and D
constexpr int kFraction = 25;                // bits that are kept below the largest exponent
constexpr int kMinExponent = -126;           // of fp32
constexpr std::int16_t kNoExponent = -1000;  // of 0, which aligns nothing

double power_of_two(int exponent) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52U);
}

struct Number {
  double value;
  std::int16_t exponent;  // as the bits say; a subnormal has the smallest
};

template <HalfType kType>
Number unpack(unsigned bits) {
  constexpr int kMantissa = kType == HalfType::kF16 ? 10 : 7;
  constexpr int kBias = kType == HalfType::kF16 ? 15 : 127;
  constexpr int kSpecial = 2 * kBias + 1;
  const int field = static_cast<int>(bits >> kMantissa) & kSpecial;
  const int fraction = static_cast<int>(bits & ((1U << kMantissa) - 1));
  const int significand = field == 0 ? fraction : fraction | 1 << kMantissa;
  const int exponent = std::max(field, 1) - kBias;
  double value = significand * power_of_two(exponent - kMantissa);
  if (field == kSpecial) {
    value = fraction == 0 ? std::numeric_limits<double>::infinity()
                          : std::numeric_limits<double>::quiet_NaN();
  }
  return {(bits & 0x8000U) != 0 ? -value : value,
          significand == 0 ? kNoExponent : static_cast<std::int16_t>(exponent)};
}

struct Matrices {
  double a[kRows][kDepth];
  double b[kDepth][kColumns];
  double d[kRows][kColumns];
  std::int16_t a_exponent[kRows][kDepth];
  std::int16_t b_exponent[kDepth][kColumns];
  std::int16_t d_exponent[kRows][kColumns];
};

template <HalfType kType>
void gather(const std::array<const MmaOperands*, 32>& lanes, Matrices& m) {
  for (int lane = 0; lane < 32; ++lane) {
    const MmaOperands& from = *lanes[lane];
    const int outer = lane / 4;
    for (int i = 0; i < 2; ++i) {
      const int inner = 2 * (lane % 4) + i;
      for (int r = 0; r < 4; ++r) {
        const int row = outer + 8 * (r % 2);
        const int column = inner + 8 * (r / 2);
        const Number a = unpack<kType>(from.a[r] >> (16 * i));
        m.a[row][column] = a.value;
        m.a_exponent[row][column] = a.exponent;
      }
      for (int r = 0; r < 2; ++r) {
        const Number b = unpack<kType>(from.b[r] >> (16 * i));
        m.b[inner + 8 * r][outer] = b.value;
        m.b_exponent[inner + 8 * r][outer] = b.exponent;
        const float d = from.d[2 * r + i];
        m.d[outer + 8 * r][inner] = d;
        m.d_exponent[outer + 8 * r][inner] = static_cast<std::int16_t>(
            std::max(static_cast<int>(std::bit_cast<unsigned>(d) >> 23U & 0xffU), 1) - 127);
      }
    }
  }
}

// Towards zero, but beyond fp32's range to infinity, as the hardware does.
float cut_off(double x) {
  const auto rounded = static_cast<float>(x);
  if (std::abs(x) >= 0x1p128 || std::abs(static_cast<double>(rounded)) <= std::abs(x)) {
    return rounded;
  }
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(rounded) - 1);
}

template <int kRowCount, int kColumnCount>
bool all_finite(const double (&values)[kRowCount][kColumnCount]) {
  bool finite = true;
  for (const auto& row : values) {
    for (const double value : row) finite &= std::abs(value) <= std::numeric_limits<double>::max();
  }
  return finite;
}

// Of finite numbers. The loops over columns are vectors to the compiler.
void multiply_row(const Matrices& m, int row, float* result) {
  std::int16_t largest[kColumns];
  double scale[kColumns];
  std::int32_t sum[2][kColumns];  // in units of the last bit kept; of all 16 it might overflow
  std::copy_n(m.d_exponent[row], kColumns, largest);
  for (int k = 0; k < kDepth; ++k) {
    for (int n = 0; n < kColumns; ++n) {
      const auto exponent = static_cast<std::int16_t>(m.a_exponent[row][k] + m.b_exponent[k][n]);
      largest[n] = std::max(largest[n], exponent);
    }
  }
  for (int n = 0; n < kColumns; ++n) {
    scale[n] = power_of_two(kFraction - largest[n]);
    sum[0][n] = static_cast<std::int32_t>(m.d[row][n] * scale[n]);
    sum[1][n] = 0;
  }
  for (int half = 0; half < 2; ++half) {
    for (int k = half * kDepth / 2; k < (half + 1) * kDepth / 2; ++k) {
      for (int n = 0; n < kColumns; ++n) {
        sum[half][n] += static_cast<std::int32_t>(m.a[row][k] * m.b[k][n] * scale[n]);
      }
    }
  }
  for (int n = 0; n < kColumns; ++n) {
    result[n] = cut_off((static_cast<double>(sum[0][n]) + sum[1][n]) *
                        power_of_two(largest[n] - kFraction));
  }
}

// By the rules of IEEE 754 for infinities and NaN; sums without them are as always.
void multiply_special(const Matrices& m, float (&result)[kRows][kColumns]) {
  Matrices finite = m;
  const auto clear = [](auto& values) {
    for (auto& row : values) {
      for (double& value : row) value = std::isfinite(value) ? value : 0.0;
    }
  };
  clear(finite.a);
  clear(finite.b);
  clear(finite.d);
  for (int row = 0; row < kRows; ++row) {
    multiply_row(finite, row, result[row]);
    for (int n = 0; n < kColumns; ++n) {
      double sum = m.d[row][n];
      for (int k = 0; k < kDepth; ++k) sum += m.a[row][k] * m.b[k][n];
      if (std::isinf(sum)) result[row][n] = static_cast<float>(sum);
      if (std::isnan(sum)) result[row][n] = std::bit_cast<float>(0x7fffffffU);  // as GPUs write it
    }
  }
}

}  // namespace

void multiply_matrices(HalfType type, const std::array<const MmaOperands*, 32>& lanes) {
  Matrices m;
  if (type == HalfType::kF16) {
    gather<HalfType::kF16>(lanes, m);
  } else {
    gather<HalfType::kBF16>(lanes, m);
  }
  float result[kRows][kColumns];
  if (all_finite(m.a) && all_finite(m.b) && all_finite(m.d)) {
    for (int row = 0; row < kRows; ++row) multiply_row(m, row, result[row]);
  } else {
    multiply_special(m, result);
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i)
      lanes[lane]->d[i] = result[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
  }
}

std::uint32_t to_f16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = bits >> 16U & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return 0x7fffU;          // NaN, as GPUs write it
  if (magnitude >= 0x477ff000U) return sign | 0x7c00U;  // from 65520
  if (magnitude < 0x38800000U) {
    // Subnormal: the sum with 0.5, whose last bit is a subnormal's, is rounded as wanted.
    const float sum = std::bit_cast<float>(magnitude) + 0.5F;
    return sign | (std::bit_cast<std::uint32_t>(sum) - 0x3f000000U);
  }
  const std::uint32_t rebased = magnitude - (112U << 23U);
  return sign | (rebased + 0xfffU + (rebased >> 13U & 1U)) >> 13U;
}

std::uint32_t to_bf16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (std::isnan(x)) return 0x7fffU;
  return (bits + 0x7fffU + (bits >> 16U & 1U)) >> 16U;
}

float from_f16(std::uint32_t bits) {
  const Number number = unpack<HalfType::kF16>(bits);
  return static_cast<float>(number.value);
}

}  // namespace fastattn::emulation
