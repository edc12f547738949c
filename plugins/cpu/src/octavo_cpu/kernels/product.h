// A whole product: pairs of panels over tokens. Included once for each instruction set.
#pragma once
#include <type_traits>

#include "finish.h"
#include "isa.h"
#include "prepare.h"
#include "product_blocks.h"
#include "product_dense.h"
#include "scratch.h"
#include "unpack.h"
#if defined(__AMX_BF16__)
#include "product_amx.h"
#endif

namespace {

#if defined(__AMX_BF16__)
constexpr bool HAS_AMX = true;
#else
constexpr bool HAS_AMX = false;
#endif

// From so many tokens on tiles are as fast as rows of vectors.
constexpr int64_t AMX_TOKENS = 2;

// From so many tokens on it pays to unpack blocks.
constexpr int64_t UNPACK_TOKENS = 12;

// Activations that stay in the second-level cache beside a part of the weight.
constexpr int64_t CACHED_BYTES = 1 << 20;

thread_local Scratch unpacked, sums;

inline bool unpacks(const Linear& layer, int64_t num_tokens) {
  return layer.exact || (HAS_AMX && layer.dtype == AS_BF16 && num_tokens >= UNPACK_TOKENS);
}

// What blocks, and bytes whose activations keep their bits, are unpacked to.
inline int unpacked_kind(const Linear& layer) { return Simd::DOTS_BF16 && layer.dtype == AS_BF16 ? BF16 : F32; }

int64_t most_tokens(const Linear& layer) {
  const int64_t fit = CACHED_BYTES / (layer.num_in * dtype_bytes(layer.dtype)) / 32 * 32;
  return fit < 64 ? 64 : fit > 256 ? 256 : fit;
}

void plan(Product& job) {
  const Linear& layer = *job.layer;
  int kind = layer.kind;
  if (is_blocks(kind)) {
    if (!unpacks(layer, job.num_tokens)) {
      job.form = GROUPS;
      job.stride = layer.num_in / GROUP * int64_t(sizeof(Activations));
      return;
    }
    kind = unpacked_kind(layer);
  }
  const int64_t columns = is_blocks(layer.kind) ? GROUP : tile_columns(kind), padded = ceil_div(layer.num_in, columns) * columns;
  if (kind == I8 && layer.exact) kind = unpacked_kind(layer);
  const int as = kind == BF16 && Simd::DOTS_BF16 ? AS_BF16 : AS_F32;
  if (kind == I8) job.form = BYTES, job.stride = padded;
  else if (as != layer.dtype) job.form = FLOATS, job.stride = padded * 4;
  else job.form = padded == layer.num_in ? AS_THEY_ARE : COPIED, job.stride = padded * dtype_bytes(as);
}

inline void put_sum(float* to, F sum) { Simd::store(to, sum); }
inline void put_sum(float* to, Simd::I sum) { Simd::store_int(to, sum); }

template <int KIND, int T>
inline void dense_tokens(const Product& job, int64_t pair, const uint8_t* head, int64_t tiles, int64_t t) {
  typename Element<KIND>::Sum out[2][T];
  dense_pair<KIND, T>(head + dense_head(KIND), tiles, job.rows + t * job.stride, job.stride, out);
  alignas(64) float sums[T][2 * PANEL];
  for (int i = 0; i < T; ++i)
    for (int side = 0; side < 2; ++side) {
      if constexpr (KIND == I8 && Simd::SIGNED_BIAS != 0)
        out[side][i] = Simd::add(out[side][i], Simd::set1(-Simd::SIGNED_BIAS * job.scales[t + i].sum));
      put_sum(sums[i] + side * PANEL, out[side][i]);
    }
  finish(job, pair, t, T, sums[0]);
}

#if defined(__AMX_BF16__)
inline float* amx_sums(int64_t tokens) { return static_cast<float*>(sums.of(size_t(ceil_div(tokens, 2 * PANEL) * 4 * TILE))); }
#endif

// head: the pair. next: the one that this thread takes after it, or null.
template <int KIND>
void dense(const Product& job, int64_t pair, const uint8_t* head, const uint8_t* next) {
  const int64_t tiles = ceil_div(job.layer->num_in, tile_columns(KIND)), tokens = job.num_tokens;
#if defined(__AMX_BF16__)
  if constexpr (KIND == BF16 || KIND == I8)
    if (tokens >= AMX_TOKENS)
      return amx_pair<KIND>(job, pair, DenseTiles{head + dense_head(KIND), next}, tiles, amx_sums(tokens));
#endif
  (void)next;
  constexpr int WIDE = Simd::TOKENS;
  int64_t t = 0;
  for (; t + WIDE <= tokens; t += WIDE) dense_tokens<KIND, WIDE>(job, pair, head, tiles, t);
  if constexpr (WIDE > 4)
    for (; t + 4 <= tokens; t += 4) dense_tokens<KIND, 4>(job, pair, head, tiles, t);
  for (; t + 2 <= tokens; t += 2) dense_tokens<KIND, 2>(job, pair, head, tiles, t);
  for (; t < tokens; ++t) dense_tokens<KIND, 1>(job, pair, head, tiles, t);
}

template <int KIND, int T>
inline void blocks_tokens(const Product& job, int64_t pair, const uint8_t* w, int64_t t) {
  const int64_t num_in = job.layer->num_in, groups = num_in / GROUP;
  const auto* x = reinterpret_cast<const Activations*>(job.rows) + t * groups;
  alignas(64) float sums[T][2 * PANEL];
  for (int side = 0; side < 2; ++side) {
    F out[T];
    blocks_panel<KIND, T>(w + side * pair_bytes(KIND, num_in) / 2, num_in, x, groups, out);
    for (int i = 0; i < T; ++i) Simd::store(sums[i] + side * PANEL, out[i]);
  }
  finish(job, pair, t, T, sums[0]);
}

template <int KIND>
void blocks(const Product& job, int64_t pair, const uint8_t* w) {
  const int64_t num_in = job.layer->num_in, tokens = job.num_tokens;
  if (job.form != GROUPS) {
    const int kind = unpacked_kind(*job.layer);
    const int64_t panel_bytes = pair_bytes(KIND, num_in) / 2;
#if defined(__AMX_BF16__)
    if (kind == BF16 && tokens >= AMX_TOKENS) {
      using Tiles = BlockTiles<KIND>;
      const Tiles source{w, panel_bytes, static_cast<uint8_t*>(unpacked.of(2 * Tiles::PART * TILE))};
      return amx_pair<BF16>(job, pair, source, num_in / tile_columns(BF16), amx_sums(tokens));
    }
#endif
    uint8_t* tiles = static_cast<uint8_t*>(unpacked.of(size_t(pair_bytes(kind, num_in))));
    if (kind == F32) {
      unpack_panel<KIND, F32>(w, num_in, tiles);
      unpack_panel<KIND, F32>(w + panel_bytes, num_in, tiles + TILE);
      return dense<F32>(job, pair, tiles, nullptr);
    }
    constexpr int TARGET = Simd::DOTS_BF16 ? BF16 : F32;
    unpack_panel<KIND, TARGET>(w, num_in, tiles);
    unpack_panel<KIND, TARGET>(w + panel_bytes, num_in, tiles + TILE);
    return dense<TARGET>(job, pair, tiles, nullptr);
  }
  constexpr int WIDE = Simd::TOKENS;
  int64_t t = 0;
  for (; t + WIDE <= tokens; t += WIDE) blocks_tokens<KIND, WIDE>(job, pair, w, t);
  if constexpr (WIDE > 4)
    for (; t + 4 <= tokens; t += 4) blocks_tokens<KIND, 4>(job, pair, w, t);
  for (; t + 2 <= tokens; t += 2) blocks_tokens<KIND, 2>(job, pair, w, t);
  for (; t < tokens; ++t) blocks_tokens<KIND, 1>(job, pair, w, t);
}

void exact_bytes(const Product& job, int64_t pair, const uint8_t* w) {
  if (unpacked_kind(*job.layer) == F32) return dense<I8_AS_F32>(job, pair, w, nullptr);
#if defined(__AMX_BF16__)
  if (job.num_tokens >= UNPACK_TOKENS) {
    const ByteTiles source{w + dense_head(I8), static_cast<uint8_t*>(unpacked.of(2 * ByteTiles::PART * TILE))};
    return amx_pair<BF16>(job, pair, source, ceil_div(job.layer->num_in, tile_columns(BF16)), amx_sums(job.num_tokens));
  }
#endif
  dense<Simd::DOTS_BF16 ? I8_AS_BF16 : I8_AS_F32>(job, pair, w, nullptr);
}

template <int KIND>
void multiply_kind(const Product& job, int64_t begin, int64_t end) {
  const int64_t bytes = pair_bytes(KIND, job.layer->num_in);
#if defined(__AMX_BF16__)
  const bool in_tiles = job.num_tokens >= AMX_TOKENS && (KIND == BF16 || KIND == I8 || (is_blocks(KIND) && job.form != GROUPS));
  const AmxTiles tiles(!in_tiles ? 0 : int(job.num_tokens < PANEL ? job.num_tokens : PANEL));
#endif
  const uint8_t* w = static_cast<const uint8_t*>(job.layer->weight) + begin * bytes;
  for (int64_t pair = begin; pair < end; ++pair, w += bytes) {
    if constexpr (is_blocks(KIND)) blocks<KIND>(job, pair, w);
    else if (KIND == I8 && job.form != BYTES) exact_bytes(job, pair, w);
    else dense<KIND>(job, pair, w, pair + 1 < end ? w + bytes : nullptr);
  }
}

void multiply(const void* context, int64_t begin, int64_t end) {
  const Product& job = *static_cast<const Product*>(context);
  switch (job.layer->kind) {
    case BF16: return multiply_kind<BF16>(job, begin, end);
    case F32: return multiply_kind<F32>(job, begin, end);
    case F16: return multiply_kind<F16>(job, begin, end);
    case I8: return multiply_kind<I8>(job, begin, end);
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
