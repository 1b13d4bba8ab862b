#pragma once

#include <functional>
#include <string_view>

namespace fastattn::cpu {

// Threads to use: OMP_NUM_THREADS, else the cores this process may run on.
int max_threads();

std::string_view threading_name();

// Runs `worker` on `count` threads, the caller's among them, and waits. The first exception that a
// worker throws is thrown again. May start fewer threads, so work is to be taken from a counter.
void run_on_threads(int count, const std::function<void()>& worker);

}  // namespace fastattn::cpu
