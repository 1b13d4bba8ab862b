#include <pthread.h>

#include <mutex>
#include <new>

#include "emulation/emulation.h"
#include "emulation/observer.h"

namespace fastattn::emulation {
namespace {

// Static shared memory of the checked build is the process's, not a thread's.
std::mutex one_run;

// A run of another thread does not go on in a forked child, nor end there.
[[maybe_unused]] const int watches_for_fork =
    pthread_atfork(nullptr, nullptr, [] { new (&one_run) std::mutex; });

}  // namespace

CheckedRun::CheckedRun(std::uint64_t seed) : observer_(std::make_unique<Observer>(seed)) {
  one_run.lock();
  current_observer() = observer_.get();
}

CheckedRun::~CheckedRun() {
  current_observer() = nullptr;
  one_run.unlock();
}

void CheckedRun::allow(const char* name, const void* begin, std::size_t bytes, bool writable,
                       bool initialised) {
  observer_->add_region({name, begin, bytes, writable, initialised});
}

Report CheckedRun::finish() { return observer_->take_report(); }

}  // namespace fastattn::emulation
