#include "emulation/observer.h"

#include <link.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <tuple>
#include <utility>

#include "emulation/source_line.h"

namespace fastattn::emulation {
namespace {

constexpr std::size_t kSectorBytes = 32;
constexpr std::size_t kBankBytes = 4;
constexpr std::size_t kBanks = 32;
constexpr std::size_t kMostFindings = 100;
constexpr std::size_t kMostAccesses = std::size_t{1} << 22U;  // of a thread between two meetings
constexpr int kDynamicShared = 0;                             // places in Observer::regions_
constexpr int kStaticShared = 1;
// In place of Cell::writer, where threads in no order updated a byte atomically.
constexpr int kSeveral = -2;      // of this block, since its last barrier
constexpr int kOtherBlocks = -3;  // of this launch

std::string plural(std::size_t count, const char* noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

const char* verb(Access kind) {
  switch (kind) {
    case Access::kRead:
      return "reads";
    case Access::kWrite:
      return "writes";
    case Access::kAtomic:
      break;
  }
  return "updates";
}

// "void fastattn::checked::(anonymous namespace)::kernel<true>(Params)" to "kernel<true>".
std::string short_name(std::string name) {
  // Of template arguments too.
  for (const std::string_view scope : {"(anonymous namespace)::", "fastattn::checked::"}) {
    for (std::size_t at = 0; (at = name.find(scope)) != std::string::npos;) {
      name.erase(at, scope.size());
    }
  }
  // The parameters begin at the first parenthesis outside of template arguments, where casts stand.
  int depth = 0;
  const auto parameters = std::ranges::find_if(name, [&depth](char c) {
    depth += (c == '<' ? 1 : 0) - (c == '>' ? 1 : 0);
    return c == '(' && depth == 0;
  });
  name.erase(parameters, name.end());
  // A template's name begins with the type that it returns.
  name = name.substr(name.substr(0, name.find('<')).find_last_of(": ") + 1);
  return name.empty() ? "kernel" : name;
}

// Turns of the banks for one request: distinct words that share a bank go one after the other.
// Accesses of 8 and 16 bytes go by halves and quarters of a warp. `fewest`: without any conflict.
template <class Group>
std::int64_t bank_turns(const Group& group, std::size_t bytes, std::int64_t* fewest) {
  const int lanes_a_phase = bytes <= kBankBytes ? 32 : bytes <= 2 * kBankBytes ? 16 : 8;
  std::int64_t turns = 0;
  *fewest = 0;
  std::vector<std::uintptr_t> words;
  for (int first = 0; first < kWarpSize; first += lanes_a_phase) {
    words.clear();
    for (const auto& [lane, event] : group) {
      if (lane < first || lane >= first + lanes_a_phase) continue;
      const std::uintptr_t end = event->address + event->bytes;
      for (std::uintptr_t word = event->address / kBankBytes; word * kBankBytes < end; ++word) {
        words.push_back(word);
      }
    }
    if (words.empty()) continue;
    std::ranges::sort(words);
    words.erase(std::unique(words.begin(), words.end()), words.end());
    std::array<std::int64_t, kBanks> in_bank{};
    for (const std::uintptr_t word : words) ++in_bank[word % kBanks];
    turns += *std::ranges::max_element(in_bank);
    ++*fewest;
  }
  return turns;
}

template <class Group>
std::int64_t sectors(const Group& group) {
  std::vector<std::uintptr_t> touched;
  for (const auto& [lane, event] : group) {
    const std::uintptr_t end = event->address + event->bytes;
    for (std::uintptr_t s = event->address / kSectorBytes; s * kSectorBytes < end; ++s) {
      touched.push_back(s);
    }
  }
  std::ranges::sort(touched);
  return std::unique(touched.begin(), touched.end()) - touched.begin();
}

}  // namespace

Observer*& current_observer() {
  thread_local Observer* observer = nullptr;
  return observer;
}

// --- memory --------------------------------------------------------------------------------------

Region::Region(std::string name, const void* begin, std::size_t bytes, bool writable,
               bool initialised)
    : name_(std::move(name)),
      begin_(reinterpret_cast<std::uintptr_t>(begin)),
      bytes_(bytes),
      writable_(writable),
      cells_(writable ? bytes : 0, Cell{.initialised = initialised}) {}

void Region::mark(std::size_t offset, std::size_t bytes) {
  elements_.resize(bytes_);  // all of them are no elements at first
  std::fill_n(elements_.begin() + static_cast<std::ptrdiff_t>(offset), bytes, true);
}

bool Region::holds(std::uintptr_t address, std::size_t bytes) const {
  const std::size_t offset = address - begin_;
  if (offset >= bytes_ || bytes > bytes_ - offset) return false;
  if (elements_.empty()) return true;
  const auto first = elements_.begin() + static_cast<std::ptrdiff_t>(offset);
  return std::find(first, first + static_cast<std::ptrdiff_t>(bytes), false) ==
         first + static_cast<std::ptrdiff_t>(bytes);
}

Observer::Observer(std::uint64_t seed) : random_(seed) {
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* images) {
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& segment = info->dlpi_phdr[i];
          if (segment.p_type != PT_LOAD) continue;
          static_cast<decltype(images_)*>(images)->emplace_back(info->dlpi_addr + segment.p_vaddr,
                                                                segment.p_memsz);
        }
        return 0;
      },
      &images_);
  regions_.emplace_back("shared memory", nullptr, 0, true, false);
  regions_.emplace_back("shared memory", nullptr, 0, true, false);
}

