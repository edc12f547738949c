// Some tokens of one head's context, the working memory of an item, and its softmax, which goes on from tile to tile.
#pragma once
#include <algorithm>

#include "attention_numbers.h"
#include "scratch.h"

namespace {

using octavo::FETCHED;
using octavo::MOST_ROWS;
using octavo::STRETCH;

constexpr int64_t BLOCK = 32;             // rows whose scores are there at a time: they stay in the first-level cache
constexpr int64_t SCORES = STRETCH + 16;  // from row to row: a multiple of 4 KiB would crowd a few sets of the cache
constexpr float LOG2_E = 1.44269504f;

inline int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

template <class T>
struct Tile {
  const T* keys;
  const T* values;
  const int64_t* offsets;  // of each token, in elements; those of `ahead` tokens that come next follow
  int64_t count, ahead, dim;
  int64_t width;  // dim in multiples of 32: from row to row of queries and answers
};

// Of the tokens of a tile, those at hand: [from, to), multiples of 32; `count` of the tile are real.
struct Columns {
  int64_t from, to, count;
};

// Weights take the scores' place in float32, and half of it in bfloat16.
template <class M>
constexpr int64_t weights_stride() {
  return SCORES * int64_t(sizeof(float) / sizeof(typename M::Number));
}

template <class M>
struct Space {
  typename M::Number* queries;  // [rows][width], zeros past dim and in rows up to a multiple of 16
  float* scores;                // [BLOCK][SCORES]
  typename M::Number* weights;  // [BLOCK][weights_stride], in the scores' memory
  float* answers;               // [rows][width]
  float* largest;               // [rows], of the scores so far, times log2(e)
  float* total;                 // [rows], of the weights so far
  uint8_t *keys, *values;       // packed
  float key_scales[STRETCH], value_scales[STRETCH];
  int64_t offsets[STRETCH + FETCHED];

  Space(octavo::Scratch& scratch, int64_t width) {
    const int64_t numbers = width * int64_t(sizeof(typename M::Number));
    const int64_t sizes[] = {MOST_ROWS * numbers, BLOCK * SCORES * 4, MOST_ROWS * width * 4, MOST_ROWS * 8,
                             STRETCH * numbers, STRETCH * numbers};
    int64_t all = 0;
    for (int64_t size : sizes) all += size;
    uint8_t* p = static_cast<uint8_t*>(scratch.of(size_t(all)));
    queries = reinterpret_cast<typename M::Number*>(p), p += sizes[0];
    scores = reinterpret_cast<float*>(p), weights = reinterpret_cast<typename M::Number*>(p), p += sizes[1];
    answers = reinterpret_cast<float*>(p), p += sizes[2];
    largest = reinterpret_cast<float*>(p), total = largest + MOST_ROWS, p += sizes[3];
    keys = p, values = p + sizes[4];
  }
};

// What a row of a tile sees, and how a score becomes an exponent of two.
struct Softmax {
  int64_t first_position, group, window;  // of the first new token; rows of a token; 0: no window
  bool causal;
  float scale;    // of scores, log2(e) included; with a cap: before it, over the cap, times two
  float softcap;  // times log2(e); 0: none
  int64_t first_row;
  const float *key_scales, *value_scales;  // of a tile's tokens, zeros up to a multiple of 32; or null

  void range(int64_t row, int64_t begin, int64_t count, int64_t& low, int64_t& high) const {
    low = 0, high = count;
    if (!causal) return;
    const int64_t past = first_position + (first_row + row) / group + 1 - begin;
    if (past < high) high = past;
    if (window && past - window > low) low = past - window;
  }

  // cap tanh(x / cap) = cap (1 - 2 / (1 + e^(2 x / cap)))
  F capped(F x) const {
    const F e = power_of_2<true>(Simd::min(Simd::set1(126.0f), Simd::mul(x, Simd::set1(scale))));
    const F one = Simd::set1(1.0f), t = Simd::sub(one, Simd::div(Simd::set1(2.0f), Simd::add(one, e)));
    return Simd::mul(t, Simd::set1(softcap));
  }

