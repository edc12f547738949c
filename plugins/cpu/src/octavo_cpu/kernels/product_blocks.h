// One panel of GGUF blocks times a few tokens whose activations are 8-bit codes: 16 outputs of each, in float32.
#pragma once
#include "isa.h"

namespace {

// Quad q of a group: the codes of 4 columns of 16 rows.
template <int BITS>
inline Simd::B quad_codes(const uint8_t* group, int q) {
  if constexpr (BITS == 8) {
    return Simd::load_codes(group + VECTOR * q);
  } else {
    const Simd::B low = Simd::bits(Simd::load_codes(group + VECTOR * (q & 3)), q < 4 ? 0 : 4, 15);
    if constexpr (BITS == 5) return Simd::join(low, Simd::bits(Simd::load_codes(group + VECTOR * 4), q, 1));
    if constexpr (BITS == 6)
      return Simd::join(low, Simd::bits(Simd::load_codes(group + VECTOR * (4 + q / 4)), 2 * (q & 3), 3));
    return low;
  }
}

// sum[t] += codes of quads FROM..TO-1 times token t's. x: the group's activations of the first token.
template <int BITS, int T, int FROM, int TO>
inline void dot_quads(const uint8_t* group, const Activations* x, int64_t stride, Simd::I (&sum)[T]) {
  constexpr int STEP = Simd::quads_before_flush(BITS) < TO - FROM ? Simd::quads_before_flush(BITS) : TO - FROM;
#pragma GCC unroll 8
  for (int start = FROM; start < TO; start += STEP) {
    Simd::Dot dot[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) dot[t] = Simd::no_dot();
#pragma GCC unroll 8
    for (int q = start; q < start + STEP; ++q) {
      const Simd::B codes = quad_codes<BITS>(group, q);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        if constexpr (BITS == 8) Simd::dot_signed(sum[t], codes, x[t * stride].codes + 4 * q);
        else Simd::dot(dot[t], codes, x[t * stride].codes + 4 * q);
      }
    }
    if constexpr (BITS != 8)
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) Simd::flush(sum[t], dot[t]);
  }
}

// acc[t] += (codes - bias) * x, of one group with one scale for all its columns.
template <int BITS, int BIAS, int T>
inline void add_group(const uint8_t* group, F scale, const Activations* x, int64_t stride, F (&acc)[T]) {
  constexpr int TAKEN_OFF = BIAS + (BITS == 8 ? Simd::SIGNED_BIAS : 0);
  Simd::I sum[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t)
    sum[t] = Simd::set1(TAKEN_OFF ? -TAKEN_OFF * (x[t * stride].sums[0] + x[t * stride].sums[1]) : 0);
  dot_quads<BITS, T, 0, QUADS>(group, x, stride, sum);
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t)
    acc[t] = Simd::fma(Simd::to_float(sum[t]), Simd::mul(scale, Simd::set1(x[t * stride].scale)), acc[t]);
}

// The bytes of one block, asked for well before they are used.
template <int64_t BYTES>
inline void ask_ahead(const uint8_t* w) {
  constexpr int64_t AHEAD = 4096;
#pragma GCC unroll 48
  for (int64_t i = 0; i < BYTES; i += VECTOR) __builtin_prefetch(w + AHEAD + i);
}

// out[t] = the panel times x, token t's Activations at x + t * stride. (Loops over tokens are unrolled, and sums are
// local: else they would be kept in memory.)
template <int KIND, int T>
inline void blocks_panel(const uint8_t* w, int64_t num_in, const Activations* x, int64_t stride, F (&out)[T]) {
  constexpr Format f = FORMATS[KIND];
  F acc[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) acc[t] = Simd::set1(0.0f);
  for (int64_t column = 0; column < num_in; column += f.columns()) {
    ask_ahead<f.block_bytes()>(w);
    const F scale = Simd::load_half(w);
    F offset = Simd::set1(0.0f);
    if constexpr (f.offset) offset = Simd::load_half(w + 2 * PANEL);
    w += f.head_bytes();
    if constexpr (!f.super) {
      add_group<f.bits, f.bias>(w, scale, x, stride, acc);
      if constexpr (f.offset)
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) acc[t] = Simd::fma(offset, Simd::set1(x[t * stride].scaled_sum), acc[t]);
      w += f.group_bytes();
      ++x;
      continue;
    }
    for (int g = 0; g < 8; ++g, ++x, w += 2 * PANEL + f.group_bytes()) {
      const uint8_t* group = w + 2 * PANEL;
      if constexpr (f.offset) {
        add_group<f.bits, f.bias>(group, Simd::mul(scale, Simd::load_u8(w)), x, stride, acc);
        const F below = Simd::mul(offset, Simd::load_u8(w + PANEL));
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t)
          acc[t] = Simd::fma(below, Simd::set1(-x[t * stride].scaled_sum), acc[t]);
      } else if constexpr (f.super) {
        const F scales[2] = {Simd::mul(scale, Simd::load_s8(w)), Simd::mul(scale, Simd::load_s8(w + PANEL))};
        Simd::I sum[2][T];
#pragma GCC unroll 8
        for (int part = 0; part < 2; ++part)
#pragma GCC unroll 8
          for (int t = 0; t < T; ++t) sum[part][t] = Simd::set1(-f.bias * x[t * stride].sums[part]);
        dot_quads<f.bits, T, 0, 4>(group, x, stride, sum[0]);
        dot_quads<f.bits, T, 4, 8>(group, x, stride, sum[1]);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
          F both = Simd::mul(Simd::to_float(sum[0][t]), scales[0]);
          both = Simd::fma(Simd::to_float(sum[1][t]), scales[1], both);
          acc[t] = Simd::fma(both, Simd::set1(x[t * stride].scale), acc[t]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) out[t] = acc[t];
}

}  // namespace