void Observer::add_region(Region region) { regions_.push_back(std::move(region)); }

void Observer::remove_region(const void* begin) {
  std::erase_if(regions_, [begin](const Region& region) {
    return region.begin_ == reinterpret_cast<std::uintptr_t>(begin) && !region.is_shared_ &&
           begin != nullptr;
  });
}

Region* Observer::region_of(std::uintptr_t address, std::size_t bytes, Access kind) {
  for (Region& region : regions_) {
    if (region.contains(address) && region.holds(address, bytes) &&
        (region.writable_ || kind == Access::kRead)) {
      return &region;
    }
  }
  return nullptr;
}

bool Observer::may_touch(const Thread& thread, std::uintptr_t address, Access kind) const {
  const auto stack = reinterpret_cast<std::uintptr_t>(thread.stack);
  if (address - stack < StackArena::kStackBytes) return true;
  if (address - arguments_ < argument_bytes_) return true;
  if (kind != Access::kRead) return false;  // constants; what is beside a static array is not
  return std::ranges::any_of(
      images_, [address](const auto& image) { return address - image.first < image.second; });
}

// Says where the address lies, beside the nearest memory that is known.
void Observer::refuse(const Thread& thread, std::uintptr_t address, std::size_t bytes, Access kind,
                      const void* pc) {
  const Region* nearest = nullptr;
  std::uintptr_t distance = ~std::uintptr_t{0};
  for (const Region& region : regions_) {
    if (region.bytes_ == 0) continue;
    const std::uintptr_t behind = address - (region.begin_ + region.bytes_);
    const std::uintptr_t before = region.begin_ - address;
    const std::uintptr_t here = region.contains(address) ? 0 : std::min(behind, before);
    if (here < distance) {
      distance = here;
      nearest = &region;
    }
  }
  std::string message = "thread " + std::to_string(thread.number) + " " + verb(kind) + " " +
                        plural(bytes, "byte") + " ";
  constexpr std::uintptr_t kFar = std::uintptr_t{1} << 30U;
  if (nearest == nullptr || distance > kFar) {
    message += "at an address that is no argument's";
  } else if (!nearest->contains(address)) {
    const bool is_before = address < nearest->begin_;
    message += plural(is_before ? distance : distance + 1, "byte") + " " +
               (is_before ? "before" : "past") + " the " + (is_before ? "start" : "last byte") +
               " of " + nearest->name_ + " (" + plural(nearest->bytes_, "byte") + ")";
  } else if (nearest->holds(address, bytes)) {
    message += "of " + nearest->name_ +
               (kind == Access::kRead || nearest->writable_
                    ? ", where the instruction takes shared memory alone"
                    : ", which is only read");
  } else {
    message += "at byte " + std::to_string(address - nearest->begin_) + " of " + nearest->name_ +
               " (" + plural(nearest->bytes_, "byte") + "), " +
               (bytes > nearest->bytes_ - (address - nearest->begin_) ? "past its end"
                                                                      : "between its rows");
  }
  find("out of range", message, pc, thread.block->number(), thread.number);
  stop();
}

