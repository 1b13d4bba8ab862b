#pragma once

#include <functional>
#include <string_view>

namespace fastattn::cpu {

// Threads to use: OMP_NUM_THREADS up to a limit that no machine gains by passing, else the cores
// that this process may run on.
int max_threads();

std::string_view threading_name();

// Runs `worker` on about `count` threads, the caller's among them, and waits: on more where a team
// of threads stands ready anyway, on fewer where the system gives no more. Work is therefore to be
// taken from a counter. The first exception that a worker throws is thrown again.
void run_on_threads(int count, const std::function<void()>& worker);

}  // namespace fastattn::cpu
