#include "bindings/in_flight.h"

#include <exception>
#include <iterator>
#include <list>
#include <utility>

#include "cuda/device.h"

namespace fastattn::bindings {
namespace {

namespace nb = nanobind;

struct Held {
  int device;
  void* event;
  std::vector<nb::object> objects;
};

// Guarded by the GIL, and never destroyed: at exit there may be no interpreter to release to.
std::list<Held>& held() {
  static auto* list = new std::list<Held>;
  return *list;
}

// Also where CUDA has failed: nothing will read the arrays any more, and the error is for a call to
// report whose own work it is.
bool is_over(const Held& entry) noexcept {
  try {
    return cuda::event_done(entry.event);
  } catch (const std::exception&) {
    return true;
  }
}

void destroy(const Held& entry) noexcept {
  try {
    const cuda::DeviceGuard guard(entry.device);
    cuda::destroy_event(entry.event);
  } catch (const std::exception&) {
    // The device is lost, and the event with it.
  }
}

}  // namespace

void hold_until_done(int device, void* stream, std::vector<nb::object> objects) {
  const cuda::DeviceGuard guard(device);
  if (cuda::is_capturing(stream)) return;
  Held entry{.device = device, .event = cuda::create_event(), .objects = std::move(objects)};
  cuda::record_event(entry.event, stream);
  held().push_back(std::move(entry));
}

void release_done() noexcept {
  if (held().empty()) return;
  // To release an object may run Python code that calls us again: first take the entry off the
  // list.
  std::list<Held> done;
  for (auto entry = held().begin(); entry != held().end();) {
    const auto next = std::next(entry);
    if (is_over(*entry)) done.splice(done.end(), held(), entry);
    entry = next;
  }
  for (const Held& entry : done) destroy(entry);
}

}  // namespace fastattn::bindings
