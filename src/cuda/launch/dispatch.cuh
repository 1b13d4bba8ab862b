// Run-time values to template arguments.
#pragma once

#include <type_traits>
#include <utility>

namespace fastattn::cuda {

// Calls f with std::true_type or std::false_type.
template <class F>
void dispatch_bool(bool value, F&& f) {
  if (value) {
    std::forward<F>(f)(std::true_type{});
  } else {
    std::forward<F>(f)(std::false_type{});
  }
}

}  // namespace fastattn::cuda
