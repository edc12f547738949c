// The product of many rows in bfloat16 by AMX: two by two tiles of 16 rows and 16 columns.
#pragma once
#include "amx.h"

namespace {

template <>
inline void multiply<Brains>(const Multiply<Brains>& m) {
  constexpr int64_t STEP = 32;  // of the depth, in one instruction
  const int64_t panel = m.panel, sums_bytes = m.sums_stride * 4, left_bytes = m.left_stride * 2;
  for (int64_t row = 0; row < m.rows; row += 32) {
    const bool two = row + 16 < m.rows;
    const uint16_t* a = m.left + row * m.left_stride;
    for (int64_t column = 0; column < m.columns; column += 32) {
      const uint8_t* b = m.panels + column / 16 * panel;
      float* c = m.sums + row * m.sums_stride + column;
      float* below = c + 16 * m.sums_stride;
      if (m.add) {
        tile_load<0>(c, sums_bytes);
        tile_load<1>(c + 16, sums_bytes);
        if (two) {
          tile_load<2>(below, sums_bytes);
          tile_load<3>(below + 16, sums_bytes);
        }
      } else {
        tile_zero<0>();
        tile_zero<1>();
        tile_zero<2>();
        tile_zero<3>();
      }
      for (int64_t k = 0; k < m.depth; k += STEP) {
        tile_load<4>(a + k, left_bytes);
        tile_load<6>(b + k / 2 * LANES, LANES);
        tile_load<7>(b + panel + k / 2 * LANES, LANES);
        tile_dot_bf16<0, 4, 6>();
        tile_dot_bf16<1, 4, 7>();
        if (two) {
          tile_load<5>(a + 16 * m.left_stride + k, left_bytes);
          tile_dot_bf16<2, 5, 6>();
          tile_dot_bf16<3, 5, 7>();
        }
      }
      tile_store<0>(c, sums_bytes);
      tile_store<1>(c + 16, sums_bytes);
      if (two) {
        tile_store<2>(below, sums_bytes);
        tile_store<3>(below + 16, sums_bytes);
      }
    }
  }
}

}  // namespace
