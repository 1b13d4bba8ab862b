// The checker finds what is wrong in broken kernels, at its line, and nothing in right ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <iostream>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>

#include "emulation/broken.h"
#include "emulation/emulation.h"
#include "emulation/right.h"

namespace fastattn::emulated {
extern const testing::RightKernels right_kernels;
}
namespace fastattn::checked {
extern const testing::RightKernels right_kernels;
}

namespace fastattn {
namespace {

using emulation::CheckedRun;
using emulation::Counts;
using emulation::Finding;
using emulation::Report;
using testing::BrokenKernel;

constexpr int kFloats = 64;
using Floats = std::array<float, kFloats>;

Floats numbers() {
  Floats values;
  std::iota(values.begin(), values.end(), 1.0F);
  return values;
}

std::string to_text(const Report& report) {
  std::string text;
  for (const Finding& each : report.findings) {
    text += each.kind + ": " + each.message + " [" + each.file + ":" + std::to_string(each.line) +
            "]\n";
  }
  return text.empty() ? "nothing found\n" : text;
}

// Of the line of broken.cu that ends with the kernel's name as a comment; 0: none.
int faulty_line(const std::string& name) {
  std::ifstream source(BROKEN_SOURCE);
  std::string line;
  for (int number = 1; std::getline(source, line); ++number) {
    if (line.ends_with("// " + name)) return number;
  }
  return 0;
}

// --- broken kernels ------------------------------------------------------------------------------

class Broken : public ::testing::TestWithParam<std::tuple<BrokenKernel, int>> {};

TEST_P(Broken, IsFoundAtItsLine) {
  const auto& [kernel, seed] = GetParam();
  struct {
    alignas(16) Floats input = numbers();
    Floats between{};  // an access past one array must not hit the other
    Floats output{};
  } memory;
  CheckedRun run(static_cast<std::uint64_t>(seed));
  const bool has_output = std::string(kernel.name) != "sums_up_nothing";
  run.allow("input", memory.input.data(), sizeof(Floats), false, true);
  run.allow("output", memory.output.data(), sizeof(Floats), true, has_output);
  kernel.run(memory.input.data(), memory.output.data());
  const Report report = run.finish();
  const int line = faulty_line(kernel.name);
  bool found = false;
  for (const Finding& each : report.findings) {
    EXPECT_EQ(each.kind, kernel.kind) << to_text(report);
    EXPECT_EQ(each.file, "cpp_tests/emulation/broken.cu") << to_text(report);
    found |=
        each.message.find(kernel.says) != std::string::npos && (line == 0 || each.line == line);
  }
  EXPECT_TRUE(found) << kernel.name << " at line " << line << ":\n" << to_text(report);
  std::cout << "  " << to_text(report);  // the list of what the checker says
}

INSTANTIATE_TEST_SUITE_P(Emulation, Broken,
                         ::testing::Combine(::testing::ValuesIn(checked::broken_kernels().begin(),
                                                                checked::broken_kernels().end()),
                                            ::testing::Values(0, 1, 2)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) + "_seed" +
                                  std::to_string(std::get<1>(info.param));
                         });

TEST(Broken, EachLineAtFaultIsMarked) {
  int marked = 0;
  for (const BrokenKernel& kernel : checked::broken_kernels()) {
    marked += faulty_line(kernel.name) != 0 ? 1 : 0;
  }
  // Of two barriers at once, either may be the one that is reported.
  EXPECT_EQ(marked, static_cast<int>(checked::broken_kernels().size()) - 1);
}

TEST(Broken, TheOtherAccessIsNamedToo) {
  const Floats input = numbers();
  Floats output{};
  CheckedRun run(0);
  run.allow("input", input.data(), sizeof(input), false, true);
  run.allow("output", output.data(), sizeof(output), true, false);
  checked::broken_kernels().front().run(input.data(), output.data());
  const Report report = run.finish();
  // A warp's read of what the other wrote, or its write of what the other has read.
  const int read = faulty_line("race_between_warps");
  for (const Finding& each : report.findings) {
    const int other = each.line == read ? read - 1 : read;
    const std::string place = "(cpp_tests/emulation/broken.cu:" + std::to_string(other) + ")";
    EXPECT_NE(each.message.find(place), std::string::npos) << to_text(report);
  }
  EXPECT_EQ(report.findings.size(), 2U) << to_text(report);
}

// --- right kernels -------------------------------------------------------------------------------

// Runs the checked build over seeds; all must agree, find nothing and count the same.
template <class F>
Report run_clean(F&& f) {
  Report first;
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    CheckedRun run(seed);
    f(run);
    Report report = run.finish();
    EXPECT_TRUE(report.findings.empty()) << to_text(report);
    if (seed == 0) {
      first = std::move(report);
    } else {
      EXPECT_EQ(report.counts.shared_read_transactions, first.counts.shared_read_transactions);
      EXPECT_EQ(report.counts.global_read_sectors, first.counts.global_read_sectors);
    }
  }
  return first;
}

