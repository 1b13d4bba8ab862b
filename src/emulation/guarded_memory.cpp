#include "emulation/guarded_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

namespace fastattn::emulation {
namespace {

constexpr std::size_t kGuardBytes = std::size_t{1} << 30U;  // of addresses, not of memory

}  // namespace

GuardedMemory::GuardedMemory(std::size_t bytes, std::size_t offset) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t usable = (offset % kAlignment + bytes + page - 1) / page * page;
  mapped_bytes_ = kGuardBytes + usable + kGuardBytes;
  mapping_ =
      mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::bad_alloc();
  std::byte* const begin = static_cast<std::byte*>(mapping_) + kGuardBytes;
  if (usable != 0 && mprotect(begin, usable, PROT_READ | PROT_WRITE) != 0) {
    munmap(mapping_, mapped_bytes_);
    throw std::bad_alloc();
  }
  data_ = begin + offset % kAlignment;
}

GuardedMemory::~GuardedMemory() { munmap(mapping_, mapped_bytes_); }

}  // namespace fastattn::emulation
