// Both ends of a model: rows of the vocabulary's table, and what a head's outputs become before sampling.
#pragma once
#include "rows.h"

namespace {

void embed_tokens(const void* context, int64_t begin, int64_t end) {
  const auto& a = *static_cast<const octavo::EmbeddingArgs*>(context);
  with_type(a.dtype, [&]([[maybe_unused]] auto* type) {
    using T = std::decay_t<decltype(*type)>;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t id = a.wide_ids ? static_cast<const int64_t*>(a.ids)[t] : static_cast<const int32_t*>(a.ids)[t];
      T* out = static_cast<T*>(a.out) + t * a.width;
      if (id < 0 || id >= a.num_rows) {  // no such row
        memset(out, 0, size_t(a.width) * sizeof(T));
        continue;
      }
      const T* row = static_cast<const T*>(a.table) + id * a.width;
      if (!a.scaled) {
        memcpy(out, row, size_t(a.width) * sizeof(T));
        continue;
      }
      const F scale = Simd::set1(a.scale);
      for (int64_t i = 0; i < a.width; i += 16) put(out + i, Simd::mul(get(row + i, a.width - i), scale), a.width - i);
    }
  });
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
