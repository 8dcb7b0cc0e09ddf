// Sixteen lanes, and the few operations on them that processors do differently.
//
// Written with the vector types of GCC and Clang, which compile for any processor; where AVX-512 VNNI or AVX2 has an
// instruction of its own for a step, it is named here and nowhere else. One path is compiled per library (build.py).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace sharpi {

constexpr int kLanes = 16;

typedef float F32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));
typedef uint32_t U32 __attribute__((vector_size(64)));
typedef uint16_t U16 __attribute__((vector_size(32)));
typedef uint8_t U8 __attribute__((vector_size(16)));
typedef int8_t S8 __attribute__((vector_size(16)));

template <typename V>
inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}

inline F32 splat(float value) { return value - F32{}; }
inline I32 splat(int32_t value) { return value - I32{}; }

inline F32 to_float(I32 v) { return __builtin_convertvector(v, F32); }

// Wider lanes. Named where an instruction does it: GCC would go lane by lane.
inline I32 widen(U8 v) {
#if defined(__AVX512F__)
  return I32(_mm512_cvtepu8_epi32(__m128i(v)));
#elif defined(__AVX2__)
  const __m256i out[2] = {_mm256_cvtepu8_epi32(__m128i(v)), _mm256_cvtepu8_epi32(_mm_srli_si128(__m128i(v), 8))};
  return load<I32>(out);
#else
  return __builtin_convertvector(v, I32);
#endif
}

inline I32 widen(S8 v) { return (widen(U8(v)) ^ 128) - 128; }

inline U32 widen(U16 v) {
#if defined(__AVX512F__)
  return U32(_mm512_cvtepu16_epi32(__m256i(v)));
#else
  return __builtin_convertvector(v, U32);
#endif
}

inline F32 float_of_bits(U32 bits) { return load<F32>(&bits); }

// a * b + c, rounded once where the processor can.
inline F32 fma(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
  return F32(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#elif defined(__FMA__)
  __m256 x[2], y[2], z[2];
  std::memcpy(x, &a, 64), std::memcpy(y, &b, 64), std::memcpy(z, &c, 64);
  for (int i = 0; i < 2; ++i) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
  return load<F32>(z);
#else
  return a * b + c;
#endif
}

// The sum of the lanes, by halves.
inline float sum(F32 v) {
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof(v));
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// float16 to float32. The portable way: shift the exponent into place, and let a product mend its bias (subnormal
// numbers included); infinities and NaNs are no weights.
inline F32 half_to_float(U16 bits) {
#if defined(__AVX512F__)
  return F32(_mm512_cvtph_ps(load<__m256i>(&bits)));
#elif defined(__F16C__)
  __m128i h[2];
  std::memcpy(h, &bits, 32);
  __m256 out[2] = {_mm256_cvtph_ps(h[0]), _mm256_cvtph_ps(h[1])};
  return load<F32>(out);
#else
  const U32 wide = widen(bits);
  F32 magnitude = float_of_bits((wide & 0x7fff) << 13) * splat(0x1p112f);
  return float_of_bits(reinterpret_cast<U32&>(magnitude) | ((wide & 0x8000) << 16));
#endif
}

inline F32 bfloat_to_float(U16 bits) { return float_of_bits(widen(bits) << 16); }

// acc + sum of four products: the bytes of `codes` (unsigned) with those of `x` (signed), the same x in every lane.
inline I32 dot4(I32 acc, U32 codes, uint32_t x) {
#if defined(__AVX512VNNI__)
  return I32(_mm512_dpbusd_epi32(__m512i(acc), __m512i(codes), _mm512_set1_epi32(int32_t(x))));
#elif defined(__AVX2__)
  // maddubs adds pairs in 16 bits, where 2 * 255 * 127 would not fit: the codes' top bits go by themselves.
  __m256i c[2], sum[2];
  std::memcpy(c, &codes, 64);
  const __m256i xs = _mm256_set1_epi32(int32_t(x)), ones = _mm256_set1_epi16(1);
  for (int i = 0; i < 2; ++i) {
    __m256i low = _mm256_and_si256(c[i], _mm256_set1_epi8(0x7f));
    __m256i top = _mm256_and_si256(_mm256_srli_epi16(c[i], 7), _mm256_set1_epi8(1));
    __m256i lows = _mm256_madd_epi16(_mm256_maddubs_epi16(low, xs), ones);
    __m256i tops = _mm256_madd_epi16(_mm256_maddubs_epi16(top, xs), ones);
    sum[i] = _mm256_add_epi32(lows, _mm256_slli_epi32(tops, 7));
  }
  return acc + load<I32>(sum);
#else
  for (int b = 0; b < 4; ++b) acc += I32((codes >> (8 * b)) & 255) * int32_t(int8_t(x >> (8 * b)));
  return acc;
#endif
}

// Each byte of `codes` (0 to 15) replaced by that entry of a table of 16 bytes.
inline U32 look_up(U32 codes, const uint8_t* table) {
#if defined(__AVX512BW__)
  return U32(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(table)), __m512i(codes)));
#elif defined(__AVX2__)
  __m256i c[2];
  std::memcpy(c, &codes, 64);
  const __m256i entries = _mm256_broadcastsi128_si256(load<__m128i>(table));
  for (int i = 0; i < 2; ++i) c[i] = _mm256_shuffle_epi8(entries, c[i]);
  return load<U32>(c);
#else
  uint8_t bytes[64];
  std::memcpy(bytes, &codes, 64);
  for (uint8_t& byte : bytes) byte = table[byte & 15];
  return load<U32>(bytes);
#endif
}

}  // namespace sharpi
