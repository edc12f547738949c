// Sixteen lanes as two registers: AVX2, FMA and F16C.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

struct Simd {
  static constexpr int TOKENS = 4;
  struct F { __m256 a, b; };
  struct I { __m256i a, b; };
  struct B { __m256i a, b; };
  using Dot = I;  // sums of 16 bits, two of a row

  static F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
  static __m128i load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static __m256i load32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static __m256 widen_bf16(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
  static F load_bf16(const uint16_t* p) { return {widen_bf16(load16(p)), widen_bf16(load16(p + 8))}; }
  // Round to nearest even; a NaN stays one.
  static __m256i bf16(__m256 x) {
    const __m256i u = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
  }
  static void store_bf16(uint16_t* p, F x) {
    const __m256i r = _mm256_permute4x64_epi64(_mm256_packus_epi32(bf16(x.a), bf16(x.b)), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), r);
  }
  static F load_half(const uint8_t* p) { return {_mm256_cvtph_ps(load16(p)), _mm256_cvtph_ps(load16(p + 16))}; }
  static void store_half(uint16_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
  }
  static F load_u8(const uint8_t* p) {
    const __m128i v = load16(p);
    return to_float(I{_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))});
  }
  static F load_s8(const uint8_t* p) {
    const __m128i v = load16(p);
    return to_float(I{_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8))});
  }
  static F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
  static F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
  static F reciprocal(F x) { return div(set1(1.0f), x); }
  static F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
  static F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
  static F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
  static F abs(F x) {
    const __m256 s = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(s, x.a), _mm256_andnot_ps(s, x.b)};
  }
  static F copysign(F x, F y) {
    const __m256 s = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(_mm256_andnot_ps(s, x.a), _mm256_and_ps(s, y.a)),
            _mm256_or_ps(_mm256_andnot_ps(s, x.b), _mm256_and_ps(s, y.b))};
  }
  static F round(F x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
  static __m256 pow2(__m256 x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127)), 23));
  }
  static F scaled(F x, F exponent) { return mul(x, pow2(exponent)); }
  static F pow2(F x) { return {pow2(x.a), pow2(x.b)}; }
  static float sum(F x) {
    const __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
  }
  static float largest(F x) {
    const __m256 s = _mm256_max_ps(x.a, x.b);
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
  }

  static I set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static I add(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
  static I load_int(const float* p) { return {load32(p), load32(p + 8)}; }
  static void store_int(float* p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a), _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
  }
  static F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
  static int32_t sum(I x) {
    const __m256i s = _mm256_add_epi32(x.a, x.b);
    __m128i t = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
  }
  static I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
  static void store_s8(int8_t* p, I x) {
    const __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    const __m128i r = _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), r);
  }

  static B load_codes(const uint8_t* p) { return {load32(p), load32(p + 32)}; }
  static B bits(B x, int shift, int mask) {
    const __m256i m = _mm256_set1_epi8(char(mask));
    return {_mm256_and_si256(_mm256_srli_epi16(x.a, shift), m), _mm256_and_si256(_mm256_srli_epi16(x.b, shift), m)};
  }
  static B join(B low, B high) {
    return {_mm256_or_si256(low.a, _mm256_slli_epi16(high.a, 4)), _mm256_or_si256(low.b, _mm256_slli_epi16(high.b, 4))};
  }

  // Byte c of each row's four.
  static __m256i column(__m256i x, int c) { return _mm256_and_si256(_mm256_srli_epi32(x, 8 * c), _mm256_set1_epi32(255)); }
  static F column(B x, int c) { return to_float(I{column(x.a, c), column(x.b, c)}); }
  static __m256i signed_column(__m256i x, int c) { return _mm256_srai_epi32(_mm256_slli_epi32(x, 24 - 8 * c), 24); }
  static F signed_column(B x, int c) { return to_float(I{signed_column(x.a, c), signed_column(x.b, c)}); }

  static constexpr bool DOTS_BF16 = false;
  struct Pairs { F even, odd; };
  using Paired = float;
  static __m256 even_bf16(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
  static __m256 odd_bf16(__m256i x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int32_t(0xffff0000)))); }
  static Pairs load_pairs(const uint8_t* p) {
    const B x = load_codes(p);
    return {{even_bf16(x.a), even_bf16(x.b)}, {odd_bf16(x.a), odd_bf16(x.b)}};
  }
  static F dot_pairs(F acc, Pairs w, const Paired* x) { return fma(w.odd, set1(x[1]), fma(w.even, set1(x[0]), acc)); }

  static constexpr int SIGNED_BIAS = 0;
  // A step adds up to 2 * 127 * (2^bits - 1) to a sum of 16 bits: so many fit.
  static constexpr int quads_before_flush(int bits) { return bits == 4 ? 8 : bits == 5 ? 4 : 2; }
  static __m256i quad(const int8_t* x) {
    int32_t q;
    memcpy(&q, x, 4);
    return _mm256_set1_epi32(q);
  }
  static Dot no_dot() { return set1(0); }
  static void dot(Dot& d, B codes, const int8_t* x) {
    const __m256i q = quad(x);
    d.a = _mm256_add_epi16(d.a, _mm256_maddubs_epi16(codes.a, q));
    d.b = _mm256_add_epi16(d.b, _mm256_maddubs_epi16(codes.b, q));
  }
  static void flush(I& sum, Dot d) {
    const __m256i one = _mm256_set1_epi16(1);
    sum.a = _mm256_add_epi32(sum.a, _mm256_madd_epi16(d.a, one));
    sum.b = _mm256_add_epi32(sum.b, _mm256_madd_epi16(d.b, one));
  }
  // |code| times the activation with the code's sign: a code of -128 has no positive twin of 8 bits, but |code| is
  // read unsigned. 2 * 128 * 127 still fits 16 bits.
  static __m256i dot_signed(__m256i d, __m256i codes, __m256i q) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(q, codes));
    return _mm256_add_epi32(d, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static void dot_signed(I& d, B codes, const int8_t* x) {
    const __m256i q = quad(x);
    d = {dot_signed(d.a, codes.a, q), dot_signed(d.b, codes.b, q)};
  }
};

}  // namespace
