// Arrays that enqueued work still reads, though nobody else may refer to them any more.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

namespace fastattn::bindings {

// Until what is enqueued on `stream` now is done. Does nothing while the stream is captured into a
// graph: what a graph reads is its owner's to keep.
void hold_until_done(int device, void* stream, std::vector<nanobind::object> objects);

// Lets go of what is done. Never waits.
void release_done() noexcept;

}  // namespace fastattn::bindings
