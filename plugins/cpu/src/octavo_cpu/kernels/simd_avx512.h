// Sixteen lanes as one register: AVX-512 F, BW, DQ, VL and VNNI, and products of bfloat16 where the file has AVX512-BF16.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

struct Simd {
  static constexpr int TOKENS = 8;
  struct F { __m512 a; };
  struct I { __m512i a; };
  struct B { __m512i a; };
  using Dot = I;

  static F set1(float x) { return {_mm512_set1_ps(x)}; }
  static F load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x.a); }
  static __m128i load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static __m256i load32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static F load_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load32(p)), 16))};
  }
#if defined(__AVX512BF16__)
  static void store_bf16(uint16_t* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.a)));
  }
#else
  // Round to nearest even; a NaN stays one.
  static void store_bf16(uint16_t* p, F x) {
    const __m512i u = _mm512_castps_si512(x.a), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(x.a, x.a, _CMP_UNORD_Q);
    const __m256i out = _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(r, nan, _mm512_set1_epi32(0x7fc0)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), out);
  }
#endif
  static F load_half(const uint8_t* p) { return {_mm512_cvtph_ps(load32(p))}; }
  static void store_half(uint16_t* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  }
  static F load_u8(const uint8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load16(p)))}; }
  static F load_s8(const uint8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load16(p)))}; }
  static F add(F x, F y) { return {_mm512_add_ps(x.a, y.a)}; }
  static F sub(F x, F y) { return {_mm512_sub_ps(x.a, y.a)}; }
  static F mul(F x, F y) { return {_mm512_mul_ps(x.a, y.a)}; }
  static F div(F x, F y) { return {_mm512_div_ps(x.a, y.a)}; }
  // 1 / x, to two units of the last place.
  static F reciprocal(F x) {
    const __m512 r = _mm512_rcp14_ps(x.a);
    return {_mm512_mul_ps(r, _mm512_fnmadd_ps(x.a, r, _mm512_set1_ps(2.0f)))};
  }
  static F fma(F x, F y, F z) { return {_mm512_fmadd_ps(x.a, y.a, z.a)}; }
  static F min(F x, F y) { return {_mm512_min_ps(x.a, y.a)}; }
  static F max(F x, F y) { return {_mm512_max_ps(x.a, y.a)}; }
  static F abs(F x) { return {_mm512_andnot_ps(_mm512_set1_ps(-0.0f), x.a)}; }
  static F copysign(F x, F y) {
    const __m512 s = _mm512_set1_ps(-0.0f);
    return {_mm512_or_ps(_mm512_andnot_ps(s, x.a), _mm512_and_ps(s, y.a))};
  }
  static F round(F x) { return {_mm512_roundscale_ps(x.a, 8)}; }
  static F scaled(F x, F exponent) { return {_mm512_scalef_ps(x.a, exponent.a)}; }
  static F pow2(F x) {
    const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(x.a), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
  }
  static float sum(F x) { return _mm512_reduce_add_ps(x.a); }
  static float largest(F x) { return _mm512_reduce_max_ps(x.a); }

  static I set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
  static I add(I x, I y) { return {_mm512_add_epi32(x.a, y.a)}; }
  // Whole numbers in memory of floats.
  static I load_int(const float* p) { return {_mm512_loadu_si512(p)}; }
  static void store_int(float* p, I x) { _mm512_storeu_si512(p, x.a); }
  static F to_float(I x) { return {_mm512_cvtepi32_ps(x.a)}; }
  static int32_t sum(I x) { return _mm512_reduce_add_epi32(x.a); }
  static I to_int(F x) { return {_mm512_cvtps_epi32(x.a)}; }
  static void store_s8(int8_t* p, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x.a));
  }

  static B load_codes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
  static B bits(B x, int shift, int mask) {
    return {_mm512_and_si512(_mm512_srli_epi16(x.a, unsigned(shift)), _mm512_set1_epi8(char(mask)))};
  }
  static B join(B low, B high) { return {_mm512_or_si512(low.a, _mm512_slli_epi16(high.a, 4))}; }

  // Byte c of each row's four.
  static F column(B x, int c) { return to_float(I{_mm512_and_si512(_mm512_srli_epi32(x.a, 8u * unsigned(c)), _mm512_set1_epi32(255))}); }
  // Signed ones come as the fraction of a float32 of which their lowest bit is worth one: no other way takes fewer shifts,
  // of which a core makes few at once.
  static F signed_column(B x, int c) {
    const __m512i moved = c < 2 ? x.a : _mm512_srli_epi32(x.a, 16);
    const int at = c % 2 * 8, one = c % 2 ? 0x47000000 : 0x4b000000;
    const float base = c % 2 ? 0x1p15f : 0x1p23f;
    constexpr int AND_XOR = 0x6a;
    const __m512i above = _mm512_ternarylogic_epi32(moved, _mm512_set1_epi32(255 << at), _mm512_set1_epi32(one | 128 << at), AND_XOR);
    return {_mm512_sub_ps(_mm512_castsi512_ps(above), _mm512_set1_ps(base + 128))};
  }

