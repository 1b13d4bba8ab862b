// Attention written down plainly: in float64 (the oracle) and in the kernel's own precision (the
// yardstick of its error), and the call under test.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cpu/array.h"
#include "fastattn/fastattn.h"

namespace fastattn::testing {

struct Result {
  std::vector<double> out;  // [B, Hq, M, Dv]
  std::vector<double> lse;  // [B, Hq, M]
};

inline bool sees(const Mask& mask, int row, int key, int len_q, int len_kv) {
  const std::int64_t distance = std::int64_t{key} - (std::int64_t{row} + len_kv - len_q);
  if (mask.causal && distance > 0) return false;
  if (mask.window_left >= 0 && distance < -mask.window_left) return false;
  return mask.window_right < 0 || distance <= mask.window_right;
}

// `Real` is what sums and exponentials are computed in; `weights` the dtype that P is rounded to.
template <class Real>
Result attention(const Array& q, const Array& k, const Array& v, float scale, const Mask& mask,
                 DType weights = DType::kFloat32) {
  constexpr Real kMinusInf = -std::numeric_limits<Real>::infinity();
  Result result;
  const int group = k.heads() == 0 ? 1 : q.heads() / k.heads();
  std::vector<Real> row(static_cast<std::size_t>(q.dim()));
  std::vector<Real> score(static_cast<std::size_t>(k.length()));
  std::vector<Real> sum(static_cast<std::size_t>(v.dim()));
  for (int b = 0; b < q.batch(); ++b) {
    for (int h = 0; h < q.heads(); ++h) {
      std::vector<Real> key_values;
      std::vector<Real> value_values;
      for (int j = 0; j < k.length(); ++j) {
        for (int d = 0; d < k.dim(); ++d) key_values.push_back(k.get(b, h / group, j, d));
        for (int d = 0; d < v.dim(); ++d) value_values.push_back(v.get(b, h / group, j, d));
      }
      for (int i = 0; i < q.length(); ++i) {
        for (int d = 0; d < q.dim(); ++d) row[static_cast<std::size_t>(d)] = q.get(b, h, i, d);
        Real max = kMinusInf;
        for (int j = 0; j < k.length(); ++j) {
          if (!sees(mask, i, j, q.length(), k.length())) continue;
          Real dot = 0;
          const Real* key = key_values.data() + std::size_t(j) * std::size_t(k.dim());
          for (int d = 0; d < k.dim(); ++d) dot += row[static_cast<std::size_t>(d)] * key[d];
          score[static_cast<std::size_t>(j)] = dot * static_cast<Real>(scale);
          max = std::max(max, score[static_cast<std::size_t>(j)]);
        }
        // With no score above -inf there is nothing to shift by, and -inf - -inf would be NaN.
        const Real shift = max == kMinusInf ? Real{0} : max;
        Real total = 0;
        std::fill(sum.begin(), sum.end(), Real{0});
        for (int j = 0; j < k.length(); ++j) {
          if (!sees(mask, i, j, q.length(), k.length())) continue;
          Real weight = std::exp(score[static_cast<std::size_t>(j)] - shift);
          total += weight;
          if (weights != DType::kFloat32) {
            weight = static_cast<Real>(round_to(static_cast<float>(weight), weights));
          }
          const Real* value = value_values.data() + std::size_t(j) * std::size_t(v.dim());
          for (int d = 0; d < v.dim(); ++d) sum[static_cast<std::size_t>(d)] += weight * value[d];
        }
        // No weight at all: no key is seen, or none has a score above -inf.
        result.lse.push_back(total == 0 ? kMinusInf : max + std::log(total));
        for (const Real x : sum) result.out.push_back(total == 0 ? Real{0} : x / total);
      }
    }
  }
  return result;
}

// ||actual - expected|| / ||expected||, once the NaN and infinities are in the same places.
inline double norm_error(const std::vector<double>& actual, const std::vector<double>& expected) {
  EXPECT_EQ(actual.size(), expected.size());
  double difference = 0;
  double norm = 0;
  int misplaced = 0;
  for (std::size_t i = 0; i < std::min(actual.size(), expected.size()); ++i) {
    if (std::isfinite(expected[i]) && std::isfinite(actual[i])) {
      difference += (actual[i] - expected[i]) * (actual[i] - expected[i]);
      norm += expected[i] * expected[i];
    } else if (!(std::isnan(actual[i]) && std::isnan(expected[i])) && actual[i] != expected[i]) {
      ++misplaced;
    }
  }
  EXPECT_EQ(misplaced, 0) << "NaN or infinity in the wrong place";
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

struct Output {
  Array out;               // [B, Hq, M, Dv]
  std::vector<float> lse;  // [B, Hq, M]

  // Full of NaN, so that what a kernel leaves out is seen.
  Output(const Array& q, const Array& v, Layout layout)
      : out(q.dtype(), q.batch(), q.heads(), q.length(), v.dim(), layout),
        lse(std::size_t(q.batch()) * std::size_t(q.heads()) * std::size_t(q.length()), kNaN) {}
};

// A call on these arrays, with their own pointers.
inline ForwardParams params_of(const Array& q, const Array& k, const Array& v, Output& output,
                               float scale, const Mask& mask) {
  return {.q = q.data(),
          .k = k.data(),
          .v = v.data(),
          .out = output.out.data(),
          .lse = output.lse.data(),
          .q_stride = q.stride(),
          .k_stride = k.stride(),
          .v_stride = v.stride(),
          .out_stride = output.out.stride(),
          .batch = q.batch(),
          .heads_q = q.heads(),
          .heads_kv = k.heads(),
          .len_q = q.length(),
          .len_kv = k.length(),
          .head_dim = q.dim(),
          .head_dim_v = v.dim(),
          .scale = scale,
          .dtype = q.dtype(),
          .mask = mask};
}

inline float default_scale(const Array& q) { return 1.0F / std::sqrt(static_cast<float>(q.dim())); }

inline Output run(const Array& q, const Array& k, const Array& v, float scale,
                  const Mask& mask = {}, Layout layout = Layout::kContiguous) {
  Output output(q, v, layout);
  const Kernel& kernel = forward(params_of(q, k, v, output, scale, mask), {}, "cpu");
  EXPECT_EQ(kernel.name, "cpu");
  EXPECT_EQ(output.out.count_stray_writes(), 0);
  return output;
}

// The rule for every comparison: at most twice the error of the plain evaluation in the same
// precision. The floor is for inputs on which that one happens to be exact: the output's own
// rounding, and in fp32 the 2 ulp of an exponential besides.
inline void expect_close(const Output& actual, const Array& q, const Array& k, const Array& v,
                         float scale, const Mask& mask = {}) {
  const Result oracle = attention<double>(q, k, v, scale, mask);
  Result plain = attention<float>(q, k, v, scale, mask, q.dtype());
  for (double& x : plain.out) x = round_to(static_cast<float>(x), q.dtype());
  const std::vector<float> out = actual.out.values();
  const double unit = unit_roundoff(q.dtype());
  const double floor = q.dtype() == DType::kFloat32 ? 4 * unit : unit;
  EXPECT_LE(norm_error({out.begin(), out.end()}, oracle.out),
            2 * norm_error(plain.out, oracle.out) + floor);
  EXPECT_LE(norm_error({actual.lse.begin(), actual.lse.end()}, oracle.lse),
            2 * norm_error(plain.lse, oracle.lse) + 0x1p-22);
}

inline void check(const Array& q, const Array& k, const Array& v, const Mask& mask = {},
                  Layout layout = Layout::kContiguous) {
  const float scale = default_scale(q);
  expect_close(run(q, k, v, scale, mask, layout), q, k, v, scale, mask);
}

}  // namespace fastattn::testing
