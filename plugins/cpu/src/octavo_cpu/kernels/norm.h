// Root-mean-square norms, with the residual's addition before them where there is one; and the addition alone.
#pragma once
#include <cmath>

#include "rows.h"

namespace {

// y[i] = x[i] * scale * weight[i]. A weight of x's own type multiplies what x's type holds of the normed value (Llama's
// order); a float32 weight is part of the one product that is rounded (Gemma's).
template <class T, class W>
inline F weighted(F x, F scale, const W* weight, int64_t count) {
  F y = Simd::mul(x, scale);
  if constexpr (sizeof(T) == sizeof(W)) y = as_stored<T>(y);
  return Simd::mul(y, get(weight, count));
}

inline float inverse_rms(float squares, int64_t width, float eps) { return 1.0f / std::sqrt(squares / float(width) + eps); }

template <class T, class W>
void norm_row(const octavo::NormArgs& a, int64_t r) {
  const int64_t width = a.width;
  const T* x = static_cast<const T*>(a.x) + r / a.group * a.outer_stride + r % a.group * a.inner_stride;
  T* out = static_cast<T*>(a.out) + r * width;
  F squares = Simd::set1(0.0f);
  if (a.residual) {
    T* total = static_cast<T*>(a.residual) + r * width;
    for (int64_t i = 0; i < width; i += 16) {
      const F sum = as_stored<T>(Simd::add(get(x + i, width - i), get(total + i, width - i)));
      put(total + i, sum, width - i);
      squares = Simd::fma(sum, sum, squares);
    }
    x = total;
  } else {
    for (int64_t i = 0; i < width; i += 16) {
      const F v = get(x + i, width - i);
      squares = Simd::fma(v, v, squares);
    }
  }
  const F scale = Simd::set1(inverse_rms(Simd::sum(squares), width, a.eps));
  const W* weight = static_cast<const W*>(a.weight);
  for (int64_t i = 0; i < width; i += 16)
    put(out + i, weighted<T>(get(x + i, width - i), scale, weight + i, width - i), width - i);
}

void norm_rows(const void* context, int64_t begin, int64_t end) {
  const auto& a = *static_cast<const octavo::NormArgs*>(context);
  with_type(a.dtype, [&]([[maybe_unused]] auto* t) {
    with_type(a.weight_dtype, [&]([[maybe_unused]] auto* w) {
      for (int64_t r = begin; r < end; ++r) norm_row<std::decay_t<decltype(*t)>, std::decay_t<decltype(*w)>>(a, r);
    });
  });
}

// Over pieces of 16.
void add_numbers(const void* context, int64_t begin, int64_t end) {
  const auto& a = *static_cast<const octavo::AddArgs*>(context);
  const F scale = Simd::set1(a.scale);
  with_type(a.dtype, [&]([[maybe_unused]] auto* type) {
    const auto* x = static_cast<decltype(type)>(const_cast<void*>(a.x));
    auto* total = static_cast<decltype(type)>(a.residual);
    for (int64_t i = begin * 16; i < end * 16 && i < a.size; i += 16)
      put(total + i, Simd::fma(get(x + i, a.size - i), scale, get(total + i, a.size - i)), a.size - i);
  });
}

}  // namespace
