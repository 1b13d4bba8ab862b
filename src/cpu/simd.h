// Vectors of fp32 for the level this translation unit is compiled for, in GCC's vector extensions.
// Everything sits in an anonymous namespace and nothing inline of std:: is used: a function that
// the linker could merge with a copy from another level might run AVX-512 on a machine without it.
#pragma once

#include <cstdint>

#include "fastattn/fastattn.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

#define FASTATTN_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define FASTATTN_UNROLL _Pragma("clang loop unroll(full)")
#else
#define FASTATTN_UNROLL _Pragma("GCC unroll 16")
#endif

namespace fastattn::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4), may_alias));
typedef std::int32_t IntVec __attribute__((vector_size(kLanes * 4), may_alias));
typedef std::uint32_t BitsVec __attribute__((vector_size(kLanes * 4), may_alias));
typedef std::uint16_t HalfVec __attribute__((vector_size(kLanes * 2), may_alias));
// As they lie in the caller's arrays: aligned to their element only.
typedef float LooseVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef std::uint16_t LooseHalfVec __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

constexpr float kInfinity = __builtin_inff();

FASTATTN_INLINE Vec broadcast(float x) { return x - Vec{}; }
FASTATTN_INLINE Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
FASTATTN_INLINE void store(float* p, Vec x) { *reinterpret_cast<Vec*>(p) = x; }
FASTATTN_INLINE IntVec load(const std::int32_t* p) { return *reinterpret_cast<const IntVec*>(p); }

// A NaN in `x` is passed over: it comes back through exp2 and the row sum.
FASTATTN_INLINE Vec max_of(Vec x, Vec running) { return x > running ? x : running; }

// 2^x for x <= 0, within 2 ulp. Exactly 1 at 0; exactly 0 below -126.5 and at -inf; NaN stays NaN.
// x = n + r with |r| <= 1/2: adding 1.5 * 2^23 + 127 rounds x and leaves n + 127 in the low bits,
// and 2^r is the minimax polynomial with p(0) = 1 (relative error 9.2e-8).
FASTATTN_INLINE Vec exp2_nonpositive(Vec x) {
  constexpr float kRound = 12582912.0F + 127.0F;
  x = max_of(broadcast(-127.0F), x);
  const Vec shifted = x + kRound;
  const Vec r = x - (shifted - kRound);
  Vec p = broadcast(0x1.5bba14p-10F);
  p = p * r + 0x1.3cea88p-7F;
  p = p * r + 0x1.c6b752p-5F;
  p = p * r + 0x1.ebf9bcp-3F;
  p = p * r + 0x1.62e42ap-1F;
  p = p * r + 1.0F;
  return p * reinterpret_cast<Vec>(reinterpret_cast<BitsVec>(shifted) << 23);
}

// The storage formats. load() widens to fp32, store() rounds to nearest even.
template <DType kDType>
struct Element;

template <>
struct Element<DType::kFloat32> {
  using Type = float;
  static FASTATTN_INLINE Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
  static FASTATTN_INLINE void store(float* p, Vec x) { *reinterpret_cast<LooseVec*>(p) = x; }
};

template <>
struct Element<DType::kBFloat16> {
  using Type = std::uint16_t;
  static FASTATTN_INLINE Vec load(const std::uint16_t* p) {
    const LooseHalfVec half = *reinterpret_cast<const LooseHalfVec*>(p);
    return reinterpret_cast<Vec>(__builtin_convertvector(half, BitsVec) << 16);
  }
  static FASTATTN_INLINE void store(std::uint16_t* p, Vec x) {
    const BitsVec bits = reinterpret_cast<BitsVec>(x);
    const BitsVec rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
    const BitsVec quiet_nan = (bits >> 16) | 0x40U;
    *reinterpret_cast<LooseHalfVec*>(p) =
        __builtin_convertvector(x != x ? quiet_nan : rounded, HalfVec);
  }
};

template <>
struct Element<DType::kFloat16> {
  using Type = std::uint16_t;
#if defined(__F16C__)
  static FASTATTN_INLINE Vec load(const std::uint16_t* p) {
    const HalfVec half = *reinterpret_cast<const LooseHalfVec*>(p);
#if defined(__AVX512F__)  // masked forms: GCC warns of the undefined vector inside the plain ones
    return reinterpret_cast<Vec>(_mm512_maskz_cvtph_ps(0xFFFF, reinterpret_cast<__m256i>(half)));
#else
    return reinterpret_cast<Vec>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(half)));
