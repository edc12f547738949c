// Both ends of a model: rows of the vocabulary's table, and what a head's outputs become before sampling.
#pragma once
#include "attention_numbers.h"
#include "lookup.h"

namespace {

thread_local octavo::Scratch one_row;

inline int64_t some(int64_t left) { return left < 16 ? left : 16; }

void embed_token(const octavo::EmbeddingArgs& a, int64_t id, uint8_t* out) {
  const int64_t row = id - a.first, bytes = a.width * octavo::bytes_of(a.dtype);
  if (row < 0 || row >= a.num_rows) {  // no such row
    memset(out, 0, size_t(bytes));
    return;
  }
  if (a.packed) {
    float* values = static_cast<float*>(one_row.of(size_t(a.width + 32) * 4));
    read_row(*a.packed, row, values);
    for (int64_t i = 0; i < a.width; i += 16) store_numbers(a.dtype, out, i, some(a.width - i), Simd::load(values + i));
  } else {
    memcpy(out, static_cast<const uint8_t*>(a.table) + row * bytes, size_t(bytes));
  }
  if (!a.scaled) return;
  const F scale = Simd::set1(a.scale);
  for (int64_t i = 0; i < a.width; i += 16) {
    const int64_t count = some(a.width - i);
    store_numbers(a.dtype, out, i, count, Simd::mul(load_numbers(a.dtype, out, i, count), scale));
  }
}

void embed_tokens(const void* context, int64_t begin, int64_t end) {
  const auto& a = *static_cast<const octavo::EmbeddingArgs*>(context);
  uint8_t* out = static_cast<uint8_t*>(a.out) + begin * a.width * octavo::bytes_of(a.dtype);
  for (int64_t t = begin; t < end; ++t, out += a.width * octavo::bytes_of(a.dtype)) {
    const int64_t id = a.wide_ids ? static_cast<const int64_t*>(a.ids)[t] : static_cast<const int32_t*>(a.ids)[t];
    embed_token(a, id, out);
  }
}

// tanh x = 1 - 2 / (e^2x + 1)
inline F hyperbolic_tangent(F x) {
  const F one = Simd::set1(1.0f), e = exp(Simd::add(x, x));
  return Simd::sub(one, Simd::div(Simd::set1(2.0f), Simd::add(e, one)));
}

// Over pieces of 16.
void finish_logits(const void* context, int64_t begin, int64_t end) {
  const auto& a = *static_cast<const octavo::LogitsArgs*>(context);
  const F scale = Simd::set1(a.scale), cap = Simd::set1(a.softcap);
  with_type(a.dtype, [&]([[maybe_unused]] auto* type) {
    const auto* x = static_cast<decltype(type)>(const_cast<void*>(a.x));
    for (int64_t i = begin * 16; i < end * 16 && i < a.size; i += 16) {
      F v = get(x + i, a.size - i);
      if (a.scale != 1.0f) v = Simd::mul(v, scale);
      if (a.softcap != 0.0f) v = Simd::mul(hyperbolic_tangent(Simd::div(v, cap)), cap);
      put(a.out + i, v, a.size - i);
    }
  });
}

}  // namespace
