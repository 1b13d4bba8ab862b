// What the compiler calls in a checked build: before every load and store (-fsanitize=thread, whose
// own runtime is not linked), at every branch's target (-fsanitize-coverage=trace-pc), and where an
// index is outside of an array (-fsanitize=bounds).
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#include "emulation/grid.h"
#include "emulation/observer.h"

namespace fastattn::emulation {
namespace {

void note(const void* address, std::size_t bytes, Access kind, const void* pc,
          std::size_t alignment = 1) {
  // A linker may give the observer an instrumented copy of a function of the standard library.
  static thread_local bool observing = false;
  Thread* thread = current_thread();
  if (observing || thread == nullptr || thread->block->observer() == nullptr) return;
  observing = true;
  const bool goes_on = thread->block->observer()->access(
      *thread, reinterpret_cast<std::uintptr_t>(address), bytes, kind, pc, alignment);
  observing = false;
  if (!goes_on) thread->block->abandon();
}

}  // namespace
}  // namespace fastattn::emulation

#define FASTATTN_CALLER __builtin_extract_return_addr(__builtin_return_address(0))
#define FASTATTN_HOOK extern "C" __attribute__((visibility("hidden"))) void
#define FASTATTN_NOTE(address, bytes, kind) \
  fastattn::emulation::note(address, bytes, fastattn::emulation::Access::kind, FASTATTN_CALLER)
// Of a type whose alignment is its size: a GPU refuses another address.
#define FASTATTN_NOTE_ALIGNED(address, bytes, kind)                                             \
  fastattn::emulation::note(address, bytes, fastattn::emulation::Access::kind, FASTATTN_CALLER, \
                            bytes)

// NOLINTBEGIN(bugprone-reserved-identifier): the compiler chose the names
#define FASTATTN_HOOKS_OF_SIZE(bytes)                                                              \
  FASTATTN_HOOK __tsan_read##bytes(void* p) { FASTATTN_NOTE_ALIGNED(p, bytes, kRead); }            \
  FASTATTN_HOOK __tsan_write##bytes(void* p) { FASTATTN_NOTE_ALIGNED(p, bytes, kWrite); }          \
  FASTATTN_HOOK __tsan_unaligned_read##bytes(void* p) { FASTATTN_NOTE(p, bytes, kRead); }          \
  FASTATTN_HOOK __tsan_unaligned_write##bytes(void* p) { FASTATTN_NOTE(p, bytes, kWrite); }        \
  FASTATTN_HOOK __tsan_volatile_read##bytes(void* p) { FASTATTN_NOTE_ALIGNED(p, bytes, kRead); }   \
  FASTATTN_HOOK __tsan_volatile_write##bytes(void* p) { FASTATTN_NOTE_ALIGNED(p, bytes, kWrite); } \
  FASTATTN_HOOK __tsan_unaligned_volatile_read##bytes(void* p) { FASTATTN_NOTE(p, bytes, kRead); } \
  FASTATTN_HOOK __tsan_unaligned_volatile_write##bytes(void* p) {                                  \
    FASTATTN_NOTE(p, bytes, kWrite);                                                               \
  }                                                                                                \
  FASTATTN_HOOK __tsan_read_write##bytes(void* p) {                                                \
    FASTATTN_NOTE_ALIGNED(p, bytes, kRead);                                                        \
    FASTATTN_NOTE(p, bytes, kWrite);                                                               \
  }                                                                                                \
  FASTATTN_HOOK __tsan_unaligned_read_write##bytes(void* p) {                                      \
    FASTATTN_NOTE(p, bytes, kRead);                                                                \
    FASTATTN_NOTE(p, bytes, kWrite);                                                               \
  }
FASTATTN_HOOKS_OF_SIZE(1)
FASTATTN_HOOKS_OF_SIZE(2)
FASTATTN_HOOKS_OF_SIZE(4)
FASTATTN_HOOKS_OF_SIZE(8)
FASTATTN_HOOKS_OF_SIZE(16)

