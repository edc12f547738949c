// Rows of a packed weight as numbers again: a vocabulary that serves both ends of a model lies in memory once.
#pragma once
#include "rows.h"
#include "scratch.h"
#include "unpack.h"

namespace {

thread_local octavo::Scratch panel_tiles;

// Row r of a panel whose tiles are every other one from `tiles` on. out: room for whole tiles.
template <int KIND>
void read_tiles(const uint8_t* tiles, int64_t r, int64_t width, float* out) {
  constexpr int64_t COLUMNS = tile_columns(KIND);
  for (int64_t column = 0; column < width; column += COLUMNS, tiles += 2 * TILE, out += COLUMNS) {
    if constexpr (KIND == F32) {
      for (int64_t v = 0; v < 16; ++v) memcpy(out + v, tiles + v * VECTOR + r * 4, 4);
    } else if constexpr (KIND == BF16) {
      uint16_t some[32];
      for (int64_t v = 0; v < 16; ++v) memcpy(some + 2 * v, tiles + v * VECTOR + r * 4, 4);
      for (int64_t i = 0; i < 32; i += 16) Simd::store(out + i, Simd::load_bf16(some + i));
    } else {
      uint8_t some[64];
      for (int64_t c = 0; c < 32; ++c) memcpy(some + 2 * c, tiles + (c * PANEL + r) * 2, 2);
      for (int64_t i = 0; i < 32; i += 16) Simd::store(out + i, Simd::load_half(some + 2 * i));
    }
  }
}

template <int KIND>
void read_row(const Linear& layer, int64_t row, float* out) {
  const int64_t width = layer.num_in, pair = row / (2 * PANEL), side = row / PANEL % 2, bytes = pair_bytes(KIND, width);
  const uint8_t* w = static_cast<const uint8_t*>(layer.weight) + pair * bytes;
  if constexpr (is_blocks(KIND)) {
    auto* tiles = static_cast<uint8_t*>(panel_tiles.of(size_t(pair_bytes(F32, width))));
    unpack_panel<KIND, F32>(w + side * bytes / 2, width, tiles);
    read_tiles<F32>(tiles, row % PANEL, width, out);
  } else {
    read_tiles<KIND>(w + side * TILE, row % PANEL, width, out);
  }
}

// A row of a weight without a gate: plain numbers or GGUF blocks. out: room for its columns, in multiples of 32.
void read_row(const Linear& layer, int64_t row, float* out) {
  switch (layer.kind) {
    case BF16: return read_row<BF16>(layer, row, out);
    case F32: return read_row<F32>(layer, row, out);
    case F16: return read_row<F16>(layer, row, out);
    case Q4_0: return read_row<Q4_0>(layer, row, out);
    case Q4_1: return read_row<Q4_1>(layer, row, out);
    case Q5_0: return read_row<Q5_0>(layer, row, out);
    case Q5_1: return read_row<Q5_1>(layer, row, out);
    case Q8_0: return read_row<Q8_0>(layer, row, out);
    case Q4_K: return read_row<Q4_K>(layer, row, out);
    case Q5_K: return read_row<Q5_K>(layer, row, out);
    case Q6_K: return read_row<Q6_K>(layer, row, out);
  }
}

}  // namespace