#if defined(__AVX512BF16__)
  static constexpr bool DOTS_BF16 = true;
  struct Pairs { __m512bh a; };
  using Paired = uint16_t;
  static Pairs load_pairs(const uint8_t* p) { return {reinterpret_cast<__m512bh>(_mm512_loadu_si512(p))}; }
  static F dot_pairs(F acc, Pairs w, const Paired* x) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return {_mm512_dpbf16_ps(acc.a, w.a, reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)))};
  }
  // Two columns of 16 rows as a vector of pairs.
  static void store_pairs(uint8_t* p, F even, F odd) {
    const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd.a, even.a));
    const __m512i in_turn = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
                                             4, 19, 3, 18, 2, 17, 1, 16, 0);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi16(in_turn, both));
  }
  // Bytes c and c + 1 of each row's four: of such whole numbers the upper half of a float32 holds all bits.
  static Pairs signed_pairs(B x, int c) {
    const __m512i even = reinterpret_cast<__m512i>(signed_column(x, c).a), odd = reinterpret_cast<__m512i>(signed_column(x, c + 1).a);
    return {reinterpret_cast<__m512bh>(_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even, 16), odd))};
  }
  // Byte c of each row's four, above BASE: its bits become the upper ones of a float's fraction, which saves turning a
  // whole number into a float, and costs bits that bfloat16 does not have. Signed bytes come above SIGNED_BASE.
  static constexpr float BASE = 128.0f, SIGNED_BASE = 256.0f + 128.0f;
  template <int AT>
  static F fraction(__m512i x, int c, int mask, int one) {
    const int left = AT - 8 * c;
    const __m512i moved = left >= 0 ? _mm512_slli_epi32(x, unsigned(left)) : _mm512_srli_epi32(x, unsigned(-left));
    constexpr int AND_OR = 0xea;
    return {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(moved, _mm512_set1_epi32(mask), _mm512_set1_epi32(one), AND_OR))};
  }
  static F column_above_base(B x, int c) { return fraction<16>(x.a, c, 0x007f0000, 0x43000000); }
  static F signed_column_above_base(B x, int c) {
    return fraction<15>(_mm512_xor_si512(x.a, _mm512_set1_epi8(char(0x80))), c, 0x007f8000, 0x43800000);
  }
#else
  static constexpr bool DOTS_BF16 = false;
  struct Pairs { F even, odd; };
  using Paired = float;
  static Pairs load_pairs(const uint8_t* p) {
    const __m512i both = _mm512_loadu_si512(p), high = _mm512_set1_epi32(int32_t(0xffff0000));
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(both, 16))}, {_mm512_castsi512_ps(_mm512_and_si512(both, high))}};
  }
  static F dot_pairs(F acc, Pairs w, const Paired* x) { return fma(w.odd, set1(x[1]), fma(w.even, set1(x[0]), acc)); }
#endif

  // VNNI reads codes unsigned: signed ones are moved up by 128, which the caller takes off again.
  static constexpr int SIGNED_BIAS = 128;
  static constexpr int quads_before_flush(int) { return 8; }
  static __m512i quad(const int8_t* x) {
    int32_t q;
    memcpy(&q, x, 4);
    return _mm512_set1_epi32(q);
  }
  static Dot no_dot() { return set1(0); }
  static void dot(Dot& d, B codes, const int8_t* x) { d.a = _mm512_dpbusd_epi32(d.a, codes.a, quad(x)); }
  static void flush(I& sum, Dot d) { sum.a = _mm512_add_epi32(sum.a, d.a); }
  static void dot_signed(I& d, B codes, const int8_t* x) {
    d.a = _mm512_dpbusd_epi32(d.a, _mm512_xor_si512(codes.a, _mm512_set1_epi8(char(0x80))), quad(x));
  }
};

}  // namespace
