// Few rows: keys and values are read where they lie, once. Each chunk of a key or value serves all rows while it is in a
// register; the keys and values of the next tile are fetched meanwhile.
#pragma once
#include "attention_tile.h"

namespace {

// A thread waits for no more than some twenty lines on their way to its first-level cache: they are fetched to the second.
template <class T>
void fetch(const T* row, int64_t dim) {
  const char* p = reinterpret_cast<const char*>(row);
  for (int64_t i = 0; i < dim * int64_t(sizeof(T)) + SCALE_BYTES<T>; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// scores[r][t] = queries[r] . keys[t] for R rows. ahead: tokens whose keys to fetch.
template <class M, class T, int R>
void direct_scores(const Tile<T>& tile, const typename M::Number* queries, float* scores, int64_t ahead) {
  constexpr int TOKENS = SUMS / R;
  const int64_t whole = tile.dim / M::WIDTH * M::WIDTH;
  for (int64_t t = 0; t < tile.count; t += TOKENS) {
    F sum[SUMS];
    const T* key[TOKENS];
    UNROLLED for (int i = 0; i < SUMS; ++i) sum[i] = Simd::set1(0.0f);
    UNROLLED for (int i = 0; i < TOKENS; ++i) {
      key[i] = tile.keys + tile.offsets[t + i < tile.count ? t + i : tile.count - 1];
      if (t + i < ahead) fetch(tile.keys + tile.offsets[tile.count + t + i], tile.dim);
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

// Values as they are multiplied: two registers of 16 dimensions from d on, of one token, or of two side by side in each lane.
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
    return tile.dim - d >= 32 ? Brains::load(p) : tile.dim > d ? Brains::load_some(p, tile.dim - d) : Brains::zero();
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

// answers[r] += sum over t of weights[r][t] values[t], for R rows and 32 PAIRS dimensions from d on.
template <class M, class T, int R, int PAIRS>
void values_pass(const Tile<T>& tile, const typename M::Number* weights, float* answers, int64_t d, int64_t ahead) {
  F sum[R][2 * PAIRS];
  UNROLLED for (auto& s : sum)
    UNROLLED for (auto& x : s) x = Simd::set1(0.0f);
  for (int64_t t = 0; t < tile.count; t += M::PAIR) {
    typename M::Chunk v[2 * PAIRS];
    UNROLLED for (int i = 0; i < PAIRS; ++i) Values<M, T>::load(tile, t, d + 32 * i, v + 2 * i);
    UNROLLED for (int r = 0; r < R; ++r) {
      const auto weight = M::broadcast(weights + r * weights_stride<M>() + t);
      UNROLLED for (int i = 0; i < 2 * PAIRS; ++i) sum[r][i] = M::dot(sum[r][i], weight, v[i]);
    }
    for (int64_t i = t; i < t + M::PAIR && i < ahead; ++i) fetch(tile.values + tile.offsets[tile.count + i], tile.dim);
  }
  UNROLLED for (int r = 0; r < R; ++r)
    UNROLLED for (int i = 0; i < PAIRS; ++i) {
      float* answer = answers + r * tile.width + d + 32 * i;
      Values<M, T>::order(sum[r] + 2 * i);
      UNROLLED for (int j = 0; j < 2; ++j)
        Simd::store(answer + 16 * j, Simd::add(Simd::load(answer + 16 * j), sum[r][2 * i + j]));
    }
}

#if defined(__AVX512F__)
constexpr int MOST = 8;  // rows of a pass
#else
constexpr int MOST = 4;
#endif

// Of few rows, more dimensions at a time: their sums would wait for each other.
template <class M, class T, int R>
void direct_values(const Tile<T>& tile, const typename M::Number* weights, float* answers, int64_t ahead) {
  int64_t d = 0;
  if constexpr (R <= MOST / 2)
    for (; d + 64 <= tile.width; d += 64) values_pass<M, T, R, 2>(tile, weights, answers, d, d == 0 ? ahead : 0);
  for (; d < tile.width; d += 32) values_pass<M, T, R, 1>(tile, weights, answers, d, d == 0 ? ahead : 0);
}

template <class M, class T>
struct Direct {
  static constexpr int64_t TOKENS = 64;  // of a tile: keys and values stay in the first-level cache

  static void run(const Tile<T>& tile, Space<M>& space, const Softmax& softmax, int64_t rows, int64_t begin) {
    for_rows(rows, [&](auto count, int64_t r) {
      direct_scores<M, T, decltype(count)::value>(tile, space.queries + r * tile.width, space.scores + r * SCORES,
                                                  r == 0 ? tile.ahead : 0);
    });
    softmax.run(space, 0, rows, begin, {0, up(tile.count, 32), tile.count}, tile.width);
    for_rows(rows, [&](auto count, int64_t r) {
      direct_values<M, T, decltype(count)::value>(tile, space.weights + r * weights_stride<M>(),
                                                  space.answers + r * tile.width, r == 0 ? tile.ahead : 0);
    });
  }

 private:
  // Passes of about as many rows each.
  template <class Call>
  static void for_rows(int64_t rows, Call call) {
    for (int64_t passes = (rows + MOST - 1) / MOST, r = 0; passes > 0; --passes) {
      const int64_t count = (rows - r + passes - 1) / passes;
      one_pass<MOST>(count, r, call);
      r += count;
    }
  }

  template <int R, class Call>
  static void one_pass(int64_t count, int64_t r, Call call) {
    if (count == R) call(std::integral_constant<int, R>(), r);
    else if constexpr (R > 1) one_pass<R - 1>(count, r, call);
  }
};

}  // namespace
