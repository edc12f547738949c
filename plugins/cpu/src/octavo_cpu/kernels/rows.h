// Rows of numbers as torch holds them, sixteen at a time: bfloat16 (uint16_t) or float32.
#pragma once
#include <type_traits>

#include "activation.h"

namespace {

inline F get(const float* p) { return Simd::load(p); }
inline F get(const uint16_t* p) { return Simd::load_bf16(p); }
inline void put(float* p, F x) { Simd::store(p, x); }
inline void put(uint16_t* p, F x) { Simd::store_bf16(p, x); }

inline float one(const float* p) { return *p; }
inline float one(const uint16_t* p) {
  const uint32_t bits = uint32_t(*p) << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// The first `count` of sixteen; zeros behind them.
template <class T>
inline F get(const T* p, int64_t count) {
  if (count >= 16) return get(p);
  T some[16] = {};
  for (int64_t i = 0; i < count; ++i) some[i] = p[i];
  return get(some);
}

template <class T>
inline void put(T* p, F x, int64_t count) {
  if (count >= 16) return put(p, x);
  T some[16];
  put(some, x);
  for (int64_t i = 0; i < count; ++i) p[i] = some[i];
}

// x as a T holds it.
template <class T>
inline F as_stored(F x) {
  if constexpr (sizeof(T) == 4) return x;
  T some[16];
  put(some, x);
  return get(some);
}

// Calls work(T*()) with T the type of a `Dtype`.
template <class Work>
inline void with_type(int dtype, Work work) {
  if (dtype == octavo::AS_BF16) work(static_cast<uint16_t*>(nullptr));
  else work(static_cast<float*>(nullptr));
}

}  // namespace
