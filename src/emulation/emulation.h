// The CUDA kernels on the host: for arrays on the CPU, for a debugger, for a check of every access,
// and for counts that no GPU is needed for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fastattn/fastattn.h"

namespace fastattn::emulation {

class Observer;

// What the calling thread does between two blocks of its launches, ten times a second at most; null:
// nothing. What it throws ends the launch.
using Pause = void (*)();
FASTATTN_EXPORT Pause set_pause(Pause pause);  // returns the one before

struct Finding {
  std::string kind;  // "race", "barrier", "warp", "out of range", "uninitialised", "misaligned"
  std::string message;
  std::string file;  // empty where no line is known
  int line = 0;
  std::int64_t block = 0;
  int thread = 0;
};

// Of the accesses that the source makes, whatever a compiler for the GPU joins or drops. Requests
// and transactions are a warp's: the lanes that are at one instruction together.
struct Counts {
  std::int64_t global_read_bytes = 0;  // that threads ask for
  std::int64_t global_write_bytes = 0;
  std::int64_t global_read_sectors = 0;  // 32-byte pieces that a request touches
  std::int64_t global_write_sectors = 0;
  std::int64_t global_read_requests = 0;
  std::int64_t global_write_requests = 0;
  std::int64_t shared_read_requests = 0;
  std::int64_t shared_write_requests = 0;
  std::int64_t shared_read_transactions = 0;  // turns that 32 banks of 4 bytes take
  std::int64_t shared_write_transactions = 0;
  std::int64_t shared_read_conflicts = 0;  // turns beyond the fewest for an access of that width
  std::int64_t shared_write_conflicts = 0;
  std::int64_t exponentials = 0;   // of threads
  std::int64_t barriers = 0;       // of blocks
  std::int64_t warp_barriers = 0;  // of warps
  std::int64_t shuffles = 0;       // of warps
  std::int64_t votes = 0;          // of warps
  std::int64_t mmas = 0;           // of warps
  std::int64_t atomics = 0;        // of threads
};

struct LaunchRecord {
  std::string kernel;
  std::int64_t blocks = 0;
  int threads = 0;
  std::size_t dynamic_shared_bytes = 0;
};

struct LineCounts {
  std::string file;
  int line = 0;
  bool is_shared = false;
  bool is_write = false;
  std::int64_t requests = 0;
  std::int64_t transactions = 0;  // shared: turns of the banks; global: 32-byte sectors
  std::int64_t conflicts = 0;
  std::int64_t bytes = 0;
};

struct Report {
  Counts counts;
  std::vector<LaunchRecord> launches;
  std::vector<Finding> findings;
  std::vector<LineCounts> lines;  // in the order of the source
};

// Runs the checked build of a kernel on arrays of the host, with the threads of each block in an
// order drawn from `seed`. Stops at an access that must not be made, so that the output is then
// incomplete. Throws ArgumentError as forward() does.
FASTATTN_EXPORT Report run_checked(const ForwardParams& params, std::string_view kernel,
                                   std::uint64_t seed);

// The same for anything that launches kernels of a checked build: tests of single kernels.
class CheckedRun {
 public:
  explicit CheckedRun(std::uint64_t seed);
  ~CheckedRun();
  CheckedRun(const CheckedRun&) = delete;
  CheckedRun& operator=(const CheckedRun&) = delete;

  // Memory that kernels may touch. `initialised`: reads before the first write are right.
  void allow(const char* name, const void* begin, std::size_t bytes, bool writable,
             bool initialised);
  [[nodiscard]] Report finish();

 private:
  std::unique_ptr<Observer> observer_;
};

}  // namespace fastattn::emulation
