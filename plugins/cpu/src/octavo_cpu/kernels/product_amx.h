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

// Tiles of columns of one pass: with its weight and 256 tokens it stays in the second-level cache.
constexpr int64_t PASS_TILES = 64;

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

// w: the pair's tiles, behind `head`. next: what will be read after them, or null. sums: float [tokens, 32].
template <int KIND>
void amx_pair(const Product& job, int64_t pair, const uint8_t* head, const uint8_t* w, int64_t tiles, const uint8_t* next, float* sums) {
  const int64_t tokens = job.num_tokens, stride = job.stride, blocks = ceil_div(tokens, 2 * PANEL);
  for (int64_t from = 0; from < tiles; from += PASS_TILES) {
    const int64_t count = tiles - from < PASS_TILES ? tiles - from : PASS_TILES;
    const bool last = from + count == tiles;
    const uint8_t *part = w + from * 2 * TILE, *x = job.rows + from * VECTOR;
    Ahead ahead{last ? next : part + count * 2 * TILE, 0};
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
      if (KIND == I8) scale_sums(job, head, first, rows, c0);
      finish(job, pair, first, rows, c0);
      if (left <= PANEL) continue;
      if (KIND == I8) scale_sums(job, head, second, PANEL, c1);
      finish(job, pair, second, PANEL, c1);
    }
  }
}

}  // namespace
