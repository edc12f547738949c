// GGUF blocks into the tiles of plain numbers, where many tokens pay for it or activations may not be rounded.
#pragma once
#include "product_blocks.h"

namespace {

// Columns go to float32 by way of whole numbers, and to bfloat16 by a shorter one that only lanes have that multiply it:
// names of `Lanes` are looked up where they are used.
template <int TARGET, int BITS, class Lanes = Simd>
inline F code_column(Simd::B codes, int c) {
  if constexpr (TARGET == F32) return BITS == 8 ? Lanes::signed_column(codes, c) : Lanes::column(codes, c);
  else return BITS == 8 ? Lanes::signed_column_above_base(codes, c) : Lanes::column_above_base(codes, c);
}

template <int TARGET, int BITS, class Lanes = Simd>
inline F above_base(F scale, F offset) {
  if constexpr (TARGET == F32) return offset;
  else return Lanes::fma(scale, Lanes::set1(BITS == 8 ? -Lanes::SIGNED_BASE : -Lanes::BASE), offset);
}

template <int TARGET, class Lanes = Simd>
inline void put_columns(uint8_t* vectors, int column, F first, F second) {
  if constexpr (TARGET == BF16) {
    Lanes::store_pairs(vectors + column / 2 * VECTOR, first, second);
  } else {
    Lanes::store(reinterpret_cast<float*>(vectors + column * VECTOR), first);
    Lanes::store(reinterpret_cast<float*>(vectors + (column + 1) * VECTOR), second);
  }
}

// Quads FROM..TO-1 of a group: value = code * scale + offset. out: where column 0 of the group goes.
template <int TARGET, int BITS, int FROM, int TO>
inline void unpack_quads(const uint8_t* group, F scale, F offset, uint8_t* out) {
  offset = above_base<TARGET, BITS>(scale, offset);
#pragma GCC unroll 8
  for (int q = FROM; q < TO; ++q) {
    const Simd::B codes = quad_codes<BITS>(group, q);
    F value[4];
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) value[c] = Simd::fma(code_column<TARGET, BITS>(codes, c), scale, offset);
    // A tile of float32 has 16 columns; the next one of this panel lies behind one of the other.
    uint8_t* tile = TARGET == F32 && q >= 4 ? out + TILE : out;
    put_columns<TARGET>(tile, 4 * q, value[0], value[1]);
    put_columns<TARGET>(tile, 4 * q + 2, value[2], value[3]);
  }
}

// A panel's blocks `w` into every other tile from `out` on.
template <int KIND, int TARGET>
void unpack_panel(const uint8_t* w, int64_t num_in, uint8_t* out) {
  constexpr Format f = FORMATS[KIND];
  constexpr int64_t STEP = GROUP / tile_columns(TARGET) * 2 * TILE;
  for (int64_t column = 0; column < num_in; column += f.columns()) {
    ask_ahead<f.block_bytes()>(w);
    const F scale = Simd::load_half(w);
    F offset = Simd::set1(0.0f);
    if constexpr (f.offset) offset = Simd::load_half(w + 2 * PANEL);
    w += f.head_bytes();
    if constexpr (!f.super) {
      if constexpr (f.bias != 0) offset = Simd::mul(scale, Simd::set1(float(-f.bias)));
      unpack_quads<TARGET, f.bits, 0, 8>(w, scale, offset, out);
      w += f.group_bytes(), out += STEP;
    } else {
      for (int g = 0; g < 8; ++g, w += 2 * PANEL + f.group_bytes(), out += STEP) {
        const uint8_t* group = w + 2 * PANEL;
        if constexpr (f.offset) {
          const F below = Simd::mul(Simd::mul(offset, Simd::load_u8(w + PANEL)), Simd::set1(-1.0f));
          unpack_quads<TARGET, f.bits, 0, 8>(group, Simd::mul(scale, Simd::load_u8(w)), below, out);
        } else {
          const F bias = Simd::set1(float(-f.bias));
          const F first = Simd::mul(scale, Simd::load_s8(w)), second = Simd::mul(scale, Simd::load_s8(w + PANEL));
          unpack_quads<TARGET, f.bits, 0, 4>(group, first, Simd::mul(first, bias), out);
          unpack_quads<TARGET, f.bits, 4, 8>(group, second, Simd::mul(second, bias), out);
        }
      }
    }
  }
}

}  // namespace
