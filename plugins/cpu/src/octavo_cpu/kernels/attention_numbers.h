// The arithmetic of attention: numbers of every cache as lanes, powers of two, and products in float32 or bfloat16.
#pragma once
#include <cmath>
#include <type_traits>

#include "attention.h"

namespace {

using F = Simd::F;

// For loops over registers: left as loops, their arrays would live in memory.
#define UNROLLED _Pragma("GCC unroll 16")

// -- the numbers of a cache, 16 at a time --

struct Half { uint16_t bits; };
struct Brain { uint16_t bits; };
struct Tiny { uint8_t bits; };  // float8 e4m3
struct Code { uint8_t bits; };  // signed; a row's scale lies behind its codes

// Bytes of scale behind a row.
template <class T>
constexpr int64_t SCALE_BYTES = std::is_same_v<T, Code> ? int64_t(sizeof(float)) : 0;

inline F widen(const float* p) { return Simd::load(p); }
inline F widen(const Brain* p) { return Simd::load_bf16(&p->bits); }
inline F widen(const Code* p) { return Simd::load_s8(&p->bits); }
inline F widen(const Half* p) { return Simd::load_half(reinterpret_cast<const uint8_t*>(p)); }

// The bits of an e4m3 number are those of a half whose exponent is 8 less.
inline F widen(const Tiny* p) {
#if defined(__AVX512BW__)
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i rest = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), sign = _mm256_sub_epi16(wide, rest);
  __m256i half = _mm256_or_si256(_mm256_slli_epi16(sign, 8), _mm256_slli_epi16(rest, 7));
  const __mmask16 nan = _mm256_cmpeq_epi16_mask(rest, _mm256_set1_epi16(0x7f));
  half = _mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7e00));
  return {_mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f))};
#else
  uint16_t half[16];
  for (int i = 0; i < 16; ++i) {
    const uint16_t b = p[i].bits, rest = b & 0x7f;
    half[i] = rest == 0x7f ? uint16_t(0x7e00) : uint16_t((b & 0x80) << 8 | rest << 7);
  }
  return Simd::mul(Simd::load_half(reinterpret_cast<const uint8_t*>(half)), Simd::set1(256.0f));
#endif
}

// The first `count` of them, zeros behind.
template <class T>
F widen_some(const T* p, int64_t count) {
  T buffer[16] = {};
  memcpy(buffer, p, size_t(count) * sizeof(T));
  return widen(buffer);
}

inline void store_half(uint16_t* p, F x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
#else
  float all[16];
  Simd::store(all, x);
  for (int i = 0; i < 16; ++i) p[i] = octavo::to_half(all[i]);
#endif
}

template <class T>
F widen_at(const void* row, int64_t i, int64_t count) {
  const T* p = static_cast<const T*>(row) + i;
  return count == 16 ? widen(p) : widen_some(p, count);
}

// count <= 16 numbers of `dtype` from position i of a row.
inline F load_numbers(int32_t dtype, const void* row, int64_t i, int64_t count) {
  if (dtype == octavo::AS_F32) return widen_at<float>(row, i, count);
  if (dtype == octavo::AS_F16) return widen_at<Half>(row, i, count);
  return widen_at<Brain>(row, i, count);
}

inline void store_numbers(int32_t dtype, void* row, int64_t i, int64_t count, F x) {
  const int64_t size = octavo::bytes_of(dtype);
  uint8_t buffer[64];
  void* to = count == 16 ? static_cast<uint8_t*>(row) + i * size : buffer;
  if (dtype == octavo::AS_F32) Simd::store(static_cast<float*>(to), x);
  else if (dtype == octavo::AS_F16) store_half(static_cast<uint16_t*>(to), x);
  else Simd::store_bf16(static_cast<uint16_t*>(to), x);
  if (count < 16) memcpy(static_cast<uint8_t*>(row) + i * size, buffer, size_t(count * size));
}

// -- powers of two --