template <class T>
void allow_output(CheckedRun& run, T& output, bool initialised = false) {
  run.allow("output", output.data(), sizeof(output), true, initialised);
}

// Both builds: f(kernels, input, output), and the output of each.
template <class T, std::size_t kSize, class F>
std::array<T, kSize> run_both(const Floats& input, F&& f, Report* report = nullptr) {
  std::array<T, kSize> emulated_output{};
  f(emulated::right_kernels, input.data(), emulated_output.data());
  std::array<T, kSize> checked_output{};
  Report seen = run_clean([&](CheckedRun& run) {
    checked_output = {};
    run.allow("input", input.data(), sizeof(input), false, true);
    allow_output(run, checked_output);
    f(checked::right_kernels, input.data(), checked_output.data());
  });
  EXPECT_EQ(emulated_output, checked_output);
  if (report != nullptr) *report = std::move(seen);
  return checked_output;
}

TEST(Right, StaticAndDynamicSharedMemory) {
  const Floats input = numbers();
  Floats reversed;
  std::reverse_copy(input.begin(), input.end(), reversed.begin());
  EXPECT_EQ((run_both<float, kFloats>(input, [](const auto& k, const float* in,
                                                float* out) { k.reverse_static(in, out); })),
            reversed);
  EXPECT_EQ((run_both<float, kFloats>(input, [](const auto& k, const float* in,
                                                float* out) { k.reverse_dynamic(in, out); })),
            reversed);
}

TEST(Right, Shuffles) {
  const Floats input = numbers();
  Report report;
  const auto sums = run_both<float, 4 * kFloats>(
      input, [](const auto& k, const float* in, float* out) { k.warp_sums(in, out); }, &report);
  for (int i = 0; i < kFloats; ++i) {
    const auto sum = [&](int lanes) {
      const auto first = input.begin() + i / lanes * lanes;
      return std::accumulate(first, first + lanes, 0.0F);
    };
    for (int kind = 0; kind < 3; ++kind) EXPECT_EQ(sums[kind * kFloats + i], sum(32));
    EXPECT_EQ(sums[3 * kFloats + i], sum(8));
  }
  EXPECT_EQ(report.counts.shuffles, 2 * (5 + 6 + 6 + 3));
}

TEST(Right, Votes) {
  Floats input = numbers();
  input[3] = -1.0F;
  Report report;
  const auto votes = run_both<unsigned, 3 * kFloats>(
      input, [](const auto& k, const float* in, unsigned* out) { k.votes(in, out); }, &report);
  EXPECT_EQ(votes[0], ~(1U << 3));
  EXPECT_EQ(votes[32], ~0U);
  EXPECT_EQ(votes[kFloats + 7], 1U);
  EXPECT_EQ(votes[2 * kFloats + 7], 0U);
  EXPECT_EQ(votes[2 * kFloats + 40], 1U);
  EXPECT_EQ(report.counts.votes, 2 * 3);
}

TEST(Right, AtomicsAmongBlocks) {
  const Floats input = numbers();
  const auto run_with = [&](const testing::RightKernels& kernels, CheckedRun* run) {
    float sum = 0.0F;
    int largest = -1;
    unsigned count = 0;
    if (run != nullptr) {
      run->allow("input", input.data(), sizeof(input), false, true);
      run->allow("sum", &sum, sizeof(sum), true, true);
      run->allow("largest", &largest, sizeof(largest), true, true);
      run->allow("count", &count, sizeof(count), true, true);
    }
    kernels.atomics(input.data(), &sum, &largest, &count);
    EXPECT_EQ(sum, 64 * 65 / 2);
    EXPECT_EQ(largest, 63);
    EXPECT_EQ(count, 64U);
  };
  run_with(emulated::right_kernels, nullptr);
  CheckedRun run(0);
  run_with(checked::right_kernels, &run);
  const Report report = run.finish();
  // The plain read of the counter that other threads update is the one thing to find.
  ASSERT_EQ(report.findings.size(), 1U) << to_text(report);
  EXPECT_EQ(report.findings[0].kind, "race");
  EXPECT_GE(report.counts.atomics, 3 * 64);
}

