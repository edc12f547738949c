// From sums to outputs: bias, gate, and rounding to the output's numbers.
#pragma once
#include "activation.h"
#include "prepare.h"

namespace {

template <int DTYPE>
inline void store_row(void* row, int64_t i, F x) {
  if constexpr (DTYPE == AS_F32) Simd::store(static_cast<float*>(row) + i, x);
  else if constexpr (DTYPE == AS_BF16) Simd::store_bf16(static_cast<uint16_t*>(row) + i, x);
  else Simd::store_half(static_cast<uint16_t*>(row) + i, x);
}

// x as the dtype holds it.
template <int DTYPE>
inline F rounded(F x) {
  if constexpr (DTYPE == AS_F32) return x;
  alignas(64) uint16_t bits[PANEL];
  store_row<DTYPE>(bits, 0, x);
  return load_row(DTYPE, bits, 0);
}

// Outputs first..first+count-1, at most 16.
template <int DTYPE>
inline void store_some(void* row, int64_t first, int64_t count, F x) {
  if (count >= PANEL) return store_row<DTYPE>(row, first, x);
  if (count <= 0) return;
  const int64_t size = dtype_bytes(DTYPE);
  alignas(64) uint8_t all[PANEL * 4];
  store_row<DTYPE>(all, 0, x);
  memcpy(static_cast<uint8_t*>(row) + first * size, all, size_t(count * size));
}

template <int DTYPE>
void finish_rows(const Product& job, int64_t pair, int64_t token, int64_t rows, const float* sums) {
  const Linear& layer = *job.layer;
  const int64_t width = layer.gate ? layer.num_out / 2 : layer.num_out;
  const int64_t left_at = layer.gate ? pair * PANEL : pair * 2 * PANEL, right_at = left_at + (layer.gate ? width : PANEL);
  const int64_t count = width - left_at, right_count = layer.gate ? count : count - PANEL;
  F bias[2] = {Simd::set1(0.0f), Simd::set1(0.0f)};
  if (job.bias) bias[0] = load_some(DTYPE, job.bias, left_at, count), bias[1] = load_some(DTYPE, job.bias, right_at, right_count);
  uint8_t* y = static_cast<uint8_t*>(job.y) + token * width * dtype_bytes(DTYPE);
  for (int64_t r = 0; r < rows; ++r, sums += 2 * PANEL, y += width * dtype_bytes(DTYPE)) {
    const F left = Simd::add(Simd::load(sums), bias[0]), right = Simd::add(Simd::load(sums + PANEL), bias[1]);
    if (layer.gate) {  // rounded where the product and the activation alone would be
      const F gate = rounded<DTYPE>(activate(layer.gate, rounded<DTYPE>(left)));
      store_some<DTYPE>(y, left_at, count, Simd::mul(gate, rounded<DTYPE>(right)));
    } else {
      store_some<DTYPE>(y, left_at, count, left);
      store_some<DTYPE>(y, right_at, right_count, right);
    }
  }
}

// Sums of a weight's bytes, in place, as what they stand for: whole numbers, or numbers if activations kept their bits.
inline void scale_sums(const Product& job, int64_t pair, int64_t token, int64_t rows, float* sums) {
  const Linear& layer = *job.layer;
  const auto* of_row = reinterpret_cast<const float*>(static_cast<const uint8_t*>(layer.weight) + pair * pair_bytes(I8, layer.num_in));
  const F left = Simd::load(of_row), right = Simd::load(of_row + PANEL);
  for (int64_t r = 0; r < rows; ++r, sums += 2 * PANEL) {
    if (layer.exact) {
      Simd::store(sums, Simd::mul(Simd::load(sums), left));
      Simd::store(sums + PANEL, Simd::mul(Simd::load(sums + PANEL), right));
      continue;
    }
    const F scale = Simd::set1(job.scales[token + r].scale);
    Simd::store(sums, Simd::mul(Simd::to_float(Simd::load_int(sums)), Simd::mul(left, scale)));
    Simd::store(sums + PANEL, Simd::mul(Simd::to_float(Simd::load_int(sums + PANEL)), Simd::mul(right, scale)));
  }
}

// sums: [rows, 32] of one pair of panels and the tokens from `token` on, overwritten.
inline void finish(const Product& job, int64_t pair, int64_t token, int64_t rows, float* sums) {
  if (job.layer->kind == I8) scale_sums(job, pair, token, rows, sums);
  switch (job.layer->dtype) {
    case AS_BF16: return finish_rows<AS_BF16>(job, pair, token, rows, sums);
    case AS_F16: return finish_rows<AS_F16>(job, pair, token, rows, sums);
    default: return finish_rows<AS_F32>(job, pair, token, rows, sums);
  }
}

}  // namespace
