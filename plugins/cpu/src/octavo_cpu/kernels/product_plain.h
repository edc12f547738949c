// Sixteen rows of a row-major weight times a few tokens. Meant for few: each row is read once for T of them.
#pragma once
#include "isa.h"
#include "prepare.h"

namespace {

// out[t][r] for ROWS rows from w on; x: float [T, num_in].
template <int KIND, int ROWS, int T>
inline void plain_rows(const void* w, int64_t first, int64_t num_in, const float* x, float (&out)[T][PANEL], int64_t at) {
  constexpr int dtype = KIND == BF16 ? AS_BF16 : AS_F32;
  F acc[ROWS][T];
  const void* rows[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    rows[r] = row_of(dtype, w, first + r, num_in);
    for (int t = 0; t < T; ++t) acc[r][t] = Simd::set1(0.0f);
  }
  int64_t i = 0;
  for (; i + 16 <= num_in; i += 16) {
    F given[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) given[t] = Simd::load(x + t * num_in + i);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const F weight = load_row(dtype, rows[r], i);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) acc[r][t] = Simd::fma(weight, given[t], acc[r][t]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int t = 0; t < T; ++t) {
      float sum = Simd::sum(acc[r][t]);
      for (int64_t j = i; j < num_in; ++j) sum += load_one(dtype, rows[r], j) * x[t * num_in + j];
      out[t][at + r] = sum;
    }
}

// acc[t]: outputs first..first+15, of which `count` are there.
template <int KIND, int T>
void plain_panel(const void* w, int64_t first, int64_t count, int64_t num_in, const float* x, F (&acc)[T]) {
  constexpr int ROWS = T == 1 ? 4 : T == 2 ? 2 : 1;
  alignas(64) float out[T][PANEL] = {};
  int64_t r = 0;
  for (; r + ROWS <= count; r += ROWS) plain_rows<KIND, ROWS, T>(w, first + r, num_in, x, out, r);
  for (; r < count; ++r) plain_rows<KIND, 1, T>(w, first + r, num_in, x, out, r);
  for (int t = 0; t < T; ++t) acc[t] = Simd::load(out[t]);
}

}  // namespace
