#include "emulation/tensor_core.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

namespace fastattn::emulation {
namespace {

constexpr int kRows = 16;             // of A and D
constexpr int kDepth = 16;            // columns of A, rows of B
constexpr int kColumns = 8;           // of B and D
constexpr int kFraction = 25;         // bits that are kept below the largest exponent
constexpr int kNoExponent = -1000;    // of 0, which aligns nothing
constexpr int kMostFloatScale = 127;  // as a power of two

// A format, and the type that holds a product of two of its numbers exactly.
struct F16 {
  using Real = float;
  static constexpr int kMantissa = 10;
  static constexpr int kBias = 15;
};
struct BF16 {
  using Real = double;
  static constexpr int kMantissa = 7;
  static constexpr int kBias = 127;
};
template <class Format>
constexpr int kSpecialField = 2 * Format::kBias + 1;  // of infinities and NaN

// Columns side by side, as the vectors of any processor.
template <class T>
constexpr int kLanes = 16 / sizeof(T);
template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(16), may_alias));  // NOLINT(modernize-use-using)
  typedef std::int32_t integers                                // NOLINT(modernize-use-using)
      __attribute__((vector_size(kLanes<T> * sizeof(std::int32_t))));
};
using Exponents = VectorOf<std::int16_t>::type;
static_assert(kLanes<std::int16_t> == kColumns);

struct Matrices {
  std::uint16_t a[kRows][kDepth];
  std::uint16_t b[kDepth][kColumns];
  float d[kRows][kColumns];
};

template <class Real>
struct Numbers {
  alignas(16) Real a[kRows][kDepth];
  alignas(16) Real b[kDepth][kColumns];
  alignas(16) std::int16_t a_exponent[kRows][kDepth];
  alignas(16) std::int16_t b_exponent[kDepth][kColumns];
};

template <class Real>
Real power_of_two(int exponent) {
  if constexpr (std::is_same_v<Real, float>) {
    return std::bit_cast<float>((exponent + 127) << 23);
  } else {
    return std::bit_cast<double>(static_cast<std::int64_t>(exponent + 1023) << 52);
  }
}

// Finite numbers; the exponent as the bits say, that of a subnormal is the smallest.
template <class Format>
void unpack(const std::uint16_t* bits, int count, typename Format::Real* values,
            std::int16_t* exponents) {
  for (int i = 0; i < count; ++i) {
    const int magnitude = bits[i] & 0x7fff;
    const int field = magnitude >> Format::kMantissa;
    const int exponent = (field == 0 ? 1 : field) - Format::kBias;
    if constexpr (std::is_same_v<Format, BF16>) {
      values[i] = std::bit_cast<float>(static_cast<std::uint32_t>(bits[i]) << 16U);
    } else {
      const int implied = field == 0 ? 0 : 1 << Format::kMantissa;
      const int fraction = magnitude & ((1 << Format::kMantissa) - 1);
      const int signed_one = bits[i] >= 0x8000 ? -1 : 1;
      values[i] = static_cast<float>(signed_one * (implied + fraction)) *
                  power_of_two<float>(exponent - Format::kMantissa);
    }
    exponents[i] = static_cast<std::int16_t>(magnitude == 0 ? kNoExponent : exponent);
  }
}

static_assert(std::endian::native == std::endian::little);  // of two in a register

Matrices gather(const std::array<const MmaOperands*, 32>& lanes) {
  Matrices m;
  for (int lane = 0; lane < 32; ++lane) {
    const MmaOperands& from = *lanes[lane];
    const int outer = lane / 4;
    const int inner = 2 * (lane % 4);
    for (int r = 0; r < 4; ++r) {
      std::memcpy(&m.a[outer + 8 * (r % 2)][inner + 8 * (r / 2)], &from.a[r], sizeof(from.a[r]));
    }
    for (int r = 0; r < 2; ++r) {
      m.b[inner + 8 * r][outer] = static_cast<std::uint16_t>(from.b[r]);
      m.b[inner + 8 * r + 1][outer] = static_cast<std::uint16_t>(from.b[r] >> 16U);
      std::memcpy(&m.d[outer + 8 * r][inner], &from.d[2 * r], 2 * sizeof(float));
    }
  }
  return m;
}

template <class Format>
bool is_special(std::uint16_t bits) {
  return (bits >> Format::kMantissa & kSpecialField<Format>) == kSpecialField<Format>;
}

// One bit for all, without a branch: 1 more in the last place of a full exponent reaches the sign.
template <class Format>
bool any_special(const Matrices& m) {
  constexpr unsigned kOne = 1U << Format::kMantissa;
  std::uint16_t half = 0;
  for (const auto& row : m.a) {
    for (const std::uint16_t bits : row)
      half |= static_cast<std::uint16_t>((bits & 0x7fffU) + kOne);
  }
  for (const auto& row : m.b) {
    for (const std::uint16_t bits : row)
      half |= static_cast<std::uint16_t>((bits & 0x7fffU) + kOne);
  }
  std::uint32_t full = 0;
  for (const auto& row : m.d) {
    for (const float value : row) {
      full |= (std::bit_cast<std::uint32_t>(value) & 0x7fffffffU) + 0x00800000U;
    }
  }
  return (half & 0x8000U) != 0 || (full & 0x80000000U) != 0;
}

// Towards zero, but beyond fp32's range to infinity, as the hardware does.
float cut_off(double x) {
  const auto rounded = static_cast<float>(x);
  const bool is_more = std::abs(static_cast<double>(rounded)) > std::abs(x);
  const bool fits = std::abs(x) < 0x1p128;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(rounded) -
                              static_cast<std::uint32_t>(is_more & fits));
}

