// The native CPU kernel, "cpu", and what it runs with on this machine.
#pragma once

#include <string_view>

#include "fastattn/fastattn.h"

namespace fastattn::cpu {

extern const Kernel cpu_kernel;

// Threads that a large call uses: OMP_NUM_THREADS where it is set, else the cores this process may
// run on.
int threads();

// "OpenMP" or "std::thread".
std::string_view threading();

// The level that is used on this machine: "x86-64-v2", "x86-64-v3", "x86-64-v4" or "baseline".
// Where FASTATTN_CPU_ARCH names a level that this machine or build lacks, the text says so.
std::string_view instruction_set();

}  // namespace fastattn::cpu