// 2^x for x <= 126, 0 where float32 ends; NaN stays NaN. Minimax polynomials of 2^r, |r| <= 1/2, fitted by reweighted least
// squares: within 7.5e-8 of it, or 7.5e-5 where the result is rounded to bfloat16.
template <bool EXACT>
F power_of_2(F x) {
#if defined(__AVX512F__)
  x = Simd::max(Simd::set1(-200.0f), x);
#else
  x = Simd::max(Simd::set1(-127.0f), x);
#endif
  const F n = Simd::round(x), r = Simd::sub(x, n);
  F p;
  if constexpr (EXACT) {
    p = Simd::set1(0.001327647196f);
    for (float c : {0.009675541503f, 0.05550713275f, 0.2402211972f, 0.6931469671f, 1.000000072f})
      p = Simd::fma(p, r, Simd::set1(c));
  } else {
    p = Simd::set1(0.05517166876f);
    for (float c : {0.2426111328f, 0.6932609864f, 0.9999280729f}) p = Simd::fma(p, r, Simd::set1(c));
  }
#if defined(__AVX512F__)
  return {_mm512_scalef_ps(p.a, n.a)};
#else
  return Simd::mul(p, Simd::pow2(n));
#endif
}

// -- sums of lanes --

#if defined(__AVX512F__)
constexpr int SUMS = 16;

// out[i] = the sum of the lanes of x[i]: halves are added while they are transposed.
inline void lane_sums(const F* x, float* out) {
  __m512 a[8], b[4], c[2];
  UNROLLED for (int i = 0; i < 8; ++i)
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i].a, x[2 * i + 1].a), _mm512_unpackhi_ps(x[2 * i].a, x[2 * i + 1].a));
  UNROLLED for (int i = 0; i < 4; ++i) {
    const __m512d p = _mm512_castps_pd(a[2 * i]), q = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
  }
  UNROLLED for (int i = 0; i < 2; ++i)
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
  _mm512_storeu_ps(out, _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd)));
}
#else
constexpr int SUMS = 4;

inline void lane_sums(const F* x, float* out) {
  for (int i = 0; i < SUMS; ++i) out[i] = Simd::sum(x[i]);
}
#endif

// -- products --
//
// A kind of arithmetic multiplies chunks of 64 bytes, lane by lane. Each lane adds up PAIR neighbours: queries and
// keys are chunks along a head's dimensions; a panel of a packed matrix holds 16 columns, PAIR rows in a lane.

struct Exact {
  using Number = float;
  using Chunk = F;
  static constexpr int PAIR = 1, WIDTH = 16;
  static constexpr bool EXACT = true;

  static Chunk zero() { return Simd::set1(0.0f); }
  template <class T> static Chunk load(const T* p) { return widen(p); }
  template <class T> static Chunk load_some(const T* p, int64_t count) { return widen_some(p, count); }
  static Chunk broadcast(const Number* p) { return Simd::set1(*p); }
  static F dot(F sum, Chunk a, Chunk b) { return Simd::fma(a, b, sum); }
  static void store(Number* p, F x) { Simd::store(p, x); }
  static void store(Number* p, F x, F y) { Simd::store(p, x), Simd::store(p + 16, y); }
  static void keep(void* p, Chunk x) { Simd::store(static_cast<float*>(p), x); }
};

#if defined(__AVX512BF16__)
struct Brains {
  using Number = uint16_t;
  struct Chunk { __m512i a; };
  static constexpr int PAIR = 2, WIDTH = 32;
  static constexpr bool EXACT = false;

  static Chunk zero() { return {_mm512_setzero_si512()}; }
  static Chunk load(const Number* p) { return {_mm512_loadu_si512(p)}; }
  static Chunk load(const Brain* p) { return {_mm512_loadu_si512(p)}; }
  static Chunk load(const Tiny* p) { return round(widen(p), widen(p + 16)); }
  static Chunk load(const Code* p) { return round(widen(p), widen(p + 16)); }
  static Chunk load_some(const Brain* p, int64_t count) {
    return {_mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << count) - 1), p)};
  }
  template <class T>
  static Chunk load_some(const T* p, int64_t count) {
    T buffer[32] = {};
    memcpy(buffer, p, size_t(count));
    return load(buffer);
  }
  static Chunk round(F low, F high) { return {reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.a, low.a))}; }
  static Chunk broadcast(const Number* p) {
    int32_t pair;
    memcpy(&pair, p, 4);
    return {_mm512_set1_epi32(pair)};
  }
  static F dot(F sum, Chunk a, Chunk b) {
    return {_mm512_dpbf16_ps(sum.a, reinterpret_cast<__m512bh>(a.a), reinterpret_cast<__m512bh>(b.a))};
  }
  static void store(Number* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.a)));
  }
  static void store(Number* p, F x, F y) { keep(p, round(x, y)); }
  static void keep(void* p, Chunk x) { _mm512_storeu_si512(p, x.a); }
};
#endif

}  // namespace
