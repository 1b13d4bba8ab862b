// One GPU thread on the host: a function with a stack of its own, that can stop anywhere and go on
// later.
#pragma once

#include <setjmp.h>  // _setjmp and _longjmp are POSIX, not standard C++
#include <ucontext.h>

#include <cstddef>

namespace fastattn::emulation {

class Fiber {
 public:
  // The next resume() calls entry(argument) on `stack`. What ran before is dropped where it stood.
  void start(std::byte* stack, std::size_t bytes, void (*entry)(void*), void* argument);
  // Runs it until it calls suspend().
  void resume();
  // Called on the fiber's own stack: back to where resume() was called.
  void suspend();

 private:
  static void enter(unsigned high, unsigned low);

  ucontext_t context_;
  jmp_buf here_;
  jmp_buf resumer_;
  bool fresh_ = false;
  void (*entry_)(void*) = nullptr;
  void* argument_ = nullptr;
};

// Stacks for the threads of a block, each with a page below it that no access survives.
class StackArena {
 public:
  static constexpr std::size_t kStackBytes = std::size_t{64} * 1024;

  StackArena() = default;
  ~StackArena();
  StackArena(const StackArena&) = delete;
  StackArena& operator=(const StackArena&) = delete;

  void reserve(int stacks);
  [[nodiscard]] std::byte* stack(int index) const;  // its lowest address

 private:
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace fastattn::emulation
