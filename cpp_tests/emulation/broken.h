// Kernels with one fault each, and what the checker must say.
#pragma once

#include <span>

namespace fastattn::testing {

struct BrokenKernel {
  const char* name;  // the line at fault ends with it, as a comment
  const char* kind;
  const char* says;                                // part of the message
  void (*run)(const float* input, float* output);  // 64 floats each
};

}  // namespace fastattn::testing

namespace fastattn::checked {

std::span<const testing::BrokenKernel> broken_kernels();

}  // namespace fastattn::checked
