#include "bindings/in_flight.h"

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

}  // namespace

void hold_until_done(int device, void* stream, std::vector<nb::object> objects) {
  const cuda::DeviceGuard guard(device);
  if (cuda::is_capturing(stream)) return;
  Held entry{.device = device, .event = cuda::create_event(), .objects = std::move(objects)};
  cuda::record_event(entry.event, stream);
  held().push_back(std::move(entry));
}

void release_done() {
  if (held().empty()) return;
  // To release an object may run Python code that calls us again: first take the entry off the
  // list.
  std::list<Held> done;
  for (auto entry = held().begin(); entry != held().end();) {
    const auto next = std::next(entry);
    if (cuda::event_done(entry->event)) done.splice(done.end(), held(), entry);
    entry = next;
  }
  for (const Held& entry : done) {
    const cuda::DeviceGuard guard(entry.device);
    cuda::destroy_event(entry.event);
  }
}

}  // namespace fastattn::bindings