void Observer::out_of_bounds(const Thread& thread, std::int64_t index, const void* pc) {
  find("out of range",
       "thread " + std::to_string(thread.number) + " takes element " + std::to_string(index) +
           " of an array that has no such element",
       pc, thread.block->number(), thread.number);
  stop();
  thread.block->abandon();
}

// --- order ---------------------------------------------------------------------------------------

bool Observer::ordered(const Thread& thread, std::uint32_t epoch, int other,
                       std::uint32_t clock) const {
  if (epoch < launch_epoch_) return true;
  if (other == kOtherBlocks || epoch < block_epoch_) return false;  // another block of this launch
  if (epoch < epoch_ || other == thread.number) return true;
  if (other == kSeveral || other / kWarpSize != thread.warp) return false;
  return clocks_[thread.number][other % kWarpSize] >= clock;
}

// A thread whose read of the byte is not ordered before what `thread` does now; -1: none.
int Observer::unordered_reader(const Thread& thread, const Region::Cell& cell) const {
  if (cell.read_epoch == 0 || cell.read_epoch < launch_epoch_) return -1;
  const int first = cell.read_warp * kWarpSize;
  const bool is_other_block = cell.read_epoch < block_epoch_;
  if (!is_other_block && cell.read_epoch < epoch_) return -1;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (((cell.read_lanes >> lane) & 1U) == 0) continue;
    if (!ordered(thread, cell.read_epoch, first + lane, cell.read_clock)) return first + lane;
  }
  return cell.other_reader >= 0 && cell.other_reader / kWarpSize != thread.warp ? cell.other_reader
                                                                                : -1;
}

void Observer::note_read(const Thread& thread, Region::Cell& cell, const void* pc) const {
  cell.read_pc = pc;
  const std::uint32_t lane = 1U << thread.lane;
  const std::uint32_t clock = clocks_[thread.number][thread.lane];
  if (cell.read_epoch == epoch_ && cell.read_warp != thread.warp) {
    cell.other_reader = static_cast<std::int16_t>(thread.number);
    return;
  }
  const bool keeps = cell.read_epoch == epoch_;
  if (!keeps) cell.other_reader = -1;
  // Readers that are ordered before this one need not be kept: what is ordered after this read is
  // ordered after theirs.
  if (!keeps || (cell.other_reader < 0 && unordered_reader(thread, cell) < 0)) {
    cell.read_lanes = lane;
    cell.read_clock = clock;
  } else {
    cell.read_lanes |= lane;
    cell.read_clock = std::max(cell.read_clock, clock);
  }
  cell.read_epoch = epoch_;
  cell.read_warp = static_cast<std::int16_t>(thread.warp);
}

