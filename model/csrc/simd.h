// Vectors of W floats for the instruction set this translation unit is compiled for.
//
// Everything is in an unnamed namespace and uses no standard template: the same source is compiled once per
// instruction set into one library, and a function shared between those objects could be the wrong one for the CPU.
//
// Compiled with -ffp-contract=off, so a product and a sum are fused only where madd() says so: which operations
// make up a value must not depend on how the compiler saw the loop around it.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define WG_INLINE inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float V __attribute__((vector_size(4 * W)));
typedef int32_t VI __attribute__((vector_size(4 * W)));
typedef uint32_t VU __attribute__((vector_size(4 * W)));
typedef uint16_t VH __attribute__((vector_size(2 * W)));

struct bf16 {
  uint16_t bits;
};

template <class To, class From>
WG_INLINE To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

template <class T>
WG_INLINE T least(T a, T b) {
  return a < b ? a : b;
}

WG_INLINE V splat(float x) { return V{} + x; }

WG_INLINE V madd(V a, V b, V c) {
#if defined(__AVX512F__)
  return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// A word holds two neighbouring bf16 values; these are the two as floats.
WG_INLINE V low_half(VU word) { return (V)(word << 16); }
WG_INLINE V high_half(VU word) { return (V)(word & 0xffff0000u); }

// Nearest, ties to even; a NaN stays one.
WG_INLINE VU bf16_bits(V x) {
  VU u = (VU)x;
  VU rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return x == x ? rounded : ((u >> 16) | 0x40u);
}

WG_INLINE V load(const float* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
WG_INLINE V load(const bf16* p) {
  VH half;
  memcpy(&half, p, sizeof half);
  return (V)(__builtin_convertvector(half, VU) << 16);
}
WG_INLINE void store(float* p, V v) { memcpy(p, &v, sizeof v); }
WG_INLINE void store(bf16* p, V v) {
  VH half = __builtin_convertvector(bf16_bits(v), VH);
  memcpy(p, &half, sizeof half);
}

// 32-bit words as they lie in memory, one per lane; a word of bf16 holds two values.
WG_INLINE VU load_words(const void* p) {
  VU v;
  memcpy(&v, p, sizeof v);
  return v;
}

// The first n lanes (1..W): the others read as zero and are not written.
#if defined(__AVX512F__)
WG_INLINE V load(const float* p, int n) { return (V)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
WG_INLINE V load(const bf16* p, int n) {
  VH half = (VH)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p);
  return (V)(__builtin_convertvector(half, VU) << 16);
}
WG_INLINE VU load_words(const void* p, int n) {
  return (VU)_mm512_maskz_loadu_epi32((__mmask16)((1u << n) - 1), p);
}
WG_INLINE void store(float* p, V v, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v); }
WG_INLINE void store(bf16* p, V v, int n) {
  VH half = __builtin_convertvector(bf16_bits(v), VH);
  _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1), (__m256i)half);
}
#else
template <class T>
WG_INLINE V load(const T* p, int n) {
  if (n == W) return load(p);
  T part[W] = {};
  memcpy(part, p, n * sizeof(T));
  return load(part);
}
WG_INLINE VU load_words(const void* p, int n) {
  VU v{};
  memcpy(&v, p, n * 4);
  return v;
}
template <class T>
WG_INLINE void store(T* p, V v, int n) {
  if (n == W) return store(p, v);
  T part[W];
  store(part, v);
  memcpy(p, part, n * sizeof(T));
}
#endif

WG_INLINE float to_float(float x) { return x; }
WG_INLINE float to_float(bf16 x) { return bits_of<float>((uint32_t)x.bits << 16); }

// x as a value of type T would hold it.
template <class T>
WG_INLINE V rounded(V x);
template <>
WG_INLINE V rounded<float>(V x) {
  return x;
}
template <>
WG_INLINE V rounded<bf16>(V x) {
  return (V)(bf16_bits(x) << 16);
}

template <class T>
WG_INLINE float rounded(float x) {
  return rounded<T>(splat(x))[0];
}

// v with lane i moved to lane i ^ distance.
WG_INLINE V swapped(V v, int distance) {
  VI index;
  for (int i = 0; i < W; i++) index[i] = i ^ distance;
  return __builtin_shuffle(v, index);
}

// Over all lanes, as a balanced tree.
WG_INLINE float sum(V v) {
#pragma GCC unroll 4
  for (int half = W / 2; half > 0; half /= 2) v = v + swapped(v, half);
  return v[0];
}
WG_INLINE float largest(V v) {
#pragma GCC unroll 4
  for (int half = W / 2; half > 0; half /= 2) {
    V other = swapped(v, half);
    v = v > other ? v : other;
  }
  return v[0];
}

// e^x, within 2 units of the last place; 0 below -87.3, held at e^87.3 above; NaN stays NaN.
WG_INLINE V exponential(V x) {
  const float limit = 87.3f;
  const V magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  V clamped = x > limit ? splat(limit) : x;
  clamped = clamped < -limit ? splat(-limit) : clamped;
  V shifted = madd(clamped, splat(1.44269504f), magic);
  V n = shifted - magic;
  V r = madd(n, splat(-0.693145752f), clamped);
  r = madd(n, splat(-1.42860677e-6f), r);
  V p = splat(1.98756915e-4f);
  p = madd(p, r, splat(1.39819995e-3f));
  p = madd(p, r, splat(8.33345205e-3f));
  p = madd(p, r, splat(4.16657962e-2f));
  p = madd(p, r, splat(1.66666655e-1f));
  p = madd(p, r, splat(5.00000000e-1f));
  p = madd(p, r * r, r + 1.0f);
  VU scale = ((VU)shifted - (VU)magic + 127u) << 23;
  return x < -limit ? V{} : p * (V)scale;
}

}  // namespace