#endif
  }
  static FASTATTN_INLINE void store(std::uint16_t* p, Vec x) {
#if defined(__AVX512F__)
    const HalfVec half = reinterpret_cast<HalfVec>(_mm512_maskz_cvtps_ph(
        0xFFFF, reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    const HalfVec half = reinterpret_cast<HalfVec>(
        _mm256_cvtps_ph(reinterpret_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT));
#endif
    *reinterpret_cast<LooseHalfVec*>(p) = half;
  }
#else
  static FASTATTN_INLINE Vec load(const std::uint16_t* p) {
    const LooseHalfVec half = *reinterpret_cast<const LooseHalfVec*>(p);
    const BitsVec bits = __builtin_convertvector(half, BitsVec);
    const BitsVec sign = (bits & 0x8000U) << 16;
    const BitsVec magnitude = (bits & 0x7FFFU) << 13;
    // The exponent bias changes by 112; the product also normalises subnormal numbers.
    const BitsVec finite = reinterpret_cast<BitsVec>(reinterpret_cast<Vec>(magnitude) * 0x1p112F);
    const BitsVec special = magnitude | 0x7F800000U;
    return reinterpret_cast<Vec>(sign | (magnitude >= 0x0F800000U ? special : finite));
  }
  static FASTATTN_INLINE void store(std::uint16_t* p, Vec x) {
    const BitsVec bits = reinterpret_cast<BitsVec>(x);
    const BitsVec magnitude = bits & 0x7FFFFFFFU;
    const BitsVec normal = (magnitude - 0x37FFF001U + ((magnitude >> 13) & 1U)) >> 13;
    // Below 2^-14: adding 1/2 leaves the value in units of 2^-24, rounded, in the low bits.
    const Vec units = reinterpret_cast<Vec>(magnitude) + 0.5F;
    const BitsVec subnormal = reinterpret_cast<BitsVec>(units) - 0x3F000000U;
    BitsVec half = magnitude < 0x38800000U ? subnormal : normal;
    half = magnitude >= 0x477FF000U ? BitsVec{} + 0x7C00U : half;  // rounds to infinity
    half = magnitude > 0x7F800000U ? BitsVec{} + 0x7E00U : half;   // NaN
    *reinterpret_cast<LooseHalfVec*>(p) =
        __builtin_convertvector(half | ((bits >> 16) & 0x8000U), HalfVec);
  }
#endif
};

// The first `count` of a vector; the rest reads as zero and is not written.
template <DType kDType>
FASTATTN_INLINE Vec load_first(const typename Element<kDType>::Type* p, int count) {
  if (count >= kLanes) return Element<kDType>::load(p);
  typename Element<kDType>::Type padded[kLanes] = {};
  for (int i = 0; i < count; ++i) padded[i] = p[i];
  return Element<kDType>::load(padded);
}

template <DType kDType>
FASTATTN_INLINE void store_first(typename Element<kDType>::Type* p, Vec x, int count) {
  if (count >= kLanes) return Element<kDType>::store(p, x);
  typename Element<kDType>::Type padded[kLanes];
  Element<kDType>::store(padded, x);
  for (int i = 0; i < count; ++i) p[i] = padded[i];
}

FASTATTN_INLINE Vec interleave_low(Vec a, Vec b) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(__AVX2__)
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
  return __builtin_shufflevector(a, b, 0, 4, 1, 5);
#endif
}

FASTATTN_INLINE Vec interleave_high(Vec a, Vec b) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                 31);
#elif defined(__AVX2__)
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  return __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

// Row and column index are a string of 2 log2(kLanes) bits; interleaving row i with row
// i + kLanes / 2 rotates that string by one, so log2(kLanes) rounds swap rows and columns.
FASTATTN_INLINE void transpose(Vec (&rows)[kLanes]) {
  constexpr int kHalf = kLanes / 2;
  FASTATTN_UNROLL
  for (int round = 1; round < kLanes; round *= 2) {
    Vec next[kLanes];
    FASTATTN_UNROLL
    for (int i = 0; i < kHalf; ++i) {
      next[2 * i] = interleave_low(rows[i], rows[i + kHalf]);
      next[2 * i + 1] = interleave_high(rows[i], rows[i + kHalf]);
    }
    FASTATTN_UNROLL
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}

}  // namespace
}  // namespace fastattn::cpu
