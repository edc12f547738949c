// Products with packed weights in the matrix units. T tokens, K in_features, N out_features, K a multiple of 32.
//
// Defined by the caller: MATRIX (see matrix.h). A sub-group has 16 rows of the weight, a lane each, and up to TOKENS
// tokens: what a lane decodes of its row is at once the B of the product, and serves all tokens.
//
//   int4, int8   codes as in linear.cpp, rounded to the activations' dtype when they are decoded
//   int8_int8    both sides int8: sums are exact; then a scale for each token and each row

#include "matrix.h"

constexpr int TOKENS = 32;
constexpr int TILES = TOKENS / 8;
constexpr int GROUP = 32;

#if NUMBER == FLOAT32
using Scale = float;
#else
using Scale = sycl::half;
#endif

// 8 tokens of 16 columns from `column` on, zero beyond the last token.
inline Shorts tile_of(const Number *x, int64 first, int64 num_tokens, int64 in_features, int64 column) {
  Shorts a;
  for (int t = 0; t < 8; ++t)
    a[t] = first + t < num_tokens ? bits_of(x[(first + t) * in_features + column]) : short(0);
  return a;
}

inline void store(const Floats *sums, const Number *bias, Number *y, int64 first, int64 num_tokens, int64 n,
                  int64 out_features) {
  if (n >= out_features) return;
  float added = bias ? wide(bias[n]) : 0.0f;
  for (int tile = 0; tile < TILES; ++tile)
    for (int t = 0; t < 8; ++t)
      if (first + 8 * tile + t < num_tokens)
        y[(first + 8 * tile + t) * out_features + n] = narrow<Number>(sums[tile][t] + added);
}

// Tokens of a work-group, and the row of a lane.
struct Place {
  int64 lane, first, n, row;
};

inline Place place_of(int64 out_features) {
  auto item = work_item::get_nd_item<3>();
  int64 lane = item.get_local_id(2), first = item.get_group(0) * TOKENS;
  int64 n = (item.get_group(1) * item.get_local_range(1) + item.get_local_id(1)) * LANES + lane;
  return {lane, first, n, sycl::min(n, out_features - 1)};  // lanes beyond the last row decode it too
}

KERNEL int4(const Number *x, const unsigned *codes, const Scale *scales, const Scale *offsets, const Number *bias,
            Number *y, int64 num_tokens, int64 in_features, int64 out_features) {
  Place at = place_of(out_features);
  int64 words = in_features / 8, groups = in_features / GROUP;
  Floats sums[TILES] = {};
  for (int64 k = 0; k < in_features; k += LANES) {
    float scale = wide(scales[at.row * groups + k / GROUP]), offset = wide(offsets[at.row * groups + k / GROUP]);
    Words b;
    for (int half = 0; half < 2; ++half) {
      unsigned word = codes[at.row * words + k / 8 + half];
      for (int i = 0; i < 4; ++i) {
        float low = static_cast<float>((word >> 8 * i) & 15), high = static_cast<float>((word >> (8 * i + 4)) & 15);
        b[4 * half + i] = pair_of(bits_of(narrow<Number>(low * scale + offset)),
                                  bits_of(narrow<Number>(high * scale + offset)));
      }
    }
    for (int tile = 0; tile < TILES; ++tile)
      sums[tile] = multiply_add<Number>(tile_of(x, at.first + 8 * tile, num_tokens, in_features, k + at.lane), b,
                                        sums[tile]);
  }
  store(sums, bias, y, at.first, num_tokens, at.n, out_features);
}

KERNEL int8(const Number *x, const unsigned *codes, const float *scales, const Number *bias, Number *y,
            int64 num_tokens, int64 in_features, int64 out_features, int64 group) {
  Place at = place_of(out_features);
  int64 words = in_features / 4, groups = in_features / group;
  Floats sums[TILES] = {};
  for (int64 k = 0; k < in_features; k += LANES) {
    float scale = scales[at.row * groups + k / group];
    Words b;
    for (int i = 0; i < 8; ++i) {
      unsigned word = codes[at.row * words + k / 4 + i / 2] >> 16 * (i % 2);
      float low = static_cast<signed char>(word & 255), high = static_cast<signed char>(word >> 8 & 255);
      b[i] = pair_of(bits_of(narrow<Number>(low * scale)), bits_of(narrow<Number>(high * scale)));
    }
    for (int tile = 0; tile < TILES; ++tile)
      sums[tile] = multiply_add<Number>(tile_of(x, at.first + 8 * tile, num_tokens, in_features, k + at.lane), b,
                                        sums[tile]);
  }
  store(sums, bias, y, at.first, num_tokens, at.n, out_features);
}

// x: int8 codes [T, K], two columns a short. token_scales [T], scales [N].
KERNEL int8_int8(const short *x, const float *token_scales, const unsigned *codes, const float *scales,
                 const Number *bias, Number *y, int64 num_tokens, int64 in_features, int64 out_features) {
  Place at = place_of(out_features);
  int64 words = in_features / 4, pairs = in_features / 2;
  Words sums[TILES] = {};
  for (int64 k = 0; k < in_features; k += 2 * LANES) {
    Words b;
    for (int i = 0; i < 8; ++i) b[i] = static_cast<int>(codes[at.row * words + k / 4 + i]);
    for (int tile = 0; tile < TILES; ++tile) {
      Shorts a;
      for (int t = 0; t < 8; ++t) {
        int64 token = at.first + 8 * tile + t;
        a[t] = token < num_tokens ? x[token * pairs + k / 2 + at.lane] : short(0);
      }
      sums[tile] = multiply_add_int8(a, b, sums[tile]);
    }
  }
  Floats scaled[TILES];
  for (int tile = 0; tile < TILES; ++tile)
    for (int t = 0; t < 8; ++t) {
      int64 token = at.first + 8 * tile + t;
      scaled[tile][t] = token < num_tokens ? sums[tile][t] * token_scales[token] * scales[at.row] : 0.0f;
    }
  store(scaled, bias, y, at.first, num_tokens, at.n, out_features);
}
