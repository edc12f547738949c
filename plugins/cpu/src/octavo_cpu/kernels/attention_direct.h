// Few rows: keys and values are read where they lie, once. Each chunk of a key serves all rows while it is in a register
// or the first-level cache; the values of the same tokens, and then the next tokens' keys, are fetched meanwhile.
#pragma once
#include "attention_tile.h"

namespace {

template <class T>
void fetch(const T* row, int64_t dim) {
  const char* p = reinterpret_cast<const char*>(row);
  for (int64_t i = 0; i < dim * int64_t(sizeof(T)); i += 64) __builtin_prefetch(p + i);
}

// scores[r][t] = queries[r] . keys[t] for R rows.
template <class M, class T, int R>
void direct_scores(const Tile<T>& tile, const typename M::Number* queries, float* scores, bool first) {
  constexpr int TOKENS = SUMS / R;
  const int64_t whole = tile.dim / M::WIDTH * M::WIDTH;
  for (int64_t t = 0; t < tile.count; t += TOKENS) {
    F sum[SUMS];
    const T* key[TOKENS];
    UNROLLED for (int i = 0; i < SUMS; ++i) sum[i] = Simd::set1(0.0f);
    UNROLLED for (int i = 0; i < TOKENS; ++i) {
      const int64_t offset = tile.offsets[t + i < tile.count ? t + i : tile.count - 1];
      key[i] = tile.keys + offset;
      if (first) fetch(tile.values + offset, tile.dim);
    }
    for (int64_t d = 0; d < tile.dim; d += M::WIDTH) {
      typename M::Chunk query[R];
      UNROLLED for (int r = 0; r < R; ++r) query[r] = M::load(queries + r * tile.width + d);
      UNROLLED for (int i = 0; i < TOKENS; ++i) {
        const auto chunk = d < whole ? M::load(key[i] + d) : M::load_some(key[i] + d, tile.dim - whole);
        UNROLLED for (int r = 0; r < R; ++r) sum[r * TOKENS + i] = M::dot(sum[r * TOKENS + i], query[r], chunk);
      }
    }
    float out[SUMS];
    lane_sums(sum, out);
    UNROLLED for (int r = 0; r < R; ++r) memcpy(scores + r * SCORES + t, out + r * TOKENS, sizeof(float) * TOKENS);
  }
}

// Dimensions of a pass over the values: two registers of sums a row.
constexpr int DIMS = 32;

// Two chunks of 16 dimensions: a token's, or of two tokens side by side in each lane.
template <class M, class T>
struct Values;

template <class T>
struct Values<Exact, T> {
  static void load(const Tile<T>& tile, int64_t t, int64_t d, F* v) {
    const T* row = tile.values + tile.offsets[t] + d;
    const int64_t left = tile.dim - d;
    UNROLLED for (int i = 0; i < 2; ++i)
      v[i] = left >= 16 * (i + 1) ? widen(row + 16 * i) : left > 16 * i ? widen_some(row + 16 * i, left - 16 * i) : Exact::zero();
  }
  static void order(F*) {}
};

#if defined(__AVX512BF16__)
template <class T>
struct Values<Brains, T> {
  using Chunk = Brains::Chunk;
  static Chunk row(const Tile<T>& tile, int64_t t, int64_t d) {
    if (t >= tile.count) return Brains::zero();
    const T* p = tile.values + tile.offsets[t] + d;
    return tile.dim - d >= 32 ? Brains::load(p) : Brains::load_some(p, tile.dim - d);
  }
  // Interleaved within 16 bytes, so that the sums come out as dimensions 0-3, 8-11, ... and 4-7, 12-15, ...
  static void load(const Tile<T>& tile, int64_t t, int64_t d, Chunk* v) {
    const Chunk a = row(tile, t, d), b = row(tile, t + 1, d);
    v[0].a = _mm512_unpacklo_epi16(a.a, b.a), v[1].a = _mm512_unpackhi_epi16(a.a, b.a);
  }
  static void order(F* sum) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const __m512 a = sum[0].a, b = sum[1].a;
    sum[0].a = _mm512_permutex2var_ps(a, low, b), sum[1].a = _mm512_permutex2var_ps(a, high, b);
  }
};
#endif

// answers[r] += sum over t of weights[r][t] values[t], for R rows. next: tokens whose keys are wanted soon.
template <class M, class T, int R>
void direct_values(const Tile<T>& tile, const typename M::Number* weights, float* answers, int64_t next) {
  for (int64_t d = 0; d < tile.dim; d += DIMS) {
    F sum[R][2];
    UNROLLED for (auto& s : sum) s[0] = s[1] = Simd::set1(0.0f);
    for (int64_t t = 0; t < tile.count; t += M::PAIR) {
      typename M::Chunk v[2];
      Values<M, T>::load(tile, t, d, v);
      UNROLLED for (int r = 0; r < R; ++r) {
        const auto weight = M::broadcast(weights + r * weights_stride<M>() + t);
        sum[r][0] = M::dot(sum[r][0], weight, v[0]);
        sum[r][1] = M::dot(sum[r][1], weight, v[1]);
      }
      if (d == 0)
        for (int64_t i = t; i < t + M::PAIR && i < next; ++i) fetch(tile.keys + tile.offsets[tile.count + i], tile.dim);
    }
    UNROLLED for (int r = 0; r < R; ++r) {
      float* answer = answers + r * tile.width + d;
      Values<M, T>::order(sum[r]);
      UNROLLED for (int i = 0; i < 2; ++i) Simd::store(answer + 16 * i, Simd::add(Simd::load(answer + 16 * i), sum[r][i]));
    }
  }
}

template <class M, class T>
struct Direct {
  static constexpr int64_t TOKENS = 64;  // of a tile: keys and values stay in the first-level cache

  static void scores(const Tile<T>& tile, Space<M>& space, int64_t rows) {
    for_rows(rows, [&](auto count, int64_t r) {
      direct_scores<M, T, decltype(count)::value>(tile, space.queries + r * tile.width, space.scores + r * SCORES, r == 0);
    });
  }
  static void values(const Tile<T>& tile, Space<M>& space, int64_t rows, int64_t next) {
    for_rows(rows, [&](auto count, int64_t r) {
      direct_values<M, T, decltype(count)::value>(tile, space.weights + r * weights_stride<M>(),
                                                  space.answers + r * tile.width, r == 0 ? next : 0);
    });
  }

 private:
  template <class Call>
  static void for_rows(int64_t rows, Call call) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) call(std::integral_constant<int, 4>(), r);
    for (; r + 2 <= rows; r += 2) call(std::integral_constant<int, 2>(), r);
    for (; r < rows; ++r) call(std::integral_constant<int, 1>(), r);
  }
};

}  // namespace
