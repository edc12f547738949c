// The choice of a token: the likeliest, or the largest of logit / temperature + Gumbel noise, as
// octavo.ops.sampling.sample defines both. A row is looked at in chunks, so that one row serves several threads, and a
// chunk in stretches: noise is worked out only where it could still win.
#pragma once
#include <cmath>
#include <limits>

#include "choice.h"
#include "rows.h"

namespace {

constexpr int64_t STRETCH_TOKENS = 256;
constexpr float LOWEST = std::numeric_limits<float>::lowest();
constexpr float MOST_NOISE = 16.7f;  // -log(-log u) for the largest u, 1 - 2^-24

inline uint32_t mix32(uint32_t x) {  // the finalizer of MurmurHash3
  x ^= x >> 16, x *= 0x85EBCA6Bu;
  x ^= x >> 13, x *= 0xC2B2AE35u;
  return x ^ x >> 16;
}

constexpr uint32_t GOLDEN = 0x9E3779B9u;

inline uint32_t row_key(int64_t seed, int64_t position) {
  const uint32_t key = mix32(mix32(uint32_t(seed)) ^ uint32_t(uint64_t(seed) >> 32));
  return mix32(key + uint32_t(position) * GOLDEN);
}

inline float uniform(uint32_t key, int64_t token) {
  return (float(mix32(key + uint32_t(token) * GOLDEN) >> 9) + 0.5f) * 0x1p-23f;
}

inline float gumbel(uint32_t key, int64_t token) { return -std::log(-std::log(uniform(key, token))); }

// Within 1e-6 of log x, x a normal number: Cephes' logf. Plain loops, which the compiler turns into vectors.
inline void logarithms(float (&x)[16]) {
  for (int i = 0; i < 16; ++i) {
    uint32_t u;
    memcpy(&u, &x[i], 4);
    const int32_t e = int32_t(u - 0x3f3504f3u) >> 23;  // x = 2^e m, sqrt(1/2) <= m < sqrt 2
    const uint32_t bits = u - (uint32_t(e) << 23);
    float m;
    memcpy(&m, &bits, 4);
    const float f = m - 1.0f, square = f * f;
    float p = 7.0376836292e-2f;
    p = p * f - 1.1514610310e-1f, p = p * f + 1.1676998740e-1f, p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f, p = p * f - 1.6668057665e-1f, p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f, p = p * f + 3.3333331174e-1f;
    x[i] = f - 0.5f * square + p * f * square + float(e) * 0.693147181f;
  }
}

// Noise of sixteen tokens, nearly.
inline void about_gumbel(uint32_t key, int64_t first, float (&noise)[16]) {
  for (int i = 0; i < 16; ++i) noise[i] = uniform(key, first + i);
  logarithms(noise);
  for (int i = 0; i < 16; ++i) noise[i] = -noise[i];
  logarithms(noise);
  for (int i = 0; i < 16; ++i) noise[i] = -noise[i];
}

template <class T>
octavo::Choice choose(const octavo::SampleArgs& a, int64_t row, int64_t begin, int64_t end) {
  const T* logits = static_cast<const T*>(a.logits) + row * a.stride;
  float highest[octavo::CHUNK_TOKENS / STRETCH_TOKENS];
  octavo::Choice best{-std::numeric_limits<float>::infinity(), 0, 0, true};
  F lost = Simd::set1(0.0f);  // becomes NaN with a NaN or plus infinity among the logits
  int64_t top_stretch = begin;
  for (int64_t s = begin, k = 0; s < end; s += STRETCH_TOKENS, ++k) {
    const int64_t stop = s + STRETCH_TOKENS < end ? s + STRETCH_TOKENS : end;
    F m = Simd::set1(-std::numeric_limits<float>::infinity());
    int64_t i = s;
    for (; i + 16 <= stop; i += 16) {
      const F x = get(logits + i);
      lost = Simd::fma(Simd::max(Simd::set1(LOWEST), x), Simd::set1(0.0f), lost);
      m = Simd::max(x, m);
    }
    highest[k] = Simd::largest(m);
    for (; i < stop; ++i) {
      const float x = one(logits + i);
      if (!(x < std::numeric_limits<float>::infinity())) best.sound = false;
      if (x > highest[k]) highest[k] = x;
    }
    if (highest[k] > best.score) best.score = highest[k], top_stretch = s;
  }
  if (!(Simd::sum(lost) == 0.0f)) best.sound = false;
  for (best.token = top_stretch; best.token + 1 < end && one(logits + best.token) != best.score;) ++best.token;
  const int64_t source = a.rows ? a.rows[row] : row;
  const float temperature = a.temperature ? a.temperature[source] : 0.0f;
  best.largest = best.score;
  if (temperature < 1e-5f || !best.sound) return best;

  const uint32_t key = row_key(a.seeds[source], a.positions[row]);
  best.score = best.score / temperature + gumbel(key, best.token);
  for (int64_t s = begin, k = 0; s < end; s += STRETCH_TOKENS, ++k) {
    if (highest[k] / temperature + MOST_NOISE < best.score) continue;
    const int64_t stop = s + STRETCH_TOKENS < end ? s + STRETCH_TOKENS : end;
    for (int64_t i = s; i < stop; i += 16) {
      float scaled[16], noise[16];
      Simd::store(scaled, Simd::div(get(logits + i, stop - i), Simd::set1(temperature)));
      if (Simd::largest(Simd::load(scaled)) + MOST_NOISE < best.score) continue;
      about_gumbel(key, i, noise);
      const F about = Simd::add(Simd::load(scaled), Simd::load(noise));
      if (Simd::largest(about) + 1e-4f < best.score) continue;
      for (int64_t j = 0; j < 16 && i + j < stop; ++j) {
        if (scaled[j] + noise[j] + 1e-4f < best.score) continue;
        const float score = scaled[j] + gumbel(key, i + j);
        if (score > best.score || (score == best.score && i + j < best.token)) best.score = score, best.token = i + j;
      }
    }
  }
  return best;
}

void choose_tokens(const void* context, int64_t begin, int64_t end) {
  const auto& job = *static_cast<const octavo::ChoiceJob*>(context);
  const octavo::SampleArgs& a = *job.args;
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t row = piece / job.chunks, from = piece % job.chunks * octavo::CHUNK_TOKENS;
    const int64_t to = from + octavo::CHUNK_TOKENS < a.vocab ? from + octavo::CHUNK_TOKENS : a.vocab;
    with_type(a.dtype, [&]([[maybe_unused]] auto* type) { job.choices[piece] = choose<std::decay_t<decltype(*type)>>(a, row, from, to); });
  }
}

}  // namespace