void Observer::check(const Thread& thread, Region& region, std::uintptr_t address,
                     std::size_t bytes, Access kind, const void* pc) {
  const std::size_t offset = address - region.begin_;
  const bool writes = kind != Access::kRead;
  const bool reads = kind != Access::kWrite;
  const auto what = [&] {
    return "thread " + std::to_string(thread.number) + " " + verb(kind) + " " +
           plural(bytes, "byte") + " at byte " + std::to_string(offset) + " of " + region.name_;
  };
  bool reported = false;
  const auto report = [&](const char* finding, const std::string& message, const void* other_pc) {
    if (reported) return;
    find(finding, what() + message, pc, thread.block->number(), thread.number, other_pc);
    reported = true;
  };
  for (std::size_t i = offset; i < offset + bytes; ++i) {
    Region::Cell& cell = region.cells_[i];
    if (cell.write_epoch != 0 && !(kind == Access::kAtomic && cell.atomic) &&
        !ordered(thread, cell.write_epoch, cell.writer, cell.write_clock)) {
      const std::string other =
          cell.writer == kOtherBlocks || cell.write_epoch < block_epoch_
              ? ", which another block wrote in this launch"
          : cell.writer == kSeveral
              ? ", which several threads updated with no barrier between"
              : ", which thread " + std::to_string(cell.writer) + " wrote with no barrier between";
      if (reads) {
        report("race", other, cell.write_pc);
      } else if (PendingWrite& pending = pending_[thread.number]; pending.bytes == 0) {
        pending = {.address = address,
                   .bytes = bytes,
                   .message = what() + other,
                   .pc = pc,
                   .other_pc = cell.write_pc};
        std::memcpy(pending.before.data(), reinterpret_cast<const void*>(address),
                    std::min(bytes, pending.before.size()));
      }
    }
    if (reads && !cell.initialised) {
      const bool is_under_way = cell.write_epoch != 0;
      report("uninitialised",
             is_under_way ? ", and the copy to it is not waited for" : ", which nothing wrote",
             is_under_way ? cell.write_pc : nullptr);
    }
    if (writes) {
      const int reader = unordered_reader(thread, cell);
      if (reader >= 0) {
        report("race",
               cell.read_epoch < block_epoch_
                   ? ", which another block read in this launch"
                   : ", which thread " + std::to_string(reader) + " read with no barrier between",
               cell.read_pc);
        // So the read came too early, and that is why there was nothing to read.
        std::erase_if(found_, [&](const Found& each) {
          return each.pc == cell.read_pc && each.finding.kind == "uninitialised";
        });
      }
      // Atomics need no order among themselves, but what is in order with the last of them need not be
      // with the others.
      int writer = thread.number;
      if (kind == Access::kAtomic && cell.atomic && cell.write_epoch != 0 &&
          !ordered(thread, cell.write_epoch, cell.writer, cell.write_clock)) {
        writer = cell.writer == kOtherBlocks || cell.write_epoch < block_epoch_ ? kOtherBlocks
                                                                                : kSeveral;
      }
      cell.write_pc = pc;
      cell.write_epoch = epoch_;
      cell.write_clock = clocks_[thread.number][thread.lane];
      cell.writer = static_cast<std::int16_t>(writer);
      cell.atomic = kind == Access::kAtomic;
      cell.initialised = true;
      cell.read_epoch = 0;
    } else {
      note_read(thread, cell, pc);
    }
  }
}

// Two writes of the same value are no race that anyone can see.
void Observer::settle_write(const Thread& thread) {
  PendingWrite& pending = pending_[thread.number];
  if (pending.bytes == 0) return;
  const std::size_t bytes = std::min(pending.bytes, pending.before.size());
  if (std::memcmp(pending.before.data(), reinterpret_cast<const void*>(pending.address), bytes) !=
      0) {
    find("race", pending.message, pending.pc, thread.block->number(), thread.number,
         pending.other_pc);
  }
  pending.bytes = 0;
}

bool Observer::access(Thread& thread, std::uintptr_t address, std::size_t bytes, Access kind,
                      const void* pc, std::size_t alignment) {
  const auto stack = reinterpret_cast<std::uintptr_t>(thread.stack);
  if (address - stack < StackArena::kStackBytes) return true;
  settle_write(thread);
  Region* region = region_of(address, bytes, kind);
  if (region == nullptr) {
    if (may_touch(thread, address, kind)) return true;
    refuse(thread, address, bytes, kind, pc);
    return false;
  }
  if (traces_[thread.number].size() >= kMostAccesses) {
    find("barrier",
         "thread " + std::to_string(thread.number) + " has made " + std::to_string(kMostAccesses) +
             " accesses without a barrier: it may wait for a thread whose turn comes at one",
         pc, thread.block->number(), thread.number);
    stop();
    return false;
  }
  if (address % alignment != 0) {
    find("misaligned",
         "thread " + std::to_string(thread.number) + " " + verb(kind) + " " +
             plural(bytes, "byte") + " at byte " + std::to_string(address - region->begin_) +
             " of " + region->name_ + ", which is no multiple of " + std::to_string(alignment),
         pc, thread.block->number(), thread.number);
  }
  if (!region->cells_.empty()) check(thread, *region, address, bytes, kind, pc);
  if (kind == Access::kAtomic) ++report_.counts.atomics;
  // For the count, regions lie far apart, and as far behind a whole address as they do.
  constexpr std::uintptr_t kWhole = 256;
  const auto place = static_cast<std::uintptr_t>(region - regions_.data()) << 48U;
  const std::uintptr_t begin = region->begin_ / kWhole * kWhole;
  traces_[thread.number].push_back({.pc = pc,
                                    .via = std::exchange(thread.furthest_pc, nullptr),
                                    .address = place + (address - begin),
                                    .bytes = static_cast<std::uint32_t>(bytes),
                                    .kind = kind,
                                    .is_shared = region->is_shared_});
  return true;
}

