// Sixteen lanes in plain C++: the oracle of the other two, and the path of every other CPU.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct Simd {
  static constexpr int TOKENS = 4;  // whose sums fit the registers
  struct F { float v[16]; };
  struct I { int32_t v[16]; };
  struct B { uint8_t v[64]; };
  using Dot = I;

#define EACH(expression) for (int i = 0; i < 16; ++i) expression
#define RETURN_EACH(type, expression) type r; EACH(r.v[i] = (expression)); return r

  static F set1(float x) { RETURN_EACH(F, x); }
  static F load(const float* p) { RETURN_EACH(F, p[i]); }
  static void store(float* p, F a) { EACH(p[i] = a.v[i]); }
  static float from_bits(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
  static uint32_t to_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
  static F load_bf16(const uint16_t* p) { RETURN_EACH(F, from_bits(uint32_t(p[i]) << 16)); }
  static uint16_t bf16(float f) {
    const uint32_t u = to_bits(f);
    if ((u & 0x7fffffff) > 0x7f800000) return uint16_t(u >> 16 | 0x40);
    return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
  static void store_bf16(uint16_t* p, F a) { EACH(p[i] = bf16(a.v[i])); }
  static float half(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest < 0x400) return from_bits(sign | to_bits(float(rest) * 0x1p-24f));
    return from_bits(sign | ((rest << 13) + (112u << 23)));
  }
  static F load_half(const uint8_t* p) { uint16_t h[16]; memcpy(h, p, 32); RETURN_EACH(F, half(h[i])); }
  // Round to nearest even; 65520 and above become infinity, a NaN stays one.
  static uint16_t to_half(float f) {
    const uint32_t u = to_bits(f), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
    if (rest > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (rest >= 0x477ff000) return uint16_t(sign | 0x7c00);
    if (rest < 0x38800000) return uint16_t(sign | uint32_t(std::nearbyintf(from_bits(rest) * 0x1p24f)));
    return uint16_t(sign | ((rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13));
  }
  static void store_half(uint16_t* p, F a) { EACH(p[i] = to_half(a.v[i])); }
  static F load_u8(const uint8_t* p) { RETURN_EACH(F, float(p[i])); }
  static F load_s8(const uint8_t* p) { RETURN_EACH(F, float(int8_t(p[i]))); }
  static F add(F a, F b) { RETURN_EACH(F, a.v[i] + b.v[i]); }
  static F sub(F a, F b) { RETURN_EACH(F, a.v[i] - b.v[i]); }
  static F mul(F a, F b) { RETURN_EACH(F, a.v[i] * b.v[i]); }
  static F div(F a, F b) { RETURN_EACH(F, a.v[i] / b.v[i]); }
  static F reciprocal(F a) { RETURN_EACH(F, 1.0f / a.v[i]); }
  static F fma(F a, F b, F c) { RETURN_EACH(F, a.v[i] * b.v[i] + c.v[i]); }
  static F min(F a, F b) { RETURN_EACH(F, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }  // b where one is NaN
  static F max(F a, F b) { RETURN_EACH(F, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
  static F abs(F a) { RETURN_EACH(F, std::fabs(a.v[i])); }
  static F copysign(F a, F b) { RETURN_EACH(F, std::copysign(a.v[i], b.v[i])); }
  static F round(F a) { RETURN_EACH(F, std::nearbyintf(a.v[i])); }
  static F pow2(F a) { RETURN_EACH(F, from_bits(uint32_t(int32_t(a.v[i]) + 127) << 23)); }  // a whole, -126..127
  static F scaled(F a, F exponent) { return mul(a, pow2(exponent)); }  // a * 2^exponent, of a as pow2
  static float sum(F a) { float s = 0; EACH(s += a.v[i]); return s; }
  static float largest(F a) { float m = a.v[0]; EACH(m = a.v[i] > m ? a.v[i] : m); return m; }

  static I set1(int32_t x) { RETURN_EACH(I, x); }
  static I add(I a, I b) { RETURN_EACH(I, a.v[i] + b.v[i]); }
  static I load_int(const float* p) { I r; memcpy(r.v, p, 64); return r; }
  static void store_int(float* p, I a) { memcpy(p, a.v, 64); }
  static F to_float(I a) { RETURN_EACH(F, float(a.v[i])); }
  static int32_t sum(I a) { int32_t s = 0; EACH(s += a.v[i]); return s; }
  // What is no number has no code; its block's scale is NaN. (The largest magnitude may come a last place above 127.)
  static I to_int(F a) { RETURN_EACH(I, a.v[i] > -128 && a.v[i] < 128 ? int32_t(std::nearbyintf(a.v[i])) : 0); }
  static void store_s8(int8_t* p, I a) { EACH(p[i] = int8_t(a.v[i])); }

  static B load_codes(const uint8_t* p) { B r; memcpy(r.v, p, 64); return r; }
  // Bits `shift`.. of each byte under `mask`, and codes with more bits above them.
  static B bits(B a, int shift, int mask) { for (auto& x : a.v) x = uint8_t(x >> shift & mask); return a; }
  static B join(B low, B high) { for (int i = 0; i < 64; ++i) low.v[i] = uint8_t(low.v[i] | high.v[i] << 4); return low; }

  // Byte c of each row's four.
  static F column(B a, int c) { RETURN_EACH(F, float(a.v[4 * i + c])); }
  static F signed_column(B a, int c) { RETURN_EACH(F, float(int8_t(a.v[4 * i + c]))); }

  // Two bfloat16 columns of each row, and how they meet two activations.
  static constexpr bool DOTS_BF16 = false;  // whether activations stay bfloat16
  struct Pairs { F even, odd; };
  using Paired = float;
  static Pairs load_pairs(const uint8_t* p) {
    uint16_t h[32];
    memcpy(h, p, 64);
    Pairs r;
    EACH((r.even.v[i] = from_bits(uint32_t(h[2 * i]) << 16), r.odd.v[i] = from_bits(uint32_t(h[2 * i + 1]) << 16)));
    return r;
  }
  static F dot_pairs(F a, Pairs w, const Paired* x) { return fma(w.odd, set1(x[1]), fma(w.even, set1(x[0]), a)); }

  static constexpr int SIGNED_BIAS = 0;  // what `dot_signed` adds to each code
  static constexpr int quads_before_flush(int) { return 8; }
  static Dot no_dot() { return set1(0); }
  static void dot(Dot& d, B codes, const int8_t* x) { EACH(for (int c = 0; c < 4; ++c) d.v[i] += codes.v[4 * i + c] * x[c]); }
  static void flush(I& sum, Dot d) { EACH(sum.v[i] += d.v[i]); }
  static void dot_signed(I& d, B codes, const int8_t* x) {
    EACH(for (int c = 0; c < 4; ++c) d.v[i] += int8_t(codes.v[4 * i + c]) * x[c]);
  }

#undef EACH
#undef RETURN_EACH
};

}  // namespace