  // Lanes [low, high) of x; -inf in the others.
  static F seen(F x, int64_t low, int64_t high) {
#if defined(__AVX512F__)
    const auto below = [](int64_t n) { return 0xffffu >> (16 - std::clamp<int64_t>(n, 0, 16)); };
    return {_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), __mmask16(below(high) & ~below(low)), x.a)};
#else
    float all[16];
    Simd::store(all, x);
    for (int64_t i = 0; i < 16; ++i)
      if (i < low || i >= high) all[i] = -INFINITY;
    return Simd::load(all);
#endif
  }

  // The largest exponent of a row, whose scores are there in full afterwards. What it does not see becomes -inf, up to whole pairs of registers.
  float look(float* row, int64_t low, int64_t high) const {
    F most = Simd::set1(-INFINITY);
    for (int64_t i = low / 32 * 32; i < up(high, 32); i += 16) {
      F x = Simd::load(row + i);
      const bool edge = i < low || i + 16 > high;
      if (key_scales) x = Simd::mul(x, Simd::load(key_scales + i));
      if (softcap != 0.0f) x = capped(x);
      if (edge) x = seen(x, low - i, high - i);
      if (edge || key_scales || softcap != 0.0f) Simd::store(row + i, x);
      most = Simd::max(most, x);
    }
    return Simd::largest(most) * (softcap != 0.0f ? 1.0f : scale);
  }

  // Scores to weights, zeros in what is not seen of [begin, end). Returns their sum; they are stored times the values'
  // scales.
  template <class M>
  float weigh(float* row, typename M::Number* weights, int64_t low, int64_t high, int64_t begin, int64_t end,
              float largest) const {
    const int64_t from = low / 32 * 32, to = up(high, 32);
    const F factor = Simd::set1(softcap != 0.0f ? 1.0f : scale), shift = Simd::set1(-largest), zero = Simd::set1(0.0f);
    F sum = zero, other = zero;
    for (int64_t i = begin; i < from; i += 32) M::store(weights + i, zero, zero);
    for (int64_t i = from; i < to; i += 32) {
      const F a = power_of_2<M::EXACT>(Simd::fma(Simd::load(row + i), factor, shift));
      const F b = power_of_2<M::EXACT>(Simd::fma(Simd::load(row + i + 16), factor, shift));
      sum = Simd::add(sum, a), other = Simd::add(other, b);
      if (!value_scales) M::store(weights + i, a, b);
      else M::store(weights + i, Simd::mul(a, Simd::load(value_scales + i)), Simd::mul(b, Simd::load(value_scales + i + 16)));
    }
    for (int64_t i = to; i < end; i += 32) M::store(weights + i, zero, zero);
    return Simd::sum(Simd::add(sum, other));
  }

  // Some rows of a tile, their scores in columns [from, to): scores become weights, and what earlier tiles gave shrinks
  // where a larger score has come.
  template <class M>
  void run(Space<M>& space, int64_t start, int64_t rows, int64_t begin, const Columns& columns, int64_t width) const {
    for (int64_t first = 0; first < rows; first += 16) {
      const int64_t last = first + 16 < rows ? first + 16 : rows;
      float *largest = space.largest + start + first, *total = space.total + start + first;
      float now[16] = {}, before[16] = {}, shrink[16];
      int64_t low[16], high[16];
      for (int64_t r = first; r < last; ++r) {
        const int64_t i = r - first;
        range(start + r, begin, columns.count, low[i], high[i]);
        before[i] = now[i] = largest[i];
        if (low[i] >= high[i]) continue;
        const float most = look(space.scores + r * SCORES, low[i], high[i]);
        if (!(most <= now[i])) now[i] = most;
      }
      Simd::store(shrink, power_of_2<true>(Simd::sub(Simd::load(before), Simd::load(now))));
      for (int64_t r = first; r < last; ++r) {
        const int64_t i = r - first;
        typename M::Number* weights = space.weights + r * weights_stride<M>();
        if (low[i] >= high[i]) {
          for (int64_t t = columns.from; t < columns.to; t += 32) M::store(weights + t, Simd::set1(0.0f), Simd::set1(0.0f));
          continue;
        }
        const float sum = weigh<M>(space.scores + r * SCORES, weights, low[i], high[i], columns.from, columns.to, now[i]);
        if (now[i] == before[i]) {
          total[i] += sum;
          continue;
        }
        total[i] = total[i] * shrink[i] + sum;
        largest[i] = now[i];
        const F factor = Simd::set1(shrink[i]);
        float* answer = space.answers + (start + r) * width;
        for (int64_t d = 0; d < width; d += 16) Simd::store(answer + d, Simd::mul(Simd::load(answer + d), factor));
      }
    }
  }
};

}  // namespace
