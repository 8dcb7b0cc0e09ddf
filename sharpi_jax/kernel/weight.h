// A packed weight in tiles (the layout is drawn in tiles.py), unpacked in registers.
#pragma once

#include "isa.h"

namespace sharpi {

// Pointers to the fields of one matrix, and the numbers that describe its format (formats.py).
struct Weight {
  const uint8_t* low;      // plane of the codes' low bits
  const uint8_t* high;     // of their high bits
  const uint8_t* d;        // uint16 per block
  const uint8_t* small;    // one byte a group, or null
  const uint8_t* m;        // uint16 per block
  const uint8_t* small_m;  // one byte a group, or null
  bool small_is_signed;
  bool exponent;           // the scale is 2^(d - 128)
  int inputs, block_size;
  int offset;              // taken from each code
  uint8_t code_table[16];  // or what each code stands for, + offset
};

// What differs between formats where it costs time: known to the compiler, which build.py calls for one format at a time.
template <int kLow_, int kHigh_, int kGroup_, bool kMinimum_, bool kTable_>
struct Format {
  static constexpr int kLow = kLow_, kHigh = kHigh_, kBits = kLow + kHigh;
  static constexpr int kGroup = kGroup_, kQuads = kGroup / 4;  // a quad: four consecutive inputs of every lane
  static constexpr bool kMinimum = kMinimum_, kTable = kTable_;
};

// 2^(d - 128). Its two lowest values are subnormal and count as zero.
inline F32 power(U16 d) {
  const U32 e = widen(d);
  return float_of_bits(((e - 1) << 23) & U32(e > 1));
}

// One tile's groups, in order.
template <typename Fmt>
class Tile {
 public:
  Tile(const Weight& w, int64_t tile) : w_(w), first_(tile * w.inputs) {
    if (Fmt::kTable) std::memcpy(table_, w.code_table, 16);
  }

  // The codes of group g, four inputs at a time.
  void quads(int g, U32* out) const {
    // Words are read from the 32 inputs around the group: a word of the one-bit plane holds as many.
    const int64_t inputs = first_ + int64_t(g) * Fmt::kGroup;
    const uint8_t* low = w_.low + inputs / 32 * Fmt::kLow * 64;
    const uint8_t* high = w_.high + inputs / 32 * Fmt::kHigh * 64;
    const int skip = Fmt::kGroup == 16 ? g % 2 * 4 : 0;
#pragma GCC unroll 8
    for (int i = 0; i < Fmt::kQuads; ++i) {
      out[i] = quad_of<Fmt::kLow>(low, skip + i);
      if constexpr (Fmt::kHigh > 0) out[i] |= quad_of<Fmt::kHigh>(high, skip + i) << Fmt::kLow;
      if constexpr (Fmt::kTable) out[i] = look_up(out[i], table_);
    }
  }

  F32 scale(int g) const { return factor(w_.d, w_.small, w_.small_is_signed, w_.exponent, g); }
  F32 minimum(int g) const { return factor(w_.m, w_.small_m, false, false, g); }

 private:
  // The i-th four inputs out of words of a plane.
  template <int kBits>
  static U32 quad_of(const uint8_t* words, int i) {
    constexpr int kPerWord = 8 / kBits;
    const U32 word = load<U32>(words + i / kPerWord * 64);
    return (word >> (i % kPerWord * kBits)) & (0x01010101u * ((1u << kBits) - 1));
  }

  F32 factor(const uint8_t* whole, const uint8_t* small, bool is_signed, bool exponent, int g) const {
    const int64_t at = first_ / Fmt::kGroup + g;
    const int64_t block = Fmt::kGroup == w_.block_size ? at : at * Fmt::kGroup / 256;
    const U16 bits = load<U16>(whole + block * (kLanes * 2));
    const F32 value = exponent ? power(bits) : half_to_float(bits);
    if (small == nullptr) return value;
    small += at * kLanes;
    return value * (to_float(is_signed ? widen(load<S8>(small)) : widen(load<U8>(small))));
  }

  const Weight& w_;
  const int64_t first_;
  uint8_t table_[16];
};

// Four float32 weights of each lane out of a quad: exact, and what formats.py makes of them.
template <typename Fmt>
inline void dequantise(U32 quad, F32 scale, F32 minimum, F32 offset, F32* out) {
#pragma GCC unroll 4
  for (int b = 0; b < 4; ++b) {
    // 2^23 and a byte below it make the float 2^23 + code.
    const F32 value = float_of_bits(((quad >> (8 * b)) & 255) | 0x4b000000) - offset;
    out[b] = Fmt::kMinimum ? fma(value, scale, -minimum) : value * scale;
  }
}

inline F32 float_offset(const Weight& w) { return splat(float(0x800000 + w.offset)); }

}  // namespace sharpi