// Row `row` of D, where all numbers are finite.
template <class Real>
void multiply_row(const Numbers<Real>& numbers, int row, float* d) {
  using Vector = typename VectorOf<Real>::type;
  using Integers = typename VectorOf<Real>::integers;
  constexpr int kVectors = kColumns / kLanes<Real>;
  const auto* b_exponent = reinterpret_cast<const Exponents*>(numbers.b_exponent);
  const auto* b = reinterpret_cast<const Vector*>(numbers.b);

  Exponents largest = {};
  for (int n = 0; n < kColumns; ++n) {
    const int field = static_cast<int>(std::bit_cast<std::uint32_t>(d[n]) >> 23U & 0xffU);
    largest[n] = static_cast<std::int16_t>(std::max(field, 1) - 127);
  }
  for (int k = 0; k < kDepth; ++k) {
    const Exponents exponent = numbers.a_exponent[row][k] + b_exponent[k];
    largest = exponent > largest ? exponent : largest;
  }
  // For float, a scale beyond the range is only asked for where all products are 0.
  constexpr int kMostScale = std::is_same_v<Real, float> ? kMostFloatScale : 1000;
  alignas(16) Real factor[kColumns];
  for (int n = 0; n < kColumns; ++n) {
    factor[n] = power_of_two<Real>(std::min(kFraction - largest[n], kMostScale));
  }
  const auto* scale = reinterpret_cast<const Vector*>(factor);
  // In units of the last bit that is kept. Of all 16 the sum might overflow.
  Integers sum[2][kVectors] = {};
  for (int half = 0; half < 2; ++half) {
    for (int k = half * kDepth / 2; k < (half + 1) * kDepth / 2; ++k) {
      const Real a = numbers.a[row][k];
      for (int i = 0; i < kVectors; ++i) {
        sum[half][i] += __builtin_convertvector(a * b[k * kVectors + i] * scale[i], Integers);
      }
    }
  }
  for (int n = 0; n < kColumns; ++n) {
    const int i = n / kLanes<Real>;
    const int at = n % kLanes<Real>;
    const auto old = static_cast<std::int32_t>(d[n] * power_of_two<double>(kFraction - largest[n]));
    const std::int64_t all = std::int64_t{sum[0][i][at]} + sum[1][i][at] + old;
    d[n] = cut_off(static_cast<double>(all) * power_of_two<double>(largest[n] - kFraction));
  }
}

template <class Format>
void multiply_finite(Matrices& m) {
  Numbers<typename Format::Real> numbers;
  unpack<Format>(m.a[0], kRows * kDepth, numbers.a[0], numbers.a_exponent[0]);
  unpack<Format>(m.b[0], kDepth * kColumns, numbers.b[0], numbers.b_exponent[0]);
  for (int row = 0; row < kRows; ++row) multiply_row(numbers, row, m.d[row]);
}

template <class Format>
double special_value(std::uint16_t bits) {
  double value = 0.0;  // a finite one matters by its sign and by being 0 alone
  if (is_special<Format>(bits)) {
    const bool is_infinite = (bits & ((1 << Format::kMantissa) - 1)) == 0;
    value = is_infinite ? std::numeric_limits<double>::infinity()
                        : std::numeric_limits<double>::quiet_NaN();
  } else if ((bits & 0x7fff) != 0) {
    value = 1.0;
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

// By the rules of IEEE 754 for infinities and NaN; sums without them are as always.
template <class Format>
void multiply_special(Matrices& m) {
  Matrices finite = m;
  const auto clear = [](auto& rows) {
    for (auto& row : rows) {
      for (std::uint16_t& bits : row) bits = is_special<Format>(bits) ? 0 : bits;
    }
  };
  clear(finite.a);
  clear(finite.b);
  for (auto& row : finite.d) {
    for (float& value : row) value = std::isfinite(value) ? value : 0.0F;
  }
  multiply_finite<Format>(finite);
  for (int row = 0; row < kRows; ++row) {
    for (int n = 0; n < kColumns; ++n) {
      double sum = std::isfinite(m.d[row][n]) ? 0.0 : m.d[row][n];
      for (int k = 0; k < kDepth; ++k) {
        sum += special_value<Format>(m.a[row][k]) * special_value<Format>(m.b[k][n]);
      }
      m.d[row][n] = std::isnan(sum)   ? std::bit_cast<float>(0x7fffffffU)  // as GPUs write it
                    : std::isinf(sum) ? static_cast<float>(sum)
                                      : finite.d[row][n];
    }
  }
}

template <class Format>
void multiply(Matrices& m) {
  if (any_special<Format>(m)) {
    multiply_special<Format>(m);
  } else {
    multiply_finite<Format>(m);
  }
}

}  // namespace

void multiply_matrices(HalfType type, const std::array<const MmaOperands*, 32>& lanes) {
  Matrices m = gather(lanes);
  if (type == HalfType::kF16) {
    multiply<F16>(m);
  } else {
    multiply<BF16>(m);
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int r = 0; r < 2; ++r) {
      std::memcpy(&lanes[lane]->d[2 * r], &m.d[lane / 4 + 8 * r][2 * (lane % 4)],
                  2 * sizeof(float));
    }
  }
}

unsigned to_f16(float x) {
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

unsigned to_bf16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (std::isnan(x)) return 0x7fffU;
  return (bits + 0x7fffU + (bits >> 16U & 1U)) >> 16U;
}

float from_f16(unsigned bits) {
  const auto half = static_cast<std::uint16_t>(bits);
  if (is_special<F16>(half)) return static_cast<float>(special_value<F16>(half));
  float value;
  std::int16_t exponent;
  unpack<F16>(&half, 1, &value, &exponent);
  return (half & 0x8000) != 0 ? -std::abs(value) : value;  // also -0
}

}  // namespace fastattn::emulation
