// A pair of panels of bfloat16 or bytes times many tokens, in tiles of 16 tokens by 16 outputs, two by two of them:
//
//                    right 6    right 7         16 outputs each
//     left 4         sums 0     sums 1
//     left 5         sums 2     sums 3
//     16 tokens each
//
// Activations are read where they lie. The last two tiles of tokens may overlap the ones before: what both compute is
// the same, bit by bit.
#pragma once
#include "amx.h"
#include "finish.h"

namespace {

template <int KIND, int SUMS, int LEFT, int RIGHT>
inline void tile_dot() {
  if constexpr (KIND == BF16) tile_dot_bf16<SUMS, LEFT, RIGHT>();
  else tile_dot_s8<SUMS, LEFT, RIGHT>();
}

// The next weight's way into the second-level cache, some lines with each tile.
struct Ahead {
  const uint8_t* next;
  int64_t lines;
  void step() {
    for (int64_t i = 0; i < lines; ++i, next += VECTOR) __builtin_prefetch(next, 0, 2);
  }
};

// sums[16 or 32][32] (+)= tokens times the pair. x0, x1: two runs of 16 tokens, if TWO.
template <int KIND, bool TWO>
inline void amx_block(const uint8_t* w, int64_t tiles, const uint8_t* x0, const uint8_t* x1, int64_t stride, bool more, float* sums0,
                      float* sums1, Ahead ahead) {
  constexpr int64_t ROW = 2 * PANEL * 4;
  if (more) {
    tile_load<0>(sums0, ROW), tile_load<1>(sums0 + PANEL, ROW);
    if (TWO) tile_load<2>(sums1, ROW), tile_load<3>(sums1 + PANEL, ROW);
  } else {
    tile_zero<0>(), tile_zero<1>();
    if (TWO) tile_zero<2>(), tile_zero<3>();
  }
  for (int64_t i = 0; i < tiles; ++i, w += 2 * TILE, x0 += VECTOR, x1 += VECTOR) {
    ahead.step();
    tile_stream<4>(x0, stride);
    tile_load<6>(w, VECTOR);
    tile_dot<KIND, 0, 4, 6>();
    tile_load<7>(w + TILE, VECTOR);
    tile_dot<KIND, 1, 4, 7>();
    if (TWO) {
      tile_stream<5>(x1, stride);
      tile_dot<KIND, 2, 5, 6>();
      tile_dot<KIND, 3, 5, 7>();
    }
  }
  tile_store<0>(sums0, ROW), tile_store<1>(sums0 + PANEL, ROW);
  if (TWO) tile_store<2>(sums1, ROW), tile_store<3>(sums1 + PANEL, ROW);
}

// A dense weight, a part of its tiles at a time: each with 256 tokens stays in the second-level cache.
struct DenseTiles {
  static constexpr int64_t PART = 64;
  const uint8_t *w, *next;  // next: what this thread reads after it, or null
  const uint8_t* part(int64_t from, int64_t) const { return w + from * 2 * TILE; }
  const uint8_t* after(int64_t from, int64_t count, bool last) const { return last ? next : w + (from + count) * 2 * TILE; }
};

// Blocks, a part unpacked at a time: it stays in the first-level cache.
template <int KIND>
struct BlockTiles {
  static constexpr int64_t PART = 8;
  const uint8_t* w;
  int64_t panel_bytes;
  uint8_t* unpacked;  // 2 * PART tiles
  const uint8_t* part(int64_t from, int64_t count) const {
    constexpr Format f = FORMATS[KIND];
    static_assert(PART * tile_columns(BF16) % f.columns() == 0, "a part is whole blocks");
    const uint8_t* blocks = w + from * tile_columns(BF16) / f.columns() * f.block_bytes();
    unpack_panel<KIND, BF16>(blocks, count * tile_columns(BF16), unpacked);
    unpack_panel<KIND, BF16>(blocks + panel_bytes, count * tile_columns(BF16), unpacked + TILE);
    return unpacked;
  }
  const uint8_t* after(int64_t, int64_t, bool) const { return nullptr; }
};

// Bytes as bfloat16, likewise.
struct ByteTiles {
  static constexpr int64_t PART = 8, EACH = tile_columns(I8) / tile_columns(BF16);
  const uint8_t* w;
  uint8_t* unpacked;
  const uint8_t* part(int64_t from, int64_t count) const {
    static_assert(PART % EACH == 0, "a part is whole tiles of bytes");
    const uint8_t* codes = w + from / EACH * 2 * TILE;
    for (int64_t i = 0; i < ceil_div(count, EACH); ++i)
      for (int side = 0; side < 2; ++side)
        for (int64_t v = 0; v < 16; ++v, codes += VECTOR) {  // vector v: columns 4v..4v+3
          const Simd::B four = Simd::load_codes(codes);
          uint8_t* tile = unpacked + ((i * EACH + v / 8) * 2 + side) * TILE;
          put_columns<BF16>(tile, int(v % 8 * 4), Simd::signed_column(four, 0), Simd::signed_column(four, 1));
          put_columns<BF16>(tile, int(v % 8 * 4 + 2), Simd::signed_column(four, 2), Simd::signed_column(four, 3));
        }
    return unpacked;
  }
  const uint8_t* after(int64_t, int64_t, bool) const { return nullptr; }
};

// sums: [tokens, 32].
template <int KIND, class Tiles>
void amx_pair(const Product& job, int64_t pair, const Tiles& source, int64_t tiles, float* sums) {
  const int64_t tokens = job.num_tokens, stride = job.stride, blocks = ceil_div(tokens, 2 * PANEL);
  for (int64_t from = 0; from < tiles; from += Tiles::PART) {
    const int64_t count = tiles - from < Tiles::PART ? tiles - from : Tiles::PART;
    const bool last = from + count == tiles;
    const uint8_t *part = source.part(from, count), *x = job.rows + from * VECTOR;
    Ahead ahead{source.after(from, count, last), 0};
    if (ahead.next) ahead.lines = ceil_div(2 * TILE / VECTOR, blocks);
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t first = tokens > 2 * PANEL && b == blocks - 1 ? tokens - 2 * PANEL : b * 2 * PANEL, left = tokens - first;
      const int64_t second = first + (left < 2 * PANEL ? left - PANEL : PANEL);
      float *c0 = sums + b * 2 * PANEL * 2 * PANEL, *c1 = c0 + PANEL * 2 * PANEL;
      if (left <= PANEL) amx_block<KIND, false>(part, count, x + first * stride, nullptr, stride, from > 0, c0, c1, ahead);
      else amx_block<KIND, true>(part, count, x + first * stride, x + second * stride, stride, from > 0, c0, c1, ahead);
      if (ahead.next) ahead.next += count * ahead.lines * VECTOR;
      if (!last) continue;
      const int64_t rows = left < PANEL ? left : PANEL;
      finish(job, pair, first, rows, c0);
      if (left <= PANEL) continue;
      finish(job, pair, second, PANEL, c1);
    }
  }
}

}  // namespace
