// The arithmetic of tensor cores and of the numbers that they take.
#pragma once

#include <array>
#include <cstdint>

namespace fastattn::emulation {

enum class HalfType : std::uint8_t { kF16, kBF16 };

// Of one lane, laid out as src/cuda/ptx/mma.cuh says.
struct MmaOperands {
  float* d;
  const unsigned* a;
  std::array<unsigned, 2> b;
};

// D [16, 8] = A [16, 16] B [16, 8] + D, for the 32 lanes of a warp.
//
// As Hopper's tensor cores sum up (found by microsoft/MMA-Sim, arXiv 2511.10909, whose results are
// those of the hardware bit for bit): the 16 products are exact; they and the old D are cut off
// towards zero 25 bits below the largest exponent among them (of a product: the sum of its
// factors'), summed up exactly, and the sum is cut off towards zero to fp32.
void multiply_matrices(HalfType type, const std::array<const MmaOperands*, 32>& lanes);

}  // namespace fastattn::emulation
