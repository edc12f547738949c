// A packed projection made ready for attention: queries and keys normed and rotated, keys and values into the cache.
#pragma once
#include <cmath>

#include "kv_cache.h"
#include "norm.h"

namespace {

constexpr int64_t MAX_HEAD = 1024;

// One head into a row of bytes. Lanes past `dim` are zeros.
inline void store_codes(int8_t* codes, const float* head, int64_t dim) {
  // A maximum may pass over what is no number: zero times it does not.
  F most = Simd::set1(0.0f), zeros = Simd::set1(0.0f);
  for (int64_t i = 0; i < dim; i += 16) {
    const F x = Simd::load(head + i);
    most = Simd::max(most, Simd::abs(x)), zeros = Simd::fma(x, Simd::set1(0.0f), zeros);
  }
  const float scale = octavo::scale_of(Simd::largest(most) + Simd::sum(zeros)), inverse = octavo::inverse_of(scale);
  int8_t all[MAX_HEAD + 16];
  if (inverse == 0) memset(all, 0, size_t(dim));
  for (int64_t i = 0; i < dim && inverse != 0; i += 16)
    Simd::store_s8(all + i, Simd::to_int(Simd::mul(Simd::load(head + i), Simd::set1(inverse))));
  memcpy(codes, all, size_t(dim));
  memcpy(codes + dim, &scale, sizeof(scale));
}

// A cache in float32, bfloat16, e4m3 or bytes.
inline void store_cached(int dtype, void* cache, const float* head, int64_t dim, float scale) {
  if (dtype == octavo::AS_E4M3) {
    for (int64_t i = 0; i < dim; ++i) static_cast<uint8_t*>(cache)[i] = octavo::to_e4m3(head[i] / scale);
    return;
  }
  if (dtype == octavo::AS_I8) return store_codes(static_cast<int8_t*>(cache), head, dim);
  with_type(dtype, [&]([[maybe_unused]] auto* type) {
    auto* to = static_cast<decltype(type)>(cache);
    for (int64_t i = 0; i < dim; i += 16) {
      const F x = Simd::load(head + i);
      put(to + i, scale == 1.0f ? x : Simd::div(x, Simd::set1(scale)), dim - i);
    }
  });
}

// head[i], head[i + half] turned by the angle of position and frequency i.
template <class T>
inline void rotate(float* head, const T* cos_sin, int64_t half) {
  int64_t i = 0;
  for (; i + 16 <= half; i += 16) {
    const F a = Simd::load(head + i), b = Simd::load(head + half + i), c = get(cos_sin + i), s = get(cos_sin + half + i);
    Simd::store(head + i, Simd::sub(Simd::mul(a, c), Simd::mul(b, s)));
    Simd::store(head + half + i, Simd::fma(a, s, Simd::mul(b, c)));
  }
  if (i == half) return;
  float c[16], s[16];
  Simd::store(c, get(cos_sin + i, half - i));
  Simd::store(s, get(cos_sin + half + i, half - i));
  for (int64_t j = 0; i < half; ++i, ++j) {
    const float a = head[i], b = head[half + i];
    head[i] = a * c[j] - b * s[j];
    head[half + i] = b * c[j] + a * s[j];
  }
}

template <class T>
inline float sum_of_squares(const T* x, int64_t width) {
  F squares = Simd::set1(0.0f);
  for (int64_t i = 0; i < width; i += 16) {
    const F v = get(x + i, width - i);
    squares = Simd::fma(v, v, squares);
  }
  return Simd::sum(squares);
}

template <class T, class W>
void qkv_token(const octavo::QkvArgs& a, int64_t token) {
  const int64_t dim = a.head_dim, heads = a.num_heads, kv_heads = a.num_kv_heads;
  T* row = static_cast<T*>(a.qkv) + token * (heads + 2 * kv_heads) * dim;
  const T* table = a.cos_sin ? static_cast<const T*>(a.cos_sin) + a.positions[token] * a.rotated : nullptr;
  alignas(64) float head[MAX_HEAD + 16];
  float scale = 1.0f;
  for (int64_t h = 0; h < heads + 2 * kv_heads; ++h) {
    const bool is_query = h < heads, is_value = h >= heads + kv_heads;
    if (is_value && !a.k_cache) return;
    const int64_t own = is_query ? h : (h - heads) % kv_heads, of = is_query ? heads : kv_heads;
    T* x = row + h * dim;
    const auto* weight = static_cast<const W*>(is_query ? a.q_weight : is_value ? nullptr : a.k_weight);
    if (weight) {
      if (a.norm == octavo::NORM_HEAD) scale = inverse_rms(sum_of_squares(x, dim), dim, a.eps);
      else weight += own * dim;
      // At the first head of a row that is normed whole: the heads behind it are not yet written over.
      if (a.norm == octavo::NORM_ROW && own == 0) scale = inverse_rms(sum_of_squares(x, of * dim), of * dim, a.eps);
      for (int64_t i = 0; i < dim; i += 16)
        Simd::store(head + i, as_stored<T>(weighted<T>(get(x + i, dim - i), Simd::set1(scale), weight + i, dim - i)));
    } else {
      for (int64_t i = 0; i < dim; i += 16) Simd::store(head + i, get(x + i, dim - i));
    }
    if (table && !is_value) {
      rotate(head, table, a.rotated / 2);
      for (int64_t i = 0; i < a.rotated; i += 16) Simd::store(head + i, as_stored<T>(Simd::load(head + i)));
    }
    if (is_query || !a.k_cache) {
      for (int64_t i = 0; i < dim; i += 16) put(x + i, Simd::load(head + i), dim - i);
      continue;
    }
    const octavo::KVStrides& strides = is_value ? a.v_strides : a.k_strides;
    const float* scales = is_value ? a.v_scales : a.k_scales;
    store_cached(strides.dtype, octavo::cache_row(is_value ? a.v_cache : a.k_cache, strides, a.slots[token], own), head, dim,
                 scales ? scales[own] : is_value ? a.v_scale : a.k_scale);
  }
}

void qkv_tokens(const void* context, int64_t begin, int64_t end) {
  const auto& a = *static_cast<const octavo::QkvArgs*>(context);
  with_type(a.dtype, [&]([[maybe_unused]] auto* t) {
    with_type(a.weight_dtype, [&]([[maybe_unused]] auto* w) {
      for (int64_t i = begin; i < end; ++i) qkv_token<std::decay_t<decltype(*t)>, std::decay_t<decltype(*w)>>(a, i);
    });
  });
}

}  // namespace
