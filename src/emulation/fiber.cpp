// glibc's checked longjmp takes a jump to another stack for an error. Here, since a distribution's flags
// may define it behind those of the build.
#undef _FORTIFY_SOURCE
#include "emulation/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>

namespace fastattn::emulation {
namespace {

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

std::size_t slot_bytes() { return StackArena::kStackBytes + page_bytes(); }

}  // namespace

void Fiber::start(std::byte* stack, std::size_t bytes, void (*entry)(void*), void* argument) {
  entry_ = entry;
  argument_ = argument;
  fresh_ = true;
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack;
  context_.uc_stack.ss_size = bytes;
  context_.uc_link = nullptr;
  // makecontext passes ints, so the pointer goes in two halves.
  const auto self = reinterpret_cast<std::uintptr_t>(this);
  makecontext(&context_, reinterpret_cast<void (*)()>(&Fiber::enter), 2,
              static_cast<unsigned>(self >> 32U), static_cast<unsigned>(self));
}

void Fiber::enter(unsigned high, unsigned low) {
  const std::uintptr_t self = (static_cast<std::uintptr_t>(high) << 32U) | low;
  auto* fiber = reinterpret_cast<Fiber*>(self);
  fiber->entry_(fiber->argument_);
  _longjmp(fiber->resumer_, 1);
}

// A context is only entered through ucontext; from then on the switch is two jumps, since
// swapcontext makes a system call for the signal mask each time.
void Fiber::resume() {
  if (_setjmp(resumer_) != 0) return;
  if (fresh_) {
    fresh_ = false;
    setcontext(&context_);
  }
  _longjmp(here_, 1);
}

void Fiber::suspend() {
  if (_setjmp(here_) == 0) _longjmp(resumer_, 1);
}

StackArena::~StackArena() {
  if (memory_ != nullptr) munmap(memory_, bytes_);
}

void StackArena::reserve(int stacks) {
  const std::size_t bytes = static_cast<std::size_t>(stacks) * slot_bytes();
  if (bytes <= bytes_) return;
  if (memory_ != nullptr) munmap(memory_, bytes_);
  memory_ = nullptr;
  bytes_ = 0;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<std::byte*>(memory);
  bytes_ = bytes;
  for (int i = 0; i < stacks; ++i) {
    mprotect(memory_ + static_cast<std::size_t>(i) * slot_bytes(), page_bytes(), PROT_NONE);
  }
}

std::byte* StackArena::stack(int index) const {
  return memory_ + static_cast<std::size_t>(index) * slot_bytes() + page_bytes();
}

}  // namespace fastattn::emulation
