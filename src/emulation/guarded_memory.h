// Memory with a wide stretch of unusable addresses on both sides, so that an index that runs out of
// one array meets no other.
#pragma once

#include <cstddef>

namespace fastattn::emulation {

class GuardedMemory {
 public:
  // At an address that is `offset` bytes beyond a multiple of 256, as cudaMalloc's are.
  explicit GuardedMemory(std::size_t bytes, std::size_t offset = 0);
  ~GuardedMemory();
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  static constexpr std::size_t kAlignment = 256;
  [[nodiscard]] std::byte* data() const { return data_; }

 private:
  void* mapping_;
  std::size_t mapped_bytes_;
  std::byte* data_;
};

}  // namespace fastattn::emulation
