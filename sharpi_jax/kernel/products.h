// A few rows of activations times one tile. A row's arithmetic is the same whatever the number of rows, so its bits
// are.
#pragma once

#include "rows.h"
#include "weight.h"

namespace sharpi {

constexpr int kBlock = 32;  // inputs that share an activation scale
constexpr int kSums = 4;    // float32 sums in turn hide the latency of each

constexpr int kTogether = 8;  // rows that lie and go together

// One row's activations of one group: int8 with a float32 scale, and their sums. Eight rows lie together, a group of all
// eight after the other, so that what a product reads is one stream: [rows / 8, inputs / kGroup, 8].
template <int kGroup>
struct Activations8 {
  int8_t x[kGroup];
  float scale;
  int32_t sum;
  float scaled_sum;
};

// out[r] = tile . x[r], r < kRows: in whole numbers within a group, then in float32, groups in order.
template <typename Fmt, int kRows>
inline void multiply_int8(const Weight& w, int64_t tile, const Activations8<Fmt::kGroup>* x, F32* out) {
  const Tile<Fmt> t(w, tile);
  F32 acc[kRows] = {};
  for (int g = 0; g < w.inputs / Fmt::kGroup; ++g, x += kTogether) {
    U32 quads[Fmt::kQuads];
    t.quads(g, quads);
    const F32 scale = t.scale(g), minus_minimum = Fmt::kMinimum ? -t.minimum(g) : F32{};
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      I32 even = splat(-w.offset * x[r].sum), odd = {};  // two chains hide the latency
#pragma GCC unroll 4
      for (int q = 0; q < Fmt::kQuads; q += 2) {
        even = dot4(even, quads[q], load<uint32_t>(x[r].x + 4 * q));
        odd = dot4(odd, quads[q + 1], load<uint32_t>(x[r].x + 4 * q + 4));
      }
      acc[r] = fma(to_float(even + odd) * scale, splat(x[r].scale), acc[r]);
      if (Fmt::kMinimum) acc[r] = fma(minus_minimum, splat(x[r].scaled_sum), acc[r]);
    }
  }
  for (int r = 0; r < kRows; ++r) out[r] = acc[r];
}

// Float32 weights of a tile, either unpacked as they are needed,
template <typename Fmt>
struct Unpacked {
  Tile<Fmt> tile;
  F32 offset;

  template <typename Body>  // body(first input, four weights)
  void each(int inputs, Body body) const {
    for (int g = 0; g < inputs / Fmt::kGroup; ++g) {
      U32 quads[Fmt::kQuads];
      tile.quads(g, quads);
      const F32 scale = tile.scale(g), minimum = Fmt::kMinimum ? tile.minimum(g) : F32{};
#pragma GCC unroll 8
      for (int q = 0; q < Fmt::kQuads; ++q) {
        F32 four[4];
        dequantise<Fmt>(quads[q], scale, minimum, offset, four);
        body(g * Fmt::kGroup + 4 * q, four);
      }
    }
  }
};

// or all at once, for many rows.
struct Dense {
  const F32* weights;

  template <typename Body>
  void each(int inputs, Body body) const {
    for (int k = 0; k < inputs; k += 4) body(k, weights + k);
  }
};

// out[r] = tile . x[r], r < kRows, for x [rows, inputs] in float32.
template <int kRows, typename Source>
inline void multiply_float(const Source& source, const float* x, int inputs, F32* out) {
  F32 acc[kRows][kSums] = {};
  source.each(inputs, [&](int k, const F32* w) {
#pragma GCC unroll 4
    for (int i = 0; i < kSums; ++i) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) acc[r][i] = fma(w[i], splat(x[int64_t(r) * inputs + k + i]), acc[r][i]);
    }
  });
  for (int r = 0; r < kRows; ++r) out[r] = (acc[r][0] + acc[r][1]) + (acc[r][2] + acc[r][3]);
}

}  // namespace sharpi
