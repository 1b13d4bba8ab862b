// Strided test arrays [B, H, L, D] of any dtype, and conversions that share nothing with the
// library's.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "fastattn/fastattn.h"

namespace fastattn::testing {

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

struct Format {
  int significand_bits;  // with the implicit one
  int min_exponent;      // of the smallest normal number
  int exponent_bits;
};

inline Format format_of(DType dtype) {
  return dtype == DType::kFloat16 ? Format{11, -14, 5} : Format{8, -126, 8};
}

// Half the distance between neighbours at 1.
inline double unit_roundoff(DType dtype) {
  return dtype == DType::kFloat32 ? 0x1p-24 : std::ldexp(1.0, -format_of(dtype).significand_bits);
}

inline std::uint16_t encode16(float value, DType dtype) {
  const Format f = format_of(dtype);
  const int stored = f.significand_bits - 1;
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
  const auto infinity = static_cast<std::uint16_t>(((1 << f.exponent_bits) - 1) << stored);
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | infinity | (1 << (stored - 1)));
  const double magnitude = std::abs(static_cast<double>(value));
  if (std::isinf(value)) return sign | infinity;
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), f.min_exponent);
  // In units of the last place; 2^stored carries into the exponent field by itself.
  const double units = std::nearbyint(std::ldexp(magnitude, stored - exponent));
  const int bits = ((exponent - f.min_exponent) << stored) + static_cast<int>(units);
  return static_cast<std::uint16_t>(sign | std::min<int>(bits, infinity));
}

inline float compute16(std::uint16_t bits, DType dtype) {
  const Format f = format_of(dtype);
  const int stored = f.significand_bits - 1;
  const int exponent = (bits >> stored) & ((1 << f.exponent_bits) - 1);
  const int fraction = bits & ((1 << stored) - 1);
  const float sign = (bits & 0x8000) != 0 ? -1.0F : 1.0F;
  if (exponent == (1 << f.exponent_bits) - 1) return fraction != 0 ? kNaN : sign * kInf;
  const int significand = exponent == 0 ? fraction : fraction + (1 << stored);
  const int power = std::max(exponent, 1) - 1 + f.min_exponent - stored;
  return sign * static_cast<float>(std::ldexp(significand, power));
}

inline std::vector<float> make_table(DType dtype) {
  std::vector<float> table;
  for (int bits = 0; bits < 1 << 16; ++bits) {
    table.push_back(compute16(static_cast<std::uint16_t>(bits), dtype));
  }
  return table;
}

inline float decode16(std::uint16_t bits, DType dtype) {
  static const std::vector<float> tables[] = {
      make_table(DType::kFloat16),
      make_table(DType::kBFloat16),
  };
  return tables[dtype == DType::kFloat16 ? 0 : 1][bits];
}

inline float round_to(float value, DType dtype) {
  return dtype == DType::kFloat32 ? value : decode16(encode16(value, dtype), dtype);
}

// How [B, H, L, D] lies in memory.
enum class Layout : std::uint8_t {
  kContiguous,   // [B, H, L, D]
  kLengthFirst,  // [B, L, H, D]
  kPadded,       // rows longer than D by 3, and the first element off any vector boundary
  kReversed,     // rows, heads and batches backwards: all strides negative
  kSharedHeads,  // head stride 0 (inputs only)
};

class Array {
 public:
  Array(DType dtype, int batch, int heads, int length, int dim, Layout layout = Layout::kContiguous)
      : dtype_(dtype), batch_(batch), heads_(heads), length_(length), dim_(dim) {
    const std::int64_t row = layout == Layout::kPadded ? dim + 3 : dim;
    stride_ = {heads * length * row, length * row, row};
    if (layout == Layout::kLengthFirst) stride_ = {heads * length * row, row, heads * row};
    if (layout == Layout::kSharedHeads) stride_ = {length * row, 0, row};
    std::int64_t count = batch * heads * length * row + kMargin;
    origin_ = layout == Layout::kPadded ? 1 : 0;
    if (layout == Layout::kReversed) {
      origin_ = (std::int64_t{batch} * heads * length - 1) * row;
      stride_ = {-stride_.batch, -stride_.head, -stride_.row};
      if (batch * heads * length == 0) origin_ = 0;
    }
    storage_.resize(static_cast<std::size_t>(count * size()));
    // What lies between the rows must never be read into a result, nor written.
    for (std::int64_t i = 0; i < count; ++i) write(i, kNaN);
  }