TEST(Right, GridsAndBlocksOfTwoDimensions) {
  std::array<float, 96> input{};
  std::iota(input.begin(), input.end(), 0.0F);
  std::array<float, 96> output{};
  emulated::right_kernels.transpose(input.data(), output.data());
  for (int row = 0; row < 8; ++row) {
    for (int column = 0; column < 12; ++column) {
      EXPECT_EQ(output[column * 8 + row], input[row * 12 + column]);
    }
  }
}

TEST(Right, VectorTypes) {
  alignas(16) const Floats input = numbers();
  const auto output = run_both<float, kFloats>(
      input, [](const auto& k, const float* in, float* out) { k.vectors(in, out); });
  for (int i = 0; i < kFloats; i += 4) {
    EXPECT_EQ(output[i], input[i + 1]);
    EXPECT_EQ(output[i + 1], input[i]);
    EXPECT_EQ(output[i + 2], input[i + 3] + 1.0F);
    EXPECT_EQ(output[i + 3], input[i + 2]);
  }
}

TEST(Right, AWarpThatIsNotFull) {
  const Floats input = numbers();
  const auto output = run_both<float, kFloats>(
      input, [](const auto& k, const float* in, float* out) { k.partial_warp(in, out); });
  EXPECT_EQ(output[31], input[0]);
  EXPECT_EQ(output[32], input[32]);
}

// --- counts --------------------------------------------------------------------------------------

Counts count_strided(int stride, bool vectors) {
  alignas(16) const Floats input = numbers();
  Floats output{};
  return run_clean([&](CheckedRun& run) {
           run.allow("input", input.data(), sizeof(input), false, true);
           run.allow("output", output.data(), sizeof(output), true, false);
           const auto kernel =
               vectors ? checked::right_kernels.strided_vectors : checked::right_kernels.strided;
           kernel(input.data(), output.data(), stride);
         })
      .counts;
}

TEST(Counts, BankConflicts) {
  // Lanes at a distance of `stride` words: gcd(stride, 32) of them meet in each bank.
  for (const auto& [stride, turns] :
       {std::pair{1, 1}, {2, 2}, {4, 4}, {16, 16}, {32, 32}, {33, 1}, {0, 1}, {3, 1}}) {
    const Counts counts = count_strided(stride, false);
    EXPECT_EQ(counts.shared_read_requests, 1) << stride;
    EXPECT_EQ(counts.shared_read_transactions, turns) << stride;
    EXPECT_EQ(counts.shared_read_conflicts, turns - 1) << stride;
    EXPECT_EQ(counts.shared_write_transactions, 36) << stride;  // 36 rows of 32 neighbours
    EXPECT_EQ(counts.shared_write_conflicts, 0) << stride;
  }
}

TEST(Counts, WideAccessesGoByQuartersOfAWarp) {
  // 8 lanes of 16 bytes fill all banks; at 32 words of distance the 8 share four banks.
  for (const auto& [stride, turns] : {std::pair{4, 4}, {32, 32}, {36, 4}, {8, 8}}) {
    const Counts counts = count_strided(stride, true);
    EXPECT_EQ(counts.shared_read_requests, 1) << stride;
    EXPECT_EQ(counts.shared_read_transactions, turns) << stride;
    EXPECT_EQ(counts.shared_read_conflicts, turns - 4) << stride;
  }
}

TEST(Counts, GlobalMemory) {
  alignas(256) const Floats input = numbers();
  alignas(256) Floats output{};
  const Counts counts = run_clean([&](CheckedRun& run) {
                          run.allow("input", input.data(), sizeof(input), false, true);
                          run.allow("output", output.data(), sizeof(output), true, false);
                          checked::right_kernels.reverse_dynamic(input.data(), output.data());
                        }).counts;
  EXPECT_EQ(counts.global_read_bytes, 256);
  EXPECT_EQ(counts.global_read_requests, 2);
  EXPECT_EQ(counts.global_read_sectors, 8);
  EXPECT_EQ(counts.global_write_bytes, 256);
  EXPECT_EQ(counts.global_write_sectors, 8);
  EXPECT_EQ(counts.barriers, 1);
}

}  // namespace
}  // namespace fastattn
