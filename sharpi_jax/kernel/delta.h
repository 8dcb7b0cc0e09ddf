// The state of a head in the gated delta rule, [E, E] with the key dimension first, and the one way to advance it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "isa.h"

namespace sharpi {

// An element of the state after a position that decays by `decay` and writes d under the key k. Whoever advances a
// state calls this, so that all come to the same bits.
inline F32 advance(F32 s, float decay, float k, F32 d) { return fma(splat(decay), s, splat(k) * d); }

// Vectors of columns that go through the rows together; their sums fit into the registers.
#if defined(__AVX512F__)
constexpr int kStrip = 8;
#else
constexpr int kStrip = 2;
#endif

constexpr std::integral_constant<int, kLanes> kAllLanes{};

// Calls body(first column, vectors, lanes of each vector) until all columns had their turn: no column meets another, so
// nothing depends on the cut. The last two are compile-time constants but for the lanes of what is left at the end.
template <int kVectors = kStrip, typename Body>
inline void by_strips(int64_t columns, const Body& body, int64_t at = 0) {
  constexpr std::integral_constant<int, kVectors> vectors{};
  for (; at + kVectors * kLanes <= columns; at += kVectors * kLanes) body(at, vectors, kAllLanes);
  if constexpr (kVectors > 1) return by_strips<kVectors / 2>(columns, body, at);
  if (at < columns) body(at, vectors, int(columns - at));
}

inline F32 load_lanes(const float* from, int lanes) {
  if (lanes == kLanes) return load<F32>(from);
  F32 v = {};
  std::memcpy(&v, from, lanes * sizeof(float));
  return v;
}

inline void store_lanes(float* to, F32 v, int lanes) {
  std::memcpy(to, &v, (lanes == kLanes ? kLanes : lanes) * sizeof(float));
}

// How many heads a thread takes at a time: fewer elements than these are not worth another thread.
inline int64_t heads_of_a_piece(int64_t width) { return std::max<int64_t>(1, 16384 / (width * width)); }

}  // namespace sharpi
