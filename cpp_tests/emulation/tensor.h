// Kernels of one warp around the instructions of tensor cores, one for each test.
#pragma once

namespace fastattn::testing {

enum class Product { kF16, kBF16, kF16Zero, kBF16Zero };

struct TensorKernels {
  // 32 rows of 4 words, `stride` words from one to the next in shared memory -> [lane][4].
  void (*load)(const unsigned* rows, unsigned* output, int stride, bool transposed);
  // a [lane][4], b [lane][2], d [lane][4], which becomes a b + d, or a b.
  void (*multiply)(Product product, const unsigned* a, const unsigned* b, float* d);
  // a [steps][lane][4], b [steps][lane][2] of f16 -> a b summed over all steps [lane][4], in one
  // sum and in sums of `run` steps.
  void (*score)(int steps, int run, const unsigned* a, const unsigned* b, float* whole,
                float* in_runs);
  // 32 pairs, low before high -> [f16, bf16][32] as pairs, and back to [f16, bf16][64].
  void (*convert)(const float* input, unsigned* pairs, float* back);
  // Lane i copies 8 bytes from input + 2 * i, or zeros where inside[i] is 0 -> [64].
  void (*copy_by_8)(const float* input, const int* inside, float* output);
  // 64 threads: how many of input are positive, whether any is, and whether all are -> [3][64].
  void (*vote_at_barrier)(const float* input, int* output);
};

}  // namespace fastattn::testing
