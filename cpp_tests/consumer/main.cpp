// What a C++ user writes: attention over vectors in host memory, checked against its definition.
#include <fastattn/fastattn.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

namespace {

constexpr int kHeads = 2;
constexpr int kLengthQ = 5;
constexpr int kLengthKV = 70;
constexpr int kHeadDim = 64;

std::vector<float> random_values(std::size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(engine);
  return values;
}

// softmax(scale * q k^T) v in double, [H, M, D].
std::vector<double> reference(const std::vector<float>& q, const std::vector<float>& k,
                              const std::vector<float>& v, double scale) {
  std::vector<double> out(q.size());
  for (int row = 0; row < kHeads * kLengthQ; ++row) {
    const int first_key = row / kLengthQ * kLengthKV;
    double weights[kLengthKV];
    double sum = 0;
    for (int j = 0; j < kLengthKV; ++j) {
      double score = 0;
      for (int d = 0; d < kHeadDim; ++d) {
        score += double{q[row * kHeadDim + d]} * double{k[(first_key + j) * kHeadDim + d]};
      }
      sum += weights[j] = std::exp(scale * score);
    }
    for (int j = 0; j < kLengthKV; ++j) {
      for (int d = 0; d < kHeadDim; ++d) {
        out[row * kHeadDim + d] += weights[j] / sum * v[(first_key + j) * kHeadDim + d];
      }
    }
  }
  return out;
}

}  // namespace

int main() {
  const auto q = random_values(kHeads * kLengthQ * kHeadDim, 1);
  const auto k = random_values(kHeads * kLengthKV * kHeadDim, 2);
  const auto v = random_values(kHeads * kLengthKV * kHeadDim, 3);
  std::vector<float> out(q.size(), std::numeric_limits<float>::quiet_NaN());

  const fastattn::Strides stride_q{kHeads * kLengthQ * kHeadDim, kLengthQ * kHeadDim, kHeadDim};
  const fastattn::Strides stride_kv{kHeads * kLengthKV * kHeadDim, kLengthKV * kHeadDim, kHeadDim};
  fastattn::ForwardParams params{.q = q.data(),
                                 .k = k.data(),
                                 .v = v.data(),
                                 .out = out.data(),
                                 .q_stride = stride_q,
                                 .k_stride = stride_kv,
                                 .v_stride = stride_kv,
                                 .out_stride = stride_q,
                                 .batch = 1,
                                 .heads_q = kHeads,
                                 .heads_kv = kHeads,
                                 .len_q = kLengthQ,
                                 .len_kv = kLengthKV,
                                 .head_dim = kHeadDim,
                                 .head_dim_v = kHeadDim,
                                 .scale = 0.125f};
  const fastattn::Kernel& kernel = fastattn::forward(params);

  const auto expected = reference(q, k, v, 0.125);
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    difference += (out[i] - expected[i]) * (out[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  const double error = std::sqrt(difference / norm);
  const auto build = fastattn::build_info();
  std::printf("fastattn %.*s, kernel %.*s, error %.1e\n", static_cast<int>(build.version.size()),
              build.version.data(), static_cast<int>(kernel.name.size()), kernel.name.data(),
              error);
  if (!(error < 1e-6)) return 1;  // a few float32 roundings; NaN fails too

  // The library's own exception type must be catchable by name on this side of the boundary.
  try {
    fastattn::forward(params, {}, "no such kernel");
  } catch (const fastattn::ArgumentError& argument_error) {
    std::printf("refused: %s\n", argument_error.what());
    return 0;
  }
  std::puts("an unknown kernel was accepted");
  return 1;
}
