// Sixteen lanes as four registers: AArch64 with dot products of bytes (Armv8.2).
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace {

struct Simd {
  static constexpr int TOKENS = 4;
  struct F { float32x4_t v[4]; };
  struct I { int32x4_t v[4]; };
  struct B { uint8x16_t v[4]; };
  using Dot = I;

#define EACH(expression) for (int i = 0; i < 4; ++i) expression
#define RETURN_EACH(type, expression) type r; EACH(r.v[i] = (expression)); return r

  static F set1(float x) { RETURN_EACH(F, vdupq_n_f32(x)); }
  static F load(const float* p) { RETURN_EACH(F, vld1q_f32(p + 4 * i)); }
  static void store(float* p, F a) { EACH(vst1q_f32(p + 4 * i, a.v[i])); }
  static F load_bf16(const uint16_t* p) { RETURN_EACH(F, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16))); }
  // Round to nearest even; a NaN stays one.
  static uint16x4_t bf16(float32x4_t x) {
    const uint32x4_t u = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t r = vshrq_n_u32(vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
    return vmovn_u32(vbslq_u32(vceqq_f32(x, x), r, vdupq_n_u32(0x7fc0)));
  }
  static void store_bf16(uint16_t* p, F a) { EACH(vst1_u16(p + 4 * i, bf16(a.v[i]))); }
  static F load_half(const uint8_t* p) {
    uint16_t h[16];
    memcpy(h, p, 32);
    RETURN_EACH(F, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h + 4 * i))));
  }
  static void store_half(uint16_t* p, F a) { EACH(vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])))); }
  static F load_u8(const uint8_t* p) {
    const uint8x16_t b = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(b)), high = vmovl_u8(vget_high_u8(b));
    return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(low))),
             vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(high)))}};
  }
  static F load_s8(const uint8_t* p) {
    const int8x16_t b = vreinterpretq_s8_u8(vld1q_u8(p));
    const int16x8_t low = vmovl_s8(vget_low_s8(b)), high = vmovl_s8(vget_high_s8(b));
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
  }
  static F add(F a, F b) { RETURN_EACH(F, vaddq_f32(a.v[i], b.v[i])); }
  static F sub(F a, F b) { RETURN_EACH(F, vsubq_f32(a.v[i], b.v[i])); }
  static F mul(F a, F b) { RETURN_EACH(F, vmulq_f32(a.v[i], b.v[i])); }
  static F div(F a, F b) { RETURN_EACH(F, vdivq_f32(a.v[i], b.v[i])); }
  static F reciprocal(F a) { return div(set1(1.0f), a); }
  static F fma(F a, F b, F c) { RETURN_EACH(F, vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
  // b where one is NaN, unlike Arm's own minimum and maximum.
  static F min(F a, F b) { RETURN_EACH(F, vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
  static F max(F a, F b) { RETURN_EACH(F, vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
  static F abs(F a) { RETURN_EACH(F, vabsq_f32(a.v[i])); }
  static F copysign(F a, F b) { RETURN_EACH(F, vbslq_f32(vdupq_n_u32(0x80000000), b.v[i], a.v[i])); }
  static F round(F a) { RETURN_EACH(F, vrndnq_f32(a.v[i])); }
  static F pow2(F a) {  // a whole, -126..127
    RETURN_EACH(F, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(a.v[i]), vdupq_n_s32(127)), 23)));
  }
  static F scaled(F a, F exponent) { return mul(a, pow2(exponent)); }
  static float sum(F a) { return vaddvq_f32(vaddq_f32(vaddq_f32(a.v[0], a.v[1]), vaddq_f32(a.v[2], a.v[3]))); }
  static float largest(F a) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3]))); }

  static I set1(int32_t x) { RETURN_EACH(I, vdupq_n_s32(x)); }
  static I add(I a, I b) { RETURN_EACH(I, vaddq_s32(a.v[i], b.v[i])); }
  static I load_int(const float* p) { RETURN_EACH(I, vreinterpretq_s32_f32(vld1q_f32(p + 4 * i))); }
  static void store_int(float* p, I a) { EACH(vst1q_f32(p + 4 * i, vreinterpretq_f32_s32(a.v[i]))); }
  static F to_float(I a) { RETURN_EACH(F, vcvtq_f32_s32(a.v[i])); }
  static int32_t sum(I a) { return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3]))); }
  static I to_int(F a) { RETURN_EACH(I, vcvtnq_s32_f32(a.v[i])); }
  static void store_s8(int8_t* p, I a) {
    const int16x8_t low = vcombine_s16(vqmovn_s32(a.v[0]), vqmovn_s32(a.v[1]));
    const int16x8_t high = vcombine_s16(vqmovn_s32(a.v[2]), vqmovn_s32(a.v[3]));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
  }

  static B load_codes(const uint8_t* p) { RETURN_EACH(B, vld1q_u8(p + 16 * i)); }
  static B bits(B a, int shift, int mask) {
    RETURN_EACH(B, vandq_u8(vshlq_u8(a.v[i], vdupq_n_s8(int8_t(-shift))), vdupq_n_u8(uint8_t(mask))));
  }
  static B join(B low, B high) { RETURN_EACH(B, vorrq_u8(low.v[i], vshlq_n_u8(high.v[i], 4))); }

  // Byte c of each row's four.
  static F column(B a, int c) {
    const int32x4_t shift = vdupq_n_s32(-8 * c);
    RETURN_EACH(F, vcvtq_f32_u32(vandq_u32(vshlq_u32(vreinterpretq_u32_u8(a.v[i]), shift), vdupq_n_u32(255))));
  }
  static F signed_column(B a, int c) {
    const int32x4_t shift = vdupq_n_s32(24 - 8 * c);
    RETURN_EACH(F, vcvtq_f32_s32(vshrq_n_s32(vshlq_s32(vreinterpretq_s32_u8(a.v[i]), shift), 24)));
  }

  static constexpr bool DOTS_BF16 = false;
  struct Pairs { F even, odd; };
  using Paired = float;
  static Pairs load_pairs(const uint8_t* p) {
    Pairs r;
    for (int i = 0; i < 4; ++i) {
      const uint32x4_t both = vreinterpretq_u32_u8(vld1q_u8(p + 16 * i));
      r.even.v[i] = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
      r.odd.v[i] = vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xffff0000)));
    }
    return r;
  }
  static F dot_pairs(F a, Pairs w, const Paired* x) { return fma(w.odd, set1(x[1]), fma(w.even, set1(x[0]), a)); }

  // Codes of fewer than 8 bits are the same signed.
  static constexpr int SIGNED_BIAS = 0;
  static constexpr int quads_before_flush(int) { return 8; }
  static int8x16_t quad(const int8_t* x) {
    int32_t q;
    memcpy(&q, x, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(q));
  }
  static Dot no_dot() { return set1(0); }
  static void dot(Dot& d, B codes, const int8_t* x) {
    const int8x16_t q = quad(x);
    EACH(d.v[i] = vdotq_s32(d.v[i], vreinterpretq_s8_u8(codes.v[i]), q));
  }
  static void flush(I& sum, Dot d) { EACH(sum.v[i] = vaddq_s32(sum.v[i], d.v[i])); }
  static void dot_signed(I& d, B codes, const int8_t* x) { dot(d, codes, x); }

#undef EACH
#undef RETURN_EACH
};

}  // namespace
