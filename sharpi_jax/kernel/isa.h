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
#if defined(__AVX2__)
  __m256 h[2];
  std::memcpy(h, &v, 64);
  const __m256 eight = _mm256_add_ps(h[0], h[1]);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof(v));
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
#endif
}

// e^x for x <= 0, to 2e-7 of itself; what lies below -87 counts as -87 (1.6e-38).
inline F32 exp_of_negative(F32 x) {
  x = x < -87.0f ? splat(-87.0f) : x;  // a NaN stays one
  const F32 shifted = fma(x, splat(1.44269504f), splat(0x1.8p23f));  // adding 1.5 * 2^23 rounds to whole numbers
  const F32 n = shifted - 0x1.8p23f;
  // x - n ln 2, of which the first part has few enough bits for n times it to be exact.
  const F32 r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));
  constexpr float kTaylor[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  F32 y = splat(kTaylor[0]);
  for (int i = 1; i < 8; ++i) y = fma(y, r, splat(kTaylor[i]));
  const I32 power = load<I32>(&shifted) - 0x4b400000;
  const I32 scale = (power + 127) << 23;
  return y * load<F32>(&scale);
}

// float16 to float32. The portable way: shift the exponent into place and mend its bias; subnormal numbers are multiples
// of 2^-24 (a product could not mend them: XLA has the processor take float32's own subnormal numbers for 0).
// Infinities and NaNs are no weights.
inline F32 half_to_float(U16 bits) {
#if defined(__AVX512F__)
  return F32(_mm512_cvtph_ps(load<__m256i>(&bits)));
#elif defined(__F16C__)
  __m128i h[2];
  std::memcpy(h, &bits, 32);
  __m256 out[2] = {_mm256_cvtph_ps(h[0]), _mm256_cvtph_ps(h[1])};
  return load<F32>(out);
#else
  const U32 wide = widen(bits), magnitude = wide & 0x7fff;
  const F32 normal = float_of_bits((magnitude << 13) + (112u << 23)), small = to_float(I32(magnitude)) * 0x1p-24f;
  const F32 absolute = magnitude < 0x400 ? small : normal;
  return float_of_bits(load<U32>(&absolute) | ((wide & 0x8000) << 16));
#endif
}

inline F32 bfloat_to_float(U16 bits) { return float_of_bits(widen(bits) << 16); }

// Sixteen lanes in as many registers as they take, for loops that keep many: GCC would keep an F32 that is wider than a
// register in memory.
#if defined(__AVX512F__)
constexpr int kPart = 16;
#elif defined(__AVX2__)
constexpr int kPart = 8;
#else
constexpr int kPart = 4;
#endif
typedef float Part __attribute__((vector_size(4 * kPart)));
struct Wide {
  Part parts[kLanes / kPart];
};

inline Wide load_wide(const float* from) {
  Wide v;
  for (int i = 0; i < kLanes / kPart; ++i) v.parts[i] = load<Part>(from + i * kPart);
  return v;
}

inline Wide wide(F32 v) { return load_wide(reinterpret_cast<const float*>(&v)); }

inline Wide splat_wide(float value) {
  Wide v;
  for (Part& part : v.parts) part = value - Part{};
  return v;
}

inline Wide fma(const Wide& a, const Wide& b, const Wide& c) {
  Wide v;
  for (int i = 0; i < kLanes / kPart; ++i) {
#if defined(__AVX512F__)
    v.parts[i] = Part(_mm512_fmadd_ps(__m512(a.parts[i]), __m512(b.parts[i]), __m512(c.parts[i])));
#elif defined(__AVX2__)
    v.parts[i] = Part(_mm256_fmadd_ps(__m256(a.parts[i]), __m256(b.parts[i]), __m256(c.parts[i])));
#else
    v.parts[i] = a.parts[i] * b.parts[i] + c.parts[i];
#endif
  }
  return v;
}

inline Wide load_half(const uint16_t* from) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  Wide v;
  for (int i = 0; i < 2; ++i) v.parts[i] = Part(_mm256_cvtph_ps(load<__m128i>(from + i * kPart)));
  return v;
#else
  return wide(half_to_float(load<U16>(from)));
#endif
}

inline Wide load_bfloat(const uint16_t* from) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  Wide v;
  for (int i = 0; i < 2; ++i) {
    const __m256i bits = _mm256_cvtepu16_epi32(load<__m128i>(from + i * kPart));
    v.parts[i] = Part(_mm256_slli_epi32(bits, 16));
  }
  return v;
#else
  return wide(bfloat_to_float(load<U16>(from)));
#endif
}

// Lane i is sum(v[i]), of up to sixteen vectors.
template <int kCount>
inline F32 sums(const Wide* v) {
#if defined(__AVX512F__)
  // All sixteen at once by the same halves: each step adds the halves of two vectors, whose lanes then lie side by side.
  F32 x[kLanes] = {};
  for (int i = 0; i < kCount; ++i) x[i] = load<F32>(&v[i]);
  const I32 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
  for (int half = kLanes / 2, left = kLanes / 2; half > 0; half /= 2, left /= 2) {
    const I32 low = lane + (lane & -half);  // blocks of `half` lanes, every other one of the two vectors
#pragma GCC unroll 8
    for (int i = 0; i < left; ++i) {
      const __m512 a(x[2 * i]), b(x[2 * i + 1]);
      x[i] = F32(_mm512_permutex2var_ps(a, __m512i(low), b)) + F32(_mm512_permutex2var_ps(a, __m512i(low + half), b));
    }
  }
  return x[0];
#else
  F32 out = {};
  for (int i = 0; i < kCount; ++i) out[i] = sum(load<F32>(&v[i]));
  return out;
#endif
}

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