FASTATTN_HOOK __tsan_read_range(void* p, std::size_t bytes) { FASTATTN_NOTE(p, bytes, kRead); }
FASTATTN_HOOK __tsan_write_range(void* p, std::size_t bytes) { FASTATTN_NOTE(p, bytes, kWrite); }
// Clang, for the copy of a struct.
#define FASTATTN_COPY_HOOK(name)                                                                   \
  extern "C" __attribute__((visibility("hidden"))) void* __tsan_##name(void* to, const void* from, \
                                                                       std::size_t bytes) {        \
    FASTATTN_NOTE(from, bytes, kRead);                                                             \
    FASTATTN_NOTE(to, bytes, kWrite);                                                              \
    return std::name(to, from, bytes);                                                             \
  }
FASTATTN_COPY_HOOK(memcpy)
FASTATTN_COPY_HOOK(memmove)
extern "C" __attribute__((visibility("hidden"))) void* __tsan_memset(void* to, int value,
                                                                     std::size_t bytes) {
  FASTATTN_NOTE(to, bytes, kWrite);
  return std::memset(to, value, bytes);
}

FASTATTN_HOOK __tsan_vptr_read(void**) {}
FASTATTN_HOOK __tsan_vptr_update(void**, void*) {}
FASTATTN_HOOK __tsan_init() {}
FASTATTN_HOOK __tsan_func_entry(void*) {}
FASTATTN_HOOK __tsan_func_exit() {}

// Atomics of the host's code in these files, as they stand; kernels' come through <cuda_runtime.h>.
#define FASTATTN_ATOMIC_HOOKS(T, bits)                                                \
  extern "C" __attribute__((visibility("hidden"))) T __tsan_atomic##bits##_load(      \
      const volatile void* p, int) {                                                  \
    return __atomic_load_n(static_cast<const volatile T*>(p), __ATOMIC_SEQ_CST);      \
  }                                                                                   \
  FASTATTN_HOOK __tsan_atomic##bits##_store(volatile void* p, T value, int) {         \
    __atomic_store_n(static_cast<volatile T*>(p), value, __ATOMIC_SEQ_CST);           \
  }                                                                                   \
  extern "C" __attribute__((visibility("hidden"))) T __tsan_atomic##bits##_exchange(  \
      volatile void* p, T value, int) {                                               \
    return __atomic_exchange_n(static_cast<volatile T*>(p), value, __ATOMIC_SEQ_CST); \
  }                                                                                   \
  extern "C" __attribute__((visibility("hidden"))) T __tsan_atomic##bits##_fetch_add( \
      volatile void* p, T value, int) {                                               \
    return __atomic_fetch_add(static_cast<volatile T*>(p), value, __ATOMIC_SEQ_CST);  \
  }                                                                                   \
  extern "C" __attribute__((visibility("hidden"))) T __tsan_atomic##bits##_fetch_or(  \
      volatile void* p, T value, int) {                                               \
    return __atomic_fetch_or(static_cast<volatile T*>(p), value, __ATOMIC_SEQ_CST);   \
  }
FASTATTN_ATOMIC_HOOKS(std::uint8_t, 8)
FASTATTN_ATOMIC_HOOKS(std::uint32_t, 32)
FASTATTN_ATOMIC_HOOKS(std::uint64_t, 64)

// At the start of each stretch of code without a branch.
FASTATTN_HOOK __sanitizer_cov_trace_pc() {
  fastattn::emulation::Thread* thread = fastattn::emulation::current_thread();
  if (thread == nullptr) return;
  const void* const pc = FASTATTN_CALLER;
  if (std::less<>{}(thread->furthest_pc, pc)) thread->furthest_pc = pc;
}

FASTATTN_HOOK __ubsan_handle_out_of_bounds(void*, std::uintptr_t index) {
  fastattn::emulation::Thread* thread = fastattn::emulation::current_thread();
  if (thread == nullptr || thread->block->observer() == nullptr) return;
  thread->block->observer()->out_of_bounds(*thread, static_cast<std::int64_t>(index),
                                           FASTATTN_CALLER);
}
// NOLINTEND(bugprone-reserved-identifier)