bool Observer::load_row(Thread& thread, const void* row, std::size_t bytes, const void* pc) {
  const auto address = reinterpret_cast<std::uintptr_t>(row);
  const Region* region = region_of(address, bytes, Access::kRead);
  if (region == nullptr || !region->is_shared_) {
    refuse(thread, address, bytes, Access::kRead, pc);
    return false;
  }
  return access(thread, address, bytes, Access::kRead, pc, bytes);
}

bool Observer::copy_begins(Thread& thread, std::uintptr_t address, std::size_t bytes,
                           const void* pc) {
  settle_write(thread);
  Region* region = region_of(address, bytes, Access::kWrite);
  if (region == nullptr || !region->is_shared_) {
    refuse(thread, address, bytes, Access::kWrite, pc);
    return false;
  }
  check(thread, *region, address, bytes, Access::kWrite, pc);
  const std::size_t offset = address - region->begin_;
  for (std::size_t i = offset; i < offset + bytes; ++i) region->cells_[i].initialised = false;
  return true;
}

// --- the course of a launch ----------------------------------------------------------------------

void Observer::begin_launch(const LaunchShape& shape, const Invocation& invocation) {
  launch_epoch_ = epoch_ + 1;
  arguments_ = reinterpret_cast<std::uintptr_t>(invocation.arguments);
  argument_bytes_ = invocation.argument_bytes;
  launched_.push_back(invocation.kernel);
  report_.launches.push_back(
      {.kernel = {},
       .blocks = static_cast<std::int64_t>(shape.grid.x) * shape.grid.y * shape.grid.z,
       .threads = static_cast<int>(shape.block.x * shape.block.y * shape.block.z),
       .dynamic_shared_bytes = shape.dynamic_shared_bytes});
}

void Observer::begin_block(const Block& block) {
  block_epoch_ = ++epoch_;
  const auto threads = static_cast<std::size_t>(block.thread_count());
  traces_.resize(threads);
  pending_.assign(threads, {});
  clocks_.assign(threads, {});
  for (std::size_t i = 0; i < threads; ++i) {
    traces_[i].clear();
    clocks_[i][i % kWarpSize] = 1;
  }
  const auto shared = [](const void* begin, std::size_t bytes) {
    Region region("shared memory", begin, bytes, true, false);
    region.is_shared_ = true;
    return region;
  };
  regions_[kDynamicShared] = shared(block.shared(), block.shape().dynamic_shared_bytes);
  // Of the module that holds this function.
  struct {
    const void* here;
    const void* begin = nullptr;
    std::size_t bytes = 0;
  } tls{.here = static_cast<const void*>(&kMostFindings)};
  current_observer();  // from now on the module has its block of this thread
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* result) {
        auto& found = *static_cast<decltype(tls)*>(result);
        const auto at = reinterpret_cast<std::uintptr_t>(found.here) - info->dlpi_addr;
        bool is_ours = false;
        std::size_t bytes = 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& segment = info->dlpi_phdr[i];
          is_ours |= segment.p_type == PT_LOAD && at - segment.p_vaddr < segment.p_memsz;
          if (segment.p_type == PT_TLS) bytes = segment.p_memsz;
        }
        if (!is_ours) return 0;
        found.begin = info->dlpi_tls_data;
        found.bytes = found.begin == nullptr ? 0 : bytes;
        return 1;
      },
      &tls);
  regions_[kStaticShared] = shared(tls.begin, tls.bytes);
}

