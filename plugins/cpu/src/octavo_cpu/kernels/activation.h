// The gates: silu, and gelu exact and by tanh, to a few units of float32's last place.
#pragma once
#include "api.h"

namespace {

using F = Simd::F;

// Cephes' expf: 2^n * p(r), |r| <= ln 2 / 2. Clamped where float32 ends; NaN stays NaN.
inline F exp(F x) {
  x = Simd::max(Simd::set1(-87.3f), Simd::min(Simd::set1(88.3f), x));
  const F n = Simd::round(Simd::mul(x, Simd::set1(1.44269504f)));
  F r = Simd::fma(n, Simd::set1(-0.693359375f), x);
  r = Simd::fma(n, Simd::set1(2.12194440e-4f), r);
  F p = Simd::set1(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = Simd::fma(p, r, Simd::set1(c));
  p = Simd::fma(Simd::mul(p, r), r, Simd::add(r, Simd::set1(1.0f)));
  return Simd::scaled(p, n);
}

inline F sigmoid(F x) {
  const F one = Simd::set1(1.0f);
  return Simd::reciprocal(Simd::add(one, exp(Simd::sub(Simd::set1(0.0f), x))));
}

// Abramowitz and Stegun 7.1.26: within 1.5e-7.
inline F erf(F x) {
  const F a = Simd::abs(x), one = Simd::set1(1.0f);
  const F t = Simd::div(one, Simd::fma(a, Simd::set1(0.3275911f), one));
  F p = Simd::set1(1.061405429f);
  for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = Simd::fma(p, t, Simd::set1(c));
  const F tail = Simd::mul(Simd::mul(p, t), exp(Simd::sub(Simd::set1(0.0f), Simd::mul(a, a))));
  return Simd::copysign(Simd::sub(one, tail), x);
}

inline F activate(int gate, F x) {
  switch (gate) {
    case octavo::SILU:
      return Simd::mul(x, sigmoid(x));
    case octavo::GELU: {
      const F half = Simd::mul(x, Simd::set1(0.5f));
      return Simd::fma(half, erf(Simd::mul(x, Simd::set1(0.70710678f))), half);
    }
    default: {  // gelu_tanh: 0.5 x (1 + tanh u) = x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
      const F cube = Simd::mul(Simd::mul(x, x), x);
      const F u = Simd::fma(cube, Simd::set1(0.044715f), x);
      return Simd::mul(x, sigmoid(Simd::mul(u, Simd::set1(1.59576912f))));
    }
  }
}

}  // namespace
