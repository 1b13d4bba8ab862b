// Sees every memory access, barrier and warp instruction of a checked run: finds faults and counts.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "emulation/emulation.h"
#include "emulation/grid.h"

namespace fastattn::emulation {

enum class Access : std::uint8_t { kRead, kWrite, kAtomic };

// Memory that a kernel may touch, with what is known of each of its bytes.
class Region {
 public:
  Region(std::string name, const void* begin, std::size_t bytes, bool writable, bool initialised);

  // Only marked bytes are elements. A tensor with gaps between its rows marks them row by row; in a
  // region that is never marked all are.
  void mark(std::size_t offset, std::size_t bytes);

 private:
  friend class Observer;

  // Who last wrote and read a byte. An epoch is a stretch of one block between two barriers.
  struct Cell {
    const void* write_pc = nullptr;
    const void* read_pc = nullptr;
    std::uint32_t write_epoch = 0;  // 0: never
    std::uint32_t write_clock = 0;  // of the writing lane
    std::uint32_t read_epoch = 0;
    std::uint32_t read_clock = 0;
    std::uint32_t read_lanes = 0;  // of read_warp
    std::int16_t writer = -1;
    std::int16_t read_warp = -1;
    std::int16_t other_reader = -1;  // a thread of another warp than read_warp
    bool atomic = false;             // the last write was one
    bool initialised = false;
  };

  [[nodiscard]] bool contains(std::uintptr_t address) const { return address - begin_ < bytes_; }
  [[nodiscard]] bool holds(std::uintptr_t address, std::size_t bytes) const;  // elements only

  std::string name_;
  std::uintptr_t begin_;
  std::size_t bytes_;
  bool writable_;
  bool is_shared_ = false;
  std::vector<bool> elements_;
  std::vector<Cell> cells_;  // none for memory that is only read
};

class Observer {
 public:
  explicit Observer(std::uint64_t seed);

  void add_region(Region region);
  void remove_region(const void* begin);

  void begin_launch(const LaunchShape& shape, const Invocation& invocation);
  void begin_block(const Block& block);
  void end_block(const Block& block);

  // From the instrumentation, on a fiber. False where the access must not happen: the block is to be
  // abandoned.
  [[nodiscard]] bool access(Thread& thread, std::uintptr_t address, std::size_t bytes, Access kind,
                            const void* pc, std::size_t alignment = 1);
  // Of ldmatrix, which reads nothing but shared memory. False: as above.
  [[nodiscard]] bool load_row(Thread& thread, const void* row, std::size_t bytes, const void* pc);
  // A copy that another agent than the thread makes, at any time until it is waited for. False: as
  // above.
  [[nodiscard]] bool copy_begins(Thread& thread, std::uintptr_t address, std::size_t bytes,
                                 const void* pc);
  [[noreturn]] void out_of_bounds(const Thread& thread, std::int64_t index, const void* pc);

  void barrier(const Block& block);                 // all threads are there
  void warp_op(const std::vector<Thread*>& lanes);  // all its lanes are there
  void exponential() { ++report_.counts.exponentials; }

  void find(const char* kind, const std::string& message, const void* pc, std::int64_t block,
            int thread, const void* other_pc = nullptr);
  void stop() { stopped_ = true; }
  [[nodiscard]] bool stopped() const { return stopped_; }
  [[nodiscard]] std::mt19937_64& random() { return random_; }
  [[nodiscard]] Report take_report();

 private:
  struct Event {
    const void* pc;
    const void* via;         // the furthest code on the way from the access before
    std::uintptr_t address;  // region and offset in it: see access()
    std::uint32_t bytes;
    Access kind;
    bool is_shared;
  };
  struct PendingWrite {  // after another thread's, in no order: a race if it changes the bytes
    std::uintptr_t address = 0;
    std::size_t bytes = 0;
    std::array<std::byte, 16> before{};
    std::string message;
    const void* pc = nullptr;
    const void* other_pc = nullptr;
  };
  struct Place {
    const void* pc;
    bool is_shared;
    bool is_write;
    auto operator<=>(const Place&) const = default;
  };
  struct Found {
    Finding finding;
    const void* pc;
    const void* other_pc;
  };
  using Group = std::vector<std::pair<int, const Event*>>;  // lane, what it does

  [[nodiscard]] bool may_touch(const Thread& thread, std::uintptr_t address, Access kind) const;
  Region* region_of(std::uintptr_t address, std::size_t bytes, Access kind);
  void refuse(const Thread& thread, std::uintptr_t address, std::size_t bytes, Access kind,
              const void* pc);
  void check(const Thread& thread, Region& region, std::uintptr_t address, std::size_t bytes,
             Access kind, const void* pc);
  [[nodiscard]] bool ordered(const Thread& thread, std::uint32_t epoch, int other,
                             std::uint32_t clock) const;
  [[nodiscard]] int unordered_reader(const Thread& thread, const Region::Cell& cell) const;
  void note_read(const Thread& thread, Region::Cell& cell, const void* pc) const;
  void settle_write(const Thread& thread);
  void flush(const std::vector<int>& threads);
  void flush_all(const Block& block);
  void count(const Group& group);

  Report report_;
  std::mt19937_64 random_;
  bool stopped_ = false;
  std::vector<Region> regions_;  // the block's shared memory first, twice: dynamic, static
  std::uint32_t epoch_ = 0;
  std::uint32_t launch_epoch_ = 0;                            // the first of the launch
  std::uint32_t block_epoch_ = 0;                             // the first of the block
  std::vector<std::array<std::uint32_t, kWarpSize>> clocks_;  // [thread][lane of its warp]
  std::vector<PendingWrite> pending_;                         // [thread]
  std::vector<std::vector<Event>> traces_;                    // [thread], since it last met others
  std::map<Place, LineCounts> places_;
  std::vector<const void*> launched_;
  std::vector<std::pair<std::uintptr_t, std::size_t>> images_;  // loaded code and its constants
  std::uintptr_t arguments_ = 0;
  std::size_t argument_bytes_ = 0;
  std::vector<Found> found_;
};

// The observer of the run on this OS thread; null in an ordinary one.
Observer*& current_observer();

}  // namespace fastattn::emulation