void Observer::end_block(const Block& block) {
  for (int i = 0; i < block.thread_count(); ++i) settle_write(block.thread(i));
  flush_all(block);
}

void Observer::barrier(const Block& block) {
  for (int i = 0; i < block.thread_count(); ++i) settle_write(block.thread(i));
  ++report_.counts.barriers;
  ++epoch_;
  flush_all(block);
}

void Observer::warp_op(const std::vector<Thread*>& lanes) {
  switch (lanes.front()->op.kind) {
    case WarpOpKind::kShuffle:
      ++report_.counts.shuffles;
      break;
    case WarpOpKind::kBallot:
      ++report_.counts.votes;
      break;
    case WarpOpKind::kMultiplyF16:
    case WarpOpKind::kMultiplyBF16:
      ++report_.counts.mmas;
      break;
    case WarpOpKind::kLoadMatrices:
    case WarpOpKind::kLoadMatricesTransposed:
      break;  // counted as reads
    case WarpOpKind::kSync: {
      // What the lanes did is ordered before what they do from here on; a shuffle or a vote orders
      // no memory.
      ++report_.counts.warp_barriers;
      std::array<std::uint32_t, kWarpSize> joined{};
      for (const Thread* each : lanes) {
        settle_write(*each);
        for (int i = 0; i < kWarpSize; ++i) {
          joined[i] = std::max(joined[i], clocks_[each->number][i]);
        }
      }
      const std::uint32_t newest = *std::ranges::max_element(joined);
      for (const Thread* each : lanes) joined[each->lane] = newest;
      for (const Thread* each : lanes) {
        clocks_[each->number] = joined;
        clocks_[each->number][each->lane] = newest + 1;
      }
      break;
    }
  }
  std::vector<int> threads;
  for (const Thread* each : lanes) threads.push_back(each->number);
  flush(threads);
}

// --- counting ------------------------------------------------------------------------------------

void Observer::flush_all(const Block& block) {
  std::vector<int> threads;
  for (int first = 0; first < block.thread_count(); first += kWarpSize) {
    threads.clear();
    for (int i = first; i < std::min(first + kWarpSize, block.thread_count()); ++i) {
      threads.push_back(i);
    }
    flush(threads);
  }
}

// Which accesses of the lanes are one request: a warp goes through the code in the order in which it
// lies, so lanes that are ahead wait for those behind, and meet them behind a loop or a branch.
void Observer::flush(const std::vector<int>& threads) {
  const auto same_way = [](const Event& a, const Event& b) {
    return a.pc == b.pc && a.via == b.via && a.kind == b.kind;
  };
  const std::vector<Event>& first = traces_[threads.front()];
  Group group;
  if (std::ranges::all_of(
          threads, [&](int each) { return std::ranges::equal(traces_[each], first, same_way); })) {
    for (std::size_t i = 0; i < first.size(); ++i) {
      group.clear();
      for (const int each : threads) group.emplace_back(each % kWarpSize, &traces_[each][i]);
      count(group);
    }
  } else {
    struct Lane {
      int number;
      const Event* next;
      const Event* end;
      bool on_the_way;

      [[nodiscard]] const void* place() const { return on_the_way ? next->via : next->pc; }
    };
    std::vector<Lane> lanes;
    for (const int each : threads) {
      const std::vector<Event>& trace = traces_[each];
      if (trace.empty()) continue;
      lanes.push_back({each % kWarpSize, trace.data(), trace.data() + trace.size(), true});
    }
    while (!lanes.empty()) {
      const void* const behind =
          std::ranges::min_element(lanes, std::less<>{}, &Lane::place)->place();
      // A copy reads and writes at one place; lanes that copy nothing but zeros only write.
      const bool is_read = std::ranges::any_of(lanes, [behind](const Lane& lane) {
        return lane.place() == behind && !lane.on_the_way && lane.next->kind == Access::kRead;
      });
      group.clear();
      for (Lane& lane : lanes) {
        if (lane.place() != behind) continue;
        if (is_read && !lane.on_the_way && lane.next->kind != Access::kRead) continue;
        if (!std::exchange(lane.on_the_way, !lane.on_the_way)) {
          group.emplace_back(lane.number, lane.next++);
        }
      }
      if (!group.empty()) count(group);
      std::erase_if(lanes, [](const Lane& lane) { return lane.next == lane.end; });
    }
  }
  for (const int each : threads) traces_[each].clear();
}