  [[nodiscard]] const Strides& stride() const { return stride_; }
  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] int batch() const { return batch_; }
  [[nodiscard]] int heads() const { return heads_; }
  [[nodiscard]] int length() const { return length_; }
  [[nodiscard]] int dim() const { return dim_; }
  [[nodiscard]] void* data() { return storage_.data() + origin_ * size(); }
  [[nodiscard]] const void* data() const { return storage_.data() + origin_ * size(); }

  // The whole buffer, and where in it element (0, 0, 0, 0) is.
  [[nodiscard]] std::vector<std::byte>& storage() { return storage_; }
  [[nodiscard]] const std::vector<std::byte>& storage() const { return storage_; }
  [[nodiscard]] std::int64_t origin_bytes() const { return origin_ * size(); }

  [[nodiscard]] float get(int b, int h, int i, int d) const { return read(offset(b, h, i, d)); }
  void set(int b, int h, int i, int d, float value) { write(offset(b, h, i, d), value); }

  template <class Function>  // value(b, h, i, d)
  Array& fill(Function value) {
    for (int b = 0; b < batch_; ++b) {
      for (int h = 0; h < heads_; ++h) {
        for (int i = 0; i < length_; ++i) {
          for (int d = 0; d < dim_; ++d) set(b, h, i, d, static_cast<float>(value(b, h, i, d)));
        }
      }
    }
    return *this;
  }
  Array& fill(float value) {
    return fill([value](int, int, int, int) { return value; });
  }
  Array& randomise(std::mt19937& generator, float spread = 1, float mean = 0) {
    std::normal_distribution<float> normal(mean, spread);
    return fill([&](int, int, int, int) { return normal(generator); });
  }

  [[nodiscard]] std::vector<float> values() const {
    std::vector<float> all;
    for (int b = 0; b < batch_; ++b) {
      for (int h = 0; h < heads_; ++h) {
        for (int i = 0; i < length_; ++i) {
          for (int d = 0; d < dim_; ++d) all.push_back(get(b, h, i, d));
        }
      }
    }
    return all;
  }

  // Elements that belong to no row and are no longer the NaN they began as.
  [[nodiscard]] std::int64_t count_stray_writes() const {
    std::vector<bool> in_row(storage_.size() / static_cast<std::size_t>(size()));
    for (int b = 0; b < batch_; ++b) {
      for (int h = 0; h < heads_; ++h) {
        for (int i = 0; i < length_; ++i) {
          for (int d = 0; d < dim_; ++d)
            in_row[static_cast<std::size_t>(offset(b, h, i, d))] = true;
        }
      }
    }
    std::int64_t stray = 0;
    for (std::size_t i = 0; i < in_row.size(); ++i) {
      stray += in_row[i] || std::isnan(read(static_cast<std::int64_t>(i))) ? 0 : 1;
    }
    return stray;
  }

 private:
  static constexpr std::int64_t kMargin = 64;  // elements after the last row

  [[nodiscard]] std::int64_t size() const { return dtype_ == DType::kFloat32 ? 4 : 2; }
  [[nodiscard]] std::int64_t offset(int b, int h, int i, int d) const {
    return origin_ + b * stride_.batch + h * stride_.head + i * stride_.row + d;
  }
  [[nodiscard]] float read(std::int64_t i) const {
    const std::byte* p = storage_.data() + i * size();
    if (dtype_ == DType::kFloat32) {
      float value;
      std::memcpy(&value, p, sizeof(value));
      return value;
    }
    std::uint16_t bits;
    std::memcpy(&bits, p, sizeof(bits));
    return decode16(bits, dtype_);
  }
  void write(std::int64_t i, float value) {
    std::byte* p = storage_.data() + i * size();
    if (dtype_ == DType::kFloat32) {
      std::memcpy(p, &value, sizeof(value));
    } else {
      const std::uint16_t bits = encode16(value, dtype_);
      std::memcpy(p, &bits, sizeof(bits));
    }
  }

  DType dtype_;
  int batch_, heads_, length_, dim_;
  Strides stride_;
  std::int64_t origin_;
  std::vector<std::byte> storage_;
};

}  // namespace fastattn::testing
