#include <mutex>

#include "emulation/emulation.h"
#include "emulation/observer.h"

namespace fastattn::emulation {
namespace {

// Static shared memory of the checked build is the process's, not a thread's.
std::mutex one_run;

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
