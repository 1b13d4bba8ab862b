// What must not depend on the machine: instruction-set level, number of threads, concurrent calls,
// fork. A level is chosen once per process, so levels and thread counts are tried in child
// processes.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <string>
#include <thread>

#include "cpu/attention.h"

#if defined(__linux__)
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

namespace fastattn::testing {
namespace {

struct Inputs {
  Array q, k, v;
};

Inputs inputs(DType dtype, unsigned seed) {
  std::mt19937 random(seed);
  Inputs x{Array(dtype, 2, 6, 150, 64), Array(dtype, 2, 3, 333, 64), Array(dtype, 2, 3, 333, 40)};
  x.q.randomise(random);
  x.k.randomise(random);
  x.v.randomise(random);
  return x;
}

Output call(const Inputs& x) { return run(x.q, x.k, x.v, 0.125F, {.causal = true}); }

TEST(CpuMachine, SaysWhatItRunsOn) {
  const BuildInfo info = build_info();
  EXPECT_TRUE(info.threading == "OpenMP" || info.threading == "std::thread");
  EXPECT_FALSE(info.cpu_instruction_set.empty());
  EXPECT_GE(cpu_threads(), 1);
}

TEST(CpuMachine, ConcurrentCallsDoNotDisturbEachOther) {
  constexpr int kCallers = 4;
  std::vector<Inputs> all;
  std::vector<std::vector<float>> expected;
  for (unsigned i = 0; i < kCallers; ++i) {
    all.push_back(inputs(i % 2 == 0 ? DType::kFloat32 : DType::kBFloat16, i));
    expected.push_back(call(all.back()).out.values());
  }
  std::array<int, kCallers> wrong = {};
  std::vector<std::thread> callers;
  for (std::size_t i = 0; i < kCallers; ++i) {
    callers.emplace_back([&, i] {
      for (int round = 0; round < 20; ++round) {
        wrong[i] += call(all[i]).out.values() == expected[i] ? 0 : 1;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, (std::array<int, kCallers>{}));
}

#if defined(__linux__)

// The output of a call in a forked child; empty where that did not end well.
std::vector<float> call_in_forked_child(const Inputs& x) {
  std::vector<float> values(static_cast<std::size_t>(2 * 6 * 150 * 40));
  const std::size_t bytes = values.size() * sizeof(float);
  void* shared = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return {};
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);  // a child that waits for threads it does not have is ended
    const std::vector<float> found = call(x).out.values();
    if (found.size() == values.size()) std::memcpy(shared, found.data(), bytes);
    _exit(0);
  }
  int status = -1;
  const bool ended = child > 0 && waitpid(child, &status, 0) == child && status == 0;
  std::memcpy(values.data(), shared, bytes);
  munmap(shared, bytes);
  return ended ? values : std::vector<float>();
}

TEST(CpuMachine, WorksInAForkedChild) {
  const Inputs x = inputs(DType::kFloat32, 7);
  const std::vector<float> expected = call(x).out.values();
  EXPECT_EQ(call_in_forked_child(x), expected);
}

// Run by the test below in a process that has made no call yet: another user of the process's
// OpenMP runtime starts its threads, then the process forks.
TEST(CpuMachine, DISABLED_ForkAfterAnothersThreads) {
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  const auto parallel = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  ASSERT_NE(parallel, nullptr);
  std::atomic<int> ran = 0;
  parallel([](void* count) { ++*static_cast<std::atomic<int>*>(count); }, &ran, 2, 0);
  ASSERT_EQ(ran, 2);
  const Inputs x = inputs(DType::kFloat32, 7);
  const std::vector<float> found = call_in_forked_child(x);
  EXPECT_EQ(found, call(x).out.values());
}

// Run by the tests below in a process of its own.
TEST(CpuMachine, DISABLED_PrintBits) {
  std::uint64_t hash = 14695981039346656037U;  // FNV-1a
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const Output output = call(inputs(dtype, 3));
    for (const std::vector<float>& values : {output.out.values(), output.lse}) {
      for (const float value : values) {
        std::uint32_t bits;
        std::memcpy(&bits, &value, sizeof(bits));
        hash = (hash ^ bits) * 1099511628211U;
      }
    }
  }
  std::printf("level %s threads %d bits %016llx\n",
              std::string(build_info().cpu_instruction_set).c_str(), cpu_threads(),
              static_cast<unsigned long long>(hash));
}

struct ChildRun {
  int status;
  std::string text;
  [[nodiscard]] bool has(const std::string& part) const {
    return text.find(part) != std::string::npos;
  }
  [[nodiscard]] std::string after(const std::string& label) const {
    const std::size_t begin = text.find(label);
    if (begin == std::string::npos) return "";
    const std::size_t end = text.find_first_of(" \n", begin + label.size());
    return text.substr(begin + label.size(), end - begin - label.size());
  }
};

ChildRun run_self(const std::string& environment, const std::string& filter) {
  std::array<char, 4096> path = {};
  if (readlink("/proc/self/exe", path.data(), path.size() - 1) <= 0) return {-1, "no own path"};
  const std::string command = "env " + environment + " '" + path.data() + "' --gtest_filter='" +
                              filter + "' --gtest_also_run_disabled_tests 2>&1";
  std::FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return {-1, "popen failed"};
  ChildRun result{0, ""};
  std::array<char, 4096> buffer;
  while (std::fgets(buffer.data(), buffer.size(), pipe) != nullptr) result.text += buffer.data();
  result.status = pclose(pipe);
  return result;
}

TEST(CpuMachine, WorksInAChildForkedBeforeTheFirstCall) {
  if (build_info().threading != "OpenMP") GTEST_SKIP() << "no OpenMP runtime to share";
  const ChildRun r = run_self("OMP_NUM_THREADS=2", "CpuMachine.DISABLED_ForkAfterAnothersThreads");
  EXPECT_EQ(r.status, 0) << r.text;
}

TEST(CpuMachine, AnAbsurdThreadCountIsCut) {
  const ChildRun r = run_self("OMP_NUM_THREADS=1000000", "CpuMachine.DISABLED_PrintBits");
  ASSERT_EQ(r.status, 0) << r.text;
  EXPECT_GE(std::stoi(r.after("threads ")), 64);
  EXPECT_LE(std::stol(r.after("threads ")), std::max(64L, 4 * sysconf(_SC_NPROCESSORS_CONF)));
}

TEST(CpuMachine, BitsDoNotDependOnTheThreadCount) {
  const auto with_threads = [](int count) {
    return run_self("OMP_NUM_THREADS=" + std::to_string(count), "CpuMachine.DISABLED_PrintBits");
  };
  const ChildRun one = with_threads(1);
  ASSERT_EQ(one.status, 0) << one.text;
  ASSERT_EQ(one.after("threads "), "1");
  ASSERT_FALSE(one.after("bits ").empty());
  for (const int count : {2, 3, 8, 40}) {
    const ChildRun many = with_threads(count);
    EXPECT_EQ(many.after("threads "), std::to_string(count));
    EXPECT_EQ(many.after("bits "), one.after("bits ")) << count << " threads";
  }
}

#if defined(__x86_64__)

class CpuLevel : public ::testing::TestWithParam<const char*> {};

TEST_P(CpuLevel, AgreesWithTheOracle) {
  const std::string level = GetParam();
  const std::string environment = "FASTATTN_CPU_ARCH=" + level;
  const ChildRun probe =
      run_self(environment, "CpuMachine.SaysWhatItRunsOn:CpuMachine.DISABLED_PrintBits");
  if (probe.has("this machine has no")) GTEST_SKIP() << "this machine has no x86-64-" << level;
  EXPECT_EQ(probe.after("level "), "x86-64-" + level) << probe.text;
  const ChildRun all =
      run_self(environment, "CpuCases.*:*CpuForward*-*LongRows*:*RunsRepeat*:*A05*");
  EXPECT_EQ(all.status, 0) << all.text;
  EXPECT_TRUE(all.has("[  PASSED  ]")) << all.text;
}

INSTANTIATE_TEST_SUITE_P(Levels, CpuLevel, ::testing::Values("v2", "v3", "v4"),
                         [](const auto& info) { return std::string(info.param); });

TEST(CpuMachine, UnknownLevelIsAnArgumentError) {
  const ChildRun r = run_self("FASTATTN_CPU_ARCH=v9", "CpuCases.A050*");
  EXPECT_NE(r.status, 0);
  EXPECT_TRUE(r.has("FASTATTN_CPU_ARCH=v9: takes v2, v3 or v4")) << r.text;
}

#endif  // __x86_64__
#endif  // __linux__

}  // namespace
}  // namespace fastattn::testing
