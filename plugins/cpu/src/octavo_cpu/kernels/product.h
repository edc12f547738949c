// A whole product: tiles of tokens over panels, then bias, gate and rounding. Included once for each instruction set.
#pragma once
#include "activation.h"
#include "isa.h"
#include "prepare.h"
#include "product_packed.h"
#include "product_plain.h"

namespace {

// How many tokens go over a run of panels at once: their activations stay in the second-level cache meanwhile.
constexpr int64_t TOKEN_BLOCK = 64;

inline F rounded(int dtype, F x) {
  if (dtype == AS_F32) return x;
  uint16_t bits[PANEL];
  Simd::store_bf16(bits, x);
  return Simd::load_bf16(bits);
}

// Outputs first..first+count-1 (at most 16) of one vector.
inline F load_some(int dtype, const void* p, int64_t first, int64_t count) {
  if (count == PANEL) return load_row(dtype, p, first);
  alignas(64) float some[PANEL] = {};
  for (int64_t i = 0; i < count; ++i) some[i] = load_one(dtype, p, first + i);
  return Simd::load(some);
}

inline void store_some(int dtype, void* row, int64_t first, int64_t count, F x) {
  alignas(64) uint8_t all[PANEL * 4];
  const int64_t size = dtype == AS_BF16 ? 2 : 4;
  uint8_t* to = static_cast<uint8_t*>(row) + first * size;
  uint8_t* at = count == PANEL ? to : all;
  if (dtype == AS_BF16) Simd::store_bf16(reinterpret_cast<uint16_t*>(at), x);
  else Simd::store(reinterpret_cast<float*>(at), x);
  if (at == all) memcpy(to, all, count * size);
}

template <int KIND, int T>
void multiply_tile(const Product& job, int64_t panel, int64_t token) {
  const Linear& l = *job.layer;
  const int64_t width = l.gate ? l.num_out / 2 : l.num_out, first = panel * PANEL;
  const int64_t count = width - first < PANEL ? width - first : PANEL;
  F acc[2][T];
  for (int side = 0; side < (l.gate ? 2 : 1); ++side) {
    if constexpr (is_packed(KIND)) {
      constexpr Format f = FORMATS[KIND];
      const int64_t bytes = l.num_in / f.columns() * f.block_bytes(), at = l.gate ? 2 * panel + side : panel;
      const auto* x = static_cast<const Activations*>(job.prepared) + token * (l.num_in / GROUP);
      packed_panel<KIND, T>(static_cast<const uint8_t*>(l.weight) + at * bytes, l.num_in, x, l.num_in / GROUP, acc[side]);
    } else {
      const auto* x = static_cast<const float*>(job.prepared) + token * l.num_in;
      plain_panel<KIND, T>(l.weight, side * width + first, count, l.num_in, x, acc[side]);
    }
    if (!job.bias) continue;
    const F bias = load_some(l.dtype, job.bias, side * width + first, count);
    for (int t = 0; t < T; ++t) acc[side][t] = Simd::add(acc[side][t], bias);
  }
  for (int t = 0; t < T; ++t) {
    F out = acc[0][t];
    if (l.gate) {  // rounded where the product and the activation alone would be
      out = rounded(l.dtype, activate(l.gate, rounded(l.dtype, out)));
      out = Simd::mul(out, rounded(l.dtype, acc[1][t]));
    }
    const int64_t size = l.dtype == AS_BF16 ? 2 : 4;
    store_some(l.dtype, static_cast<uint8_t*>(job.y) + (token + t) * width * size, first, count, out);
  }
}

template <int KIND>
void multiply_kind(const Product& job, int64_t begin, int64_t end) {
  constexpr int WIDE = is_packed(KIND) ? Simd::TOKENS : 4;
  for (int64_t block = 0; block < job.num_tokens; block += TOKEN_BLOCK) {
    const int64_t stop = block + TOKEN_BLOCK < job.num_tokens ? block + TOKEN_BLOCK : job.num_tokens;
    for (int64_t panel = begin; panel < end; ++panel) {
      int64_t t = block;
      for (; t + WIDE <= stop; t += WIDE) multiply_tile<KIND, WIDE>(job, panel, t);
      if constexpr (WIDE > 4)
        for (; t + 4 <= stop; t += 4) multiply_tile<KIND, 4>(job, panel, t);
      for (; t + 2 <= stop; t += 2) multiply_tile<KIND, 2>(job, panel, t);
      for (; t < stop; ++t) multiply_tile<KIND, 1>(job, panel, t);
    }
  }
}

void multiply(const void* context, int64_t begin, int64_t end) {
  const Product& job = *static_cast<const Product*>(context);
  switch (job.layer->kind) {
    case BF16: return multiply_kind<BF16>(job, begin, end);
    case F32: return multiply_kind<F32>(job, begin, end);
    case Q4_0: return multiply_kind<Q4_0>(job, begin, end);
    case Q4_1: return multiply_kind<Q4_1>(job, begin, end);
    case Q5_0: return multiply_kind<Q5_0>(job, begin, end);
    case Q5_1: return multiply_kind<Q5_1>(job, begin, end);
    case Q8_0: return multiply_kind<Q8_0>(job, begin, end);
    case Q4_K: return multiply_kind<Q4_K>(job, begin, end);
    case Q5_K: return multiply_kind<Q5_K>(job, begin, end);
    case Q6_K: return multiply_kind<Q6_K>(job, begin, end);
  }
}

}  // namespace
