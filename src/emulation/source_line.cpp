#include "emulation/source_line.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <map>
#include <sstream>
#include <string_view>

extern char** environ;  // NOLINT(readability-redundant-declaration): POSIX has no header for it

namespace fastattn::emulation {
namespace {

std::string hex(std::uintptr_t value) {
  std::array<char, 2 * sizeof(value)> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value, 16).ptr;
  return "0x" + std::string(digits.data(), end);
}

// The output of a program of PATH; empty where it can't be run. Without a shell, so that a path may
// hold anything.
std::string output_of(const std::vector<std::string>& command) {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return {};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  std::vector<char*> arguments;
  for (const std::string& each : command) arguments.push_back(const_cast<char*>(each.c_str()));
  arguments.push_back(nullptr);
  pid_t child = 0;
  const int failed =
      posix_spawnp(&child, arguments.front(), &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  std::string output;
  if (failed == 0) {
    std::array<char, 4096> buffer;
    ssize_t size = 0;
    // A signal's handler may end either call early.
    while ((size = read(ends[0], buffer.data(), buffer.size())) > 0 ||
           (size < 0 && errno == EINTR)) {
      if (size > 0) output.append(buffer.data(), static_cast<std::size_t>(size));
    }
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    if (status != 0) output.clear();
  }
  close(ends[0]);
  return output;
}

std::string symbolize(const char* module, const std::vector<std::uintptr_t>& offsets) {
  for (const char* program : {"addr2line", "llvm-addr2line"}) {
    std::vector<std::string> command = {program, "-e", module, "-a", "-f", "-C", "-i"};
    for (const std::uintptr_t offset : offsets) command.push_back(hex(offset));
    std::string output = output_of(command);
    if (!output.empty()) return output;
  }
  return {};
}

// "path/file.cu:12 (discriminator 3)"
SourceLine parse(std::string function, std::string_view place) {
  SourceLine line{.function = std::move(function), .file = {}};
  const std::size_t colon = place.rfind(':');
  if (colon == std::string_view::npos || place.starts_with("??")) return line;
  const std::string_view number = place.substr(colon + 1);
  if (std::from_chars(number.data(), number.data() + number.size(), line.line).ec != std::errc() ||
      line.line == 0) {
    return line;
  }
  line.file = std::filesystem::path(place.substr(0, colon)).lexically_normal().string();
  return line;
}

// A block for each address: the address, then a function and its place for each level of inlining.
std::map<std::uintptr_t, SourceLine> parse_all(const std::string& output) {
  std::map<std::uintptr_t, SourceLine> lines;
  std::istringstream stream(output);
  std::string text;
  std::uintptr_t address = 0;
  while (std::getline(stream, text)) {
    if (text.starts_with("0x")) {
      std::from_chars(text.data() + 2, text.data() + text.size(), address, 16);
      continue;
    }
    std::string place;
    if (!std::getline(stream, place)) break;
    const bool is_intrinsic = place.find("emulation/include/") != std::string::npos;
    SourceLine line = parse(std::move(text), place);
    SourceLine& known = lines[address];
    if (known.function.empty() && !is_intrinsic) known = std::move(line);
  }
  return lines;
}

}  // namespace

std::vector<SourceLine> source_lines(const std::vector<const void*>& addresses) {
  struct Module {
    std::vector<std::uintptr_t> offsets;
    std::vector<std::size_t> positions;
  };
  std::map<std::string, Module> modules;
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    Dl_info info;
    link_map* map = nullptr;
    if (addresses[i] == nullptr ||
        dladdr1(addresses[i], &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) == 0) {
      continue;
    }
    Module& module = modules[info.dli_fname];
    module.offsets.push_back(reinterpret_cast<std::uintptr_t>(addresses[i]) - map->l_addr);
    module.positions.push_back(i);
  }
  std::vector<SourceLine> lines(addresses.size());
  for (const auto& [path, module] : modules) {
    const std::map<std::uintptr_t, SourceLine> known =
        parse_all(symbolize(path.c_str(), module.offsets));
    for (std::size_t i = 0; i < module.offsets.size(); ++i) {
      const auto found = known.find(module.offsets[i]);
      if (found != known.end()) lines[module.positions[i]] = found->second;
    }
  }
  return lines;
}

}  // namespace fastattn::emulation
