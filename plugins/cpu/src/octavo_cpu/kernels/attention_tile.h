// Some tokens of one head's context, the working memory of an item, and its softmax, which goes on from tile to tile.
#pragma once
#include "attention_numbers.h"
#include "scratch.h"

namespace {

using octavo::MOST_ROWS;
using octavo::STRETCH;

constexpr int64_t SCORES = STRETCH + 16;  // from row to row: a multiple of 4 KiB would crowd a few sets of the cache
constexpr float LOG2_E = 1.44269504f;

template <class T>
struct Tile {
  const T* keys;
  const T* values;
  const int64_t* offsets;  // of each token, in elements; those of the next tile follow
  int64_t count, dim;
  int64_t width;  // dim in multiples of 32: from row to row of queries and answers
};

// Weights take the scores' place in float32, and half of it in bfloat16.
template <class M>
constexpr int64_t weights_stride() {
  return SCORES * int64_t(sizeof(float) / sizeof(typename M::Number));
}

template <class M>
struct Space {
  typename M::Number* queries;  // [rows][width], zeros past dim and in rows up to a multiple of 16
  float* scores;                // [rows][SCORES]
  typename M::Number* weights;  // [rows][weights_stride], in the scores' memory
  float* answers;               // [rows][width]
  float* largest;               // [rows], of the scores so far, times log2(e)
  float* total;                 // [rows], of the weights so far
  uint8_t* panels;              // of packed keys, then of packed values
  int64_t offsets[STRETCH];

  Space(octavo::Scratch& scratch, int64_t width) {
    const int64_t numbers = width * int64_t(sizeof(typename M::Number));
    const int64_t sizes[] = {MOST_ROWS * numbers, MOST_ROWS * SCORES * 4, MOST_ROWS * width * 4, MOST_ROWS * 8,
                             STRETCH * numbers};
    int64_t all = 0;
    for (int64_t size : sizes) all += size;
    uint8_t* p = static_cast<uint8_t*>(scratch.of(size_t(all)));
    queries = reinterpret_cast<typename M::Number*>(p), p += sizes[0];
    scores = reinterpret_cast<float*>(p), weights = reinterpret_cast<typename M::Number*>(p), p += sizes[1];
    answers = reinterpret_cast<float*>(p), p += sizes[2];
    largest = reinterpret_cast<float*>(p), total = largest + MOST_ROWS, p += sizes[3];
    panels = p;
  }
};

// What a row of a tile sees, and how a score becomes an exponent of two.
struct Softmax {
  int64_t first_position, group, window;  // of the first new token; rows of a token; 0: no window
  bool causal;
  float scale;    // of scores, log2(e) included; with a cap: before it, over the cap, times two
  float softcap;  // times log2(e); 0: none
  int64_t first_row;

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

  // The largest exponent of a row. What it does not see becomes -inf, up to whole registers.
  float look(float* row, int64_t low, int64_t high) const {
    const int64_t from = low / 16 * 16, to = (high + 15) / 16 * 16;
    if (softcap != 0.0f)
      for (int64_t i = from; i < to; i += 16) Simd::store(row + i, capped(Simd::load(row + i)));
    for (int64_t i = from; i < low; ++i) row[i] = -INFINITY;
    for (int64_t i = high; i < to; ++i) row[i] = -INFINITY;
    F most = Simd::set1(-INFINITY);
    for (int64_t i = from; i < to; i += 16) most = Simd::max(most, Simd::load(row + i));
    return Simd::largest(most) * (softcap != 0.0f ? 1.0f : scale);
  }

  // Scores to weights, zeros from what is not seen up to `padded`. Returns their sum.
  template <class M>
  float weigh(float* row, typename M::Number* weights, int64_t low, int64_t high, int64_t padded, float largest) const {
    const int64_t from = low / 16 * 16, to = (high + 15) / 16 * 16;
    const F factor = Simd::set1(softcap != 0.0f ? 1.0f : scale), shift = Simd::set1(-largest), zero = Simd::set1(0.0f);
    F sum = zero;
    for (int64_t i = 0; i < from; i += 16) M::store(weights + i, zero);
    for (int64_t i = from; i < to; i += 16) {
      const F weight = power_of_2<M::EXACT>(Simd::fma(Simd::load(row + i), factor, shift));
      sum = Simd::add(sum, weight);
      M::store(weights + i, weight);
    }
    for (int64_t i = to; i < padded; i += 16) M::store(weights + i, zero);
    return Simd::sum(sum);
  }

  // One tile: scores become weights, and what earlier tiles gave shrinks where a larger score has come.
  template <class M>
  void run(Space<M>& space, int64_t rows, int64_t begin, int64_t count, int64_t width) const {
    const int64_t padded = (count + 31) / 32 * 32;
    for (int64_t first = 0; first < rows; first += 16) {
      const int64_t last = first + 16 < rows ? first + 16 : rows;
      float now[16] = {}, before[16] = {}, shrink[16];
      int64_t low[16], high[16];
      for (int64_t r = first; r < last; ++r) {
        const int64_t i = r - first;
        range(r, begin, count, low[i], high[i]);
        before[i] = now[i] = space.largest[r];
        if (low[i] >= high[i]) continue;
        const float most = look(space.scores + r * SCORES, low[i], high[i]);
        if (!(most <= now[i])) now[i] = most;
      }
      Simd::store(shrink, power_of_2<true>(Simd::sub(Simd::load(before), Simd::load(now))));
      for (int64_t r = first; r < last; ++r) {
        const int64_t i = r - first;
        typename M::Number* weights = space.weights + r * weights_stride<M>();
        if (low[i] >= high[i]) {
          for (int64_t t = 0; t < padded; t += 16) M::store(weights + t, Simd::set1(0.0f));
          continue;
        }
        const float sum = weigh<M>(space.scores + r * SCORES, weights, low[i], high[i], padded, now[i]);
        if (now[i] == before[i]) {
          space.total[r] += sum;
          continue;
        }
        space.total[r] = space.total[r] * shrink[i] + sum;
        space.largest[r] = now[i];
        const F factor = Simd::set1(shrink[i]);
        float* answer = space.answers + r * width;
        for (int64_t d = 0; d < width; d += 16) Simd::store(answer + d, Simd::mul(Simd::load(answer + d), factor));
      }
    }
  }
};

}  // namespace
