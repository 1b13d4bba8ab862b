// From an address of loaded code to its line in the source.
#pragma once

#include <string>
#include <vector>

namespace fastattn::emulation {

struct SourceLine {
  std::string function;
  std::string file;  // empty where it is not known
  int line = 0;
};

// Reads the debug information through addr2line (GNU or LLVM), which comes with the compilers; without
// one, files stay empty. Of functions that were inlined it gives the first outside of the emulation.
std::vector<SourceLine> source_lines(const std::vector<const void*>& addresses);

}  // namespace fastattn::emulation
