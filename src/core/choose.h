#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fastattn/fastattn.h"

namespace fastattn::core {

// What "auto" takes of `candidates`, which are in ladder order: on a GPU by core/auto_rules.h, and
// where no rule decides, and for the CPU (`gpu` null), the last that takes the call. Null: none
// does, and `why_not` says for each why. Exported, though not installed: the tests ask it about
// GPUs that they don't have.
FASTATTN_EXPORT const Kernel* choose_auto(std::span<const Kernel* const> candidates,
                                          const ForwardParams& params, const DeviceInfo* gpu,
                                          std::vector<std::string>* why_not);

// The emulated kernel of that name, or the one that it redirects to. Throws ArgumentError, whose
// text names emulated kernels alone: the caller has use for no other.
const Kernel& choose_emulated(const ForwardParams& params, std::string_view name);

}  // namespace fastattn::core
