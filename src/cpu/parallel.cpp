#include "cpu/parallel.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#if FASTATTN_USE_OPENMP
#include <omp.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <unistd.h>
#endif

namespace fastattn::cpu {
namespace {

// An exception must not leave a parallel region or a thread.
class FirstException {
 public:
  void run(const std::function<void()>& worker) noexcept {
    try {
      worker();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!first_) first_ = std::current_exception();
    }
  }
  void rethrow() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr first_;
};

void run_on_std_threads(int count, const std::function<void()>& worker) {
  FirstException failure;
  std::vector<std::thread> helpers;
  helpers.reserve(static_cast<std::size_t>(count - 1));
  for (int i = 1; i < count; ++i) {
    try {
      helpers.emplace_back([&] { failure.run(worker); });
    } catch (...) {
      break;  // no thread, or no memory for one, is left for us: those that run share the work
    }
  }
  failure.run(worker);
  for (std::thread& helper : helpers) helper.join();
  failure.rethrow();
}

// Processors of the machine, whether or not this process may run on them.
int processors() {
#if defined(__unix__) || defined(__APPLE__)
  return static_cast<int>(std::max(1L, sysconf(_SC_NPROCESSORS_CONF)));
#else
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
#endif
}

// GNU's OpenMP runtime ends the process where it can't start a thread, so a slip in OMP_NUM_THREADS
// must not get as far as that. More threads than this gain nothing.
int thread_limit() {
  static const int limit = std::max(64, 4 * processors());
  return limit;
}

#if FASTATTN_USE_OPENMP

// Whether this process came from a fork and has not started another program since. Linux tells by
// the flag PF_FORKNOEXEC in field 9 of its "stat"; the name, field 2, may hold spaces.
bool loaded_in_forked_child() {
#if defined(__linux__)
  constexpr unsigned kForkNoExec = 0x40;
  std::ifstream stat("/proc/self/stat");
  std::string text;
  std::getline(stat, text);
  const std::size_t name_end = text.rfind(')');
  unsigned flags = 0;
  return name_end != std::string::npos &&
         std::sscanf(text.c_str() + name_end, ") %*c %*d %*d %*d %*d %*d %u", &flags) == 1 &&
         (flags & kForkNoExec) != 0;
#else
  return false;
#endif
}

// After fork() the child has none of the OpenMP runtime's threads, and GNU's runtime waits for them
// for ever. The child starts plain threads instead.
std::atomic<bool> is_forked_child = loaded_in_forked_child();

#if defined(__unix__) || defined(__APPLE__)
// When the library is loaded, not on its first call: the runtime is one for the whole process, and
// another library may have started its threads before the fork.
[[maybe_unused]] const int watches_for_fork =
    pthread_atfork(nullptr, nullptr, [] { is_forked_child.store(true); });
#endif

#else

// The outermost level of a list such as "4,2"; 0: not set, or not a positive number.
int threads_from_environment() {
  const char* text = std::getenv("OMP_NUM_THREADS");
  if (text == nullptr) return 0;
  const long value = std::strtol(text, nullptr, 10);
  return static_cast<int>(std::clamp<long>(value, 0, thread_limit()));
}

int threads_of_process() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

#endif

}  // namespace

#if FASTATTN_USE_OPENMP

int max_threads() { return std::min(omp_get_max_threads(), thread_limit()); }

std::string_view threading_name() { return "OpenMP"; }

void run_on_threads(int count, const std::function<void()>& worker) {
  if (count <= 1) return worker();
  if (is_forked_child.load(std::memory_order_relaxed)) return run_on_std_threads(count, worker);
  FirstException failure;
  // The whole team: GNU's runtime ends threads that a smaller team leaves out and has to start them
  // again for the next call.
#pragma omp parallel num_threads(max_threads())
  failure.run(worker);
  failure.rethrow();
}

#else

int max_threads() {
  static const int from_environment = threads_from_environment();
  return from_environment > 0 ? from_environment : threads_of_process();
}

std::string_view threading_name() { return "std::thread"; }

void run_on_threads(int count, const std::function<void()>& worker) {
  if (count <= 1) return worker();
  run_on_std_threads(count, worker);
}

#endif

}  // namespace fastattn::cpu