void Observer::count(const Group& group) {
  const Event& first = *group.front().second;
  const bool is_write = first.kind != Access::kRead;
  std::int64_t bytes = 0;
  for (const auto& [lane, event] : group) bytes += event->bytes;
  LineCounts& line = places_[{first.pc, first.is_shared, is_write}];
  ++line.requests;
  line.bytes += bytes;
  Counts& counts = report_.counts;
  if (first.is_shared) {
    std::int64_t fewest = 0;
    const std::int64_t turns = bank_turns(group, first.bytes, &fewest);
    line.transactions += turns;
    line.conflicts += turns - fewest;
    (is_write ? counts.shared_write_requests : counts.shared_read_requests) += 1;
    (is_write ? counts.shared_write_transactions : counts.shared_read_transactions) += turns;
    (is_write ? counts.shared_write_conflicts : counts.shared_read_conflicts) += turns - fewest;
  } else {
    const std::int64_t touched = sectors(group);
    line.transactions += touched;
    (is_write ? counts.global_write_requests : counts.global_read_requests) += 1;
    (is_write ? counts.global_write_sectors : counts.global_read_sectors) += touched;
    (is_write ? counts.global_write_bytes : counts.global_read_bytes) += bytes;
  }
}

// --- the report ----------------------------------------------------------------------------------

void Observer::find(const char* kind, const std::string& message, const void* pc,
                    std::int64_t block, int thread, const void* other_pc) {
  const bool known = std::ranges::any_of(
      found_, [&](const Found& each) { return each.pc == pc && each.finding.kind == kind; });
  if (known || found_.size() >= kMostFindings) return;
  found_.push_back({.finding = {.kind = kind,
                                .message = message,
                                .file = {},
                                .line = 0,
                                .block = block,
                                .thread = thread},
                    .pc = pc,
                    .other_pc = other_pc});
}

Report Observer::take_report() {
  // A return address is behind its call.
  const auto call = [](const void* pc) -> const void* {
    return pc == nullptr ? nullptr : static_cast<const char*>(pc) - 1;
  };
  std::vector<const void*> addresses = launched_;
  for (const Found& each : found_) {
    addresses.push_back(call(each.pc));
    addresses.push_back(call(each.other_pc));
  }
  for (const auto& [place, counts] : places_) addresses.push_back(call(place.pc));
  const std::vector<SourceLine> lines = source_lines(addresses);
  auto line = lines.begin();

  for (LaunchRecord& launch : report_.launches) launch.kernel = short_name((line++)->function);
  for (Found& each : found_) {
    const SourceLine& here = *line++;
    const SourceLine& other = *line++;
    Finding& finding = report_.findings.emplace_back(std::move(each.finding));
    if (!here.file.empty()) {
      finding.file = here.file;
      finding.line = here.line;
    }
    if (!other.file.empty()) {
      finding.message += " (" + other.file + ":" + std::to_string(other.line) + ")";
    }
  }
  std::map<std::tuple<std::string, int, bool, bool>, LineCounts> by_line;
  for (const auto& [place, counts] : places_) {
    const SourceLine& here = *line++;
    LineCounts& sum = by_line[{here.file, here.line, place.is_shared, place.is_write}];
    sum.file = here.file;
    sum.line = here.line;
    sum.is_shared = place.is_shared;
    sum.is_write = place.is_write;
    sum.requests += counts.requests;
    sum.transactions += counts.transactions;
    sum.conflicts += counts.conflicts;
    sum.bytes += counts.bytes;
  }
  for (auto& [key, counts] : by_line) report_.lines.push_back(std::move(counts));
  return std::move(report_);
}

}  // namespace fastattn::emulation
