// Which tokens may be drawn: top-k, top-p and min-p. Nothing is sorted: the border between what stays and what goes is
// found by weighing, eleven bits of the logits at a time.
#pragma once
#include <cmath>
#include <limits>

#include "rows.h"

namespace octavo {

// Of this thread, until its next call.
void* filter_memory(size_t bytes);

}  // namespace octavo

namespace {

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// Unsigned numbers in the order of the floats; the two zeros are one.
inline uint32_t order_of(float x) {
  x += 0.0f;
  uint32_t u;
  memcpy(&u, &x, 4);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// Tokens stand in the order of falling logits, equal ones by rising id. One stays if those before it weigh less than
// `limit`; the others become minus infinity. weights: one each, or null for ones. ids: room for all.
inline void cut(float* logits, const float* weights, int64_t vocab, double limit, int32_t* ids) {
  constexpr int SHIFTS[] = {21, 10, 0};
  constexpr uint32_t MASKS[] = {2047, 2047, 1023};
  double before = 0.0;     // what the tokens above the border's bits weigh, as far as the bits are known
  int64_t count = vocab;   // tokens with these bits: all at first, then ids[0 .. count)
  for (int level = 0; level < 3; ++level) {
    double sums[2048] = {};
    for (int64_t i = 0; i < count; ++i) {
      const int64_t id = level ? ids[i] : i;
      sums[order_of(logits[id]) >> SHIFTS[level] & MASKS[level]] += weights ? weights[id] : 1.0f;
    }
    int64_t border = -1;
    double total = before;
    for (int64_t bits = MASKS[level]; bits >= 0 && (border < 0 || total < limit); --bits) {
      if (!(sums[bits] > 0.0)) continue;
      border = bits, before = total;
      total += sums[bits];
    }
    if (border < 0 || (level == 0 && total < limit)) return;  // all stay
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t id = level ? ids[i] : i;
      if ((order_of(logits[id]) >> SHIFTS[level] & MASKS[level]) == uint32_t(border)) ids[found++] = int32_t(id);
    }
    count = found;
  }
  const float border = logits[ids[0]];
  const double stay = std::ceil((limit - before) / (weights ? weights[ids[0]] : 1.0f));
  for (int64_t i = 0; i < vocab; ++i) logits[i] = logits[i] < border ? MINUS_INFINITY : logits[i];
  for (int64_t i = stay < 1.0 ? 1 : stay < double(count) ? int64_t(stay) : count; i < count; ++i)
    logits[ids[i]] = MINUS_INFINITY;
}

inline float largest_of(const float* row, int64_t count) {
  F m = Simd::set1(MINUS_INFINITY);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) m = Simd::max(Simd::load(row + i), m);
  float largest = Simd::largest(m);
  for (; i < count; ++i) largest = row[i] > largest ? row[i] : largest;
  return largest;
}

void keep_top(const void* context, int64_t begin, int64_t end) {
  const auto& a = *static_cast<const octavo::TopArgs*>(context);
  auto* ids = static_cast<int32_t*>(octavo::filter_memory(size_t(a.vocab) * 8));
  float* weights = reinterpret_cast<float*>(ids + a.vocab);
  for (int64_t r = begin; r < end; ++r) {
    float* row = a.logits + r * a.stride;
    if (a.top_k[r] > 0 && a.top_k[r] < a.vocab) cut(row, nullptr, a.vocab, double(a.top_k[r]), ids);
    if (!(a.top_p[r] < 1.0f)) continue;
    const F largest = Simd::set1(largest_of(row, a.vocab));
    double total = 0.0;
    for (int64_t i = 0; i < a.vocab; i += 16)
      put(weights + i, exp(Simd::sub(get(row + i, a.vocab - i), largest)), a.vocab - i);
    for (int64_t i = 0; i < a.vocab; ++i) {
      if (row[i] == MINUS_INFINITY) weights[i] = 0.0f;
      total += weights[i];
    }
    cut(row, weights, a.vocab, total * double(a.top_p[r]), ids);
  }
}

void keep_likely(const void* context, int64_t begin, int64_t end) {
  const auto& a = *static_cast<const octavo::MinPArgs*>(context);
  for (int64_t r = begin; r < end; ++r) {
    float* row = a.logits + r * a.stride;
    const float limit = largest_of(row, a.vocab) + std::log(a.threshold[r]);
    for (int64_t i = 0; i < a.vocab; ++i) row[i] = row[i] < limit ? MINUS_INFINITY : row[i];
  }
}

}  // namespace
