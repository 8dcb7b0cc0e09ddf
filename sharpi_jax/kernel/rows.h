// Rows taken a fixed number at a time, which the compiler knows.
#pragma once

namespace sharpi {

template <auto kValue>
struct Constant {
  static constexpr auto value = kValue;
};

// body(first row, number of rows as a constant) from row `first` to before `last`: kMost at a time, then the rest.
template <int kMost, typename Body>
inline void by_rows(int first, int last, Body body) {
  for (; first + kMost <= last; first += kMost) body(first, Constant<kMost>());
  if constexpr (kMost > 1) {
    if (first < last) by_rows<kMost - 1>(first, last, body);
  }
}

}  // namespace sharpi
