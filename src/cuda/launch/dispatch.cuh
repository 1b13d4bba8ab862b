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

// Calls f with std::integral_constant<int, index>, of 0 to kCount - 1.
template <int kCount, class F>
void dispatch_index(int index, F&& f) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    ((kIndex == index ? f(std::integral_constant<int, kIndex>{}) : void()), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

}  // namespace fastattn::cuda
