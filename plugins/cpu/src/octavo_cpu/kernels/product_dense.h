// A pair of panels of plain numbers times a few tokens: 2 x 16 outputs of each.
#pragma once
#include "isa.h"

namespace {

using namespace octavo;

// How one vector of a weight meets its activations. X: their type. COLUMNS: of a vector.
template <int KIND>
struct Element;

template <>
struct Element<F32> {
  using X = float;
  using Sum = F;
  using W = F;
  static constexpr int COLUMNS = 1;
  static W load(const uint8_t* p) { return Simd::load(reinterpret_cast<const float*>(p)); }
  static Sum dot(Sum sum, W w, const X* x) { return Simd::fma(w, Simd::set1(*x), sum); }
};

template <>
struct Element<F16> {
  using X = float;
  using Sum = F;
  struct W { F first, second; };
  static constexpr int COLUMNS = 2;
  static W load(const uint8_t* p) { return {Simd::load_half(p), Simd::load_half(p + 32)}; }
  static Sum dot(Sum sum, W w, const X* x) {
    return Simd::fma(w.second, Simd::set1(x[1]), Simd::fma(w.first, Simd::set1(x[0]), sum));
  }
};

template <>
struct Element<BF16> {
  using X = Simd::Paired;
  using Sum = F;
  using W = Simd::Pairs;
  static constexpr int COLUMNS = 2;
  static W load(const uint8_t* p) { return Simd::load_pairs(p); }
  static Sum dot(Sum sum, W w, const X* x) { return Simd::dot_pairs(sum, w, x); }
};

template <>
struct Element<I8> {
  using X = int8_t;
  using Sum = Simd::I;
  using W = Simd::B;
  static constexpr int COLUMNS = 4;
  static W load(const uint8_t* p) { return Simd::load_codes(p); }
  static Sum dot(Sum sum, W w, const X* x) {
    Simd::dot_signed(sum, w, x);
    return sum;
  }
};

template <>
struct Element<I8_AS_F32> {
  using X = float;
  using Sum = F;
  struct W { F column[4]; };
  static constexpr int COLUMNS = 4;
  static W load(const uint8_t* p) {
    const Simd::B codes = Simd::load_codes(p);
    return {{Simd::signed_column(codes, 0), Simd::signed_column(codes, 1), Simd::signed_column(codes, 2), Simd::signed_column(codes, 3)}};
  }
  static Sum dot(Sum sum, W w, const X* x) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) sum = Simd::fma(w.column[c], Simd::set1(x[c]), sum);
    return sum;
  }
};

// Only of lanes that multiply bfloat16, which holds every byte: names of `Lanes` are looked up where they are used.
template <>
struct Element<I8_AS_BF16> {
  using X = Simd::Paired;
  using Sum = F;
  struct W { Simd::Pairs first, second; };
  static constexpr int COLUMNS = 4;
  template <class Lanes = Simd>
  static W load(const uint8_t* p) {
    const Simd::B codes = Simd::load_codes(p);
    return {Lanes::signed_pairs(codes, 0), Lanes::signed_pairs(codes, 2)};
  }
  static Sum dot(Sum sum, W w, const X* x) { return Simd::dot_pairs(Simd::dot_pairs(sum, w.first, x), w.second, x + 2); }
};

inline F none(F) { return Simd::set1(0.0f); }
inline Simd::I none(Simd::I) { return Simd::set1(int32_t(0)); }

// How far ahead of its use a weight is asked for.
constexpr int64_t AHEAD = 4096;

// sums[side][t] = rows of that side times token t. w: the pair's tiles. x: token t's row at x + t * stride bytes.
// Tokens that are few have several sums each, as one addition after the other would wait for its result; and they take the
// weight in the order of memory, as then a CPU fetches it by itself. More share each of their numbers between both sides.
template <int KIND, int T>
inline void dense_pair(const uint8_t* w, int64_t tiles, const uint8_t* x, int64_t stride, typename Element<KIND>::Sum (&sums)[2][T]) {
  using E = Element<KIND>;
  using X = typename E::X;
  constexpr int CHAINS = T == 1 ? 4 : T == 2 ? 2 : 1, SIDES = T <= 4 ? 1 : 2;
  typename E::Sum sum[CHAINS][2][T];
#pragma GCC unroll 4
  for (int c = 0; c < CHAINS; ++c)
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) sum[c][0][t] = sum[c][1][t] = none(sum[c][0][t]);
  for (int64_t i = 0; i < tiles; ++i, x += 16 * E::COLUMNS * sizeof(X))
#pragma GCC unroll 2
    for (int first = 0; first < 2; first += SIDES, w += SIDES * TILE)
#pragma GCC unroll 4
      for (int v = 0; v < 16; ++v) {
        typename E::W of[SIDES];
#pragma GCC unroll 2
        for (int s = 0; s < SIDES; ++s) {
          of[s] = E::load(w + s * TILE + v * VECTOR);
          __builtin_prefetch(w + AHEAD + (v * SIDES + s) * VECTOR);  // also in the order of memory
        }
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
          const X* at = reinterpret_cast<const X*>(x + t * stride) + v * E::COLUMNS;
#pragma GCC unroll 2
          for (int s = 0; s < SIDES; ++s) {
            auto& to = sum[v % CHAINS][first + s][t];
            to = E::dot(to, of[s], at);
          }
        }
      }
#pragma GCC unroll 2
  for (int side = 0; side < 2; ++side)
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
      for (int c = 1; c < CHAINS; ++c) sum[0][side][t] = Simd::add(sum[0][side][t], sum[c][side][t]);
      sums[side][t] = sum[0][side][t];
    }
}

}  // namespace
