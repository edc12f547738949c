// Products of few tokens with packed weights. T tokens, K in_features, N out_features.
//
//   y[t, n] = sum over groups g of 32 columns:  scale[n, g] * sum(code * x) + offset[n, g] * sum(x)
//
// Reading the codes is the cost, so they are read once for up to TOKENS tokens: a sub-group has one row n, its lanes
// neighbouring words of codes, and each lane sums for all tokens. Codes are exact; sums are float32.
//
//   4 bits   word w of a row: columns 8 w .. 8 w + 7, the lowest first
//   8 bits   word w of a row: columns 4 w .. 4 w + 3, signed; a scale for every `group` columns, no offset

#include "numbers.h"

constexpr int TOKENS = 8;
constexpr int GROUP = 32;

// Of 4-bit codes: what 16-bit activations need, and what float32 deserves.
#if NUMBER == FLOAT32
using Scale = float;
#else
using Scale = sycl::half;
#endif

inline void store(const float *sums, const Number *bias, Number *y, int64 first, int64 num_tokens, int64 out_features,
                  int64 n) {
  auto sub_group = work_item::get_sub_group();
  for (int t = 0; t < TOKENS; ++t) {
    float sum = sycl::reduce_over_group(sub_group, sums[t], sycl::plus<float>());
    if (first + t < num_tokens && sub_group.leader())
      y[(first + t) * out_features + n] = narrow<Number>(bias ? sum + wide(bias[n]) : sum);
  }
}

KERNEL int4(const Number *x, const unsigned *codes, const Scale *scales, const Scale *offsets,
            const Number *bias, Number *y, int64 num_tokens, int64 in_features, int64 out_features) {
  auto item = work_item::get_nd_item<3>();
  int64 first = item.get_group(0) * TOKENS, n = item.get_group(1) * item.get_local_range(1) + item.get_local_id(1);
  if (n >= out_features) return;
  int64 words = in_features / 8, groups = in_features / GROUP;
  float sums[TOKENS] = {};
  for (int64 w = item.get_local_id(2); w < words; w += LANES) {
    unsigned word = codes[n * words + w];
    float scale = wide(scales[n * groups + w / 4]), offset = wide(offsets[n * groups + w / 4]);
    for (int t = 0; t < TOKENS; ++t) {
      if (first + t >= num_tokens) break;
      const Number *at = x + (first + t) * in_features + 8 * w;
      float product = 0, sum = 0;
      for (int i = 0; i < 8; ++i) {
        float value = wide(at[i]);
        product += static_cast<float>((word >> 4 * i) & 15) * value;
        sum += value;
      }
      sums[t] += scale * product + offset * sum;
    }
  }
  store(sums, bias, y, first, num_tokens, out_features, n);
}

KERNEL int8(const Number *x, const unsigned *codes, const float *scales, const Number *bias, Number *y,
            int64 num_tokens, int64 in_features, int64 out_features, int64 group) {
  auto item = work_item::get_nd_item<3>();
  int64 first = item.get_group(0) * TOKENS, n = item.get_group(1) * item.get_local_range(1) + item.get_local_id(1);
  if (n >= out_features) return;
  int64 words = in_features / 4, groups = in_features / group;
  float sums[TOKENS] = {};
  for (int64 w = item.get_local_id(2); w < words; w += LANES) {
    unsigned word = codes[n * words + w];
    float scale = scales[n * groups + 4 * w / group];
    for (int t = 0; t < TOKENS; ++t) {
      if (first + t >= num_tokens) break;
      const Number *at = x + (first + t) * in_features + 4 * w;
      float product = 0;
      for (int i = 0; i < 4; ++i)
        product += static_cast<float>(static_cast<signed char>((word >> 8 * i) & 255)) * wide(at[i]);
      sums[t] += scale * product;
    }
  }
  store(sums, bias, y, first, num_tokens, out_features, n);
}

// The plain weight [N, K], for products of many tokens. One item a word.
KERNEL unpack_int4(const unsigned *codes, const Scale *scales, const Scale *offsets, Number *weight,
                   int64 num_words, int64 words) {
  int64 w = work_item::get_nd_item<3>().get_global_id(2);
  if (w >= num_words) return;
  int64 group = w / words * (words / 4) + w % words / 4;
  unsigned word = codes[w];
  for (int i = 0; i < 8; ++i)
    weight[8 * w + i] =
        narrow<Number>(static_cast<float>((word >> 4 * i) & 15) * wide(scales[group]) + wide(offsets[group]));
}

KERNEL unpack_int8(const unsigned *codes, const float *scales, Number *weight, int64 num_words, int64 group) {
  int64 w = work_item::get_nd_item<3>().get_global_id(2);
  if (w >= num_words) return;
  unsigned word = codes[w];
  for (int i = 0; i < 4; ++i)
    weight[4 * w + i] =
        narrow<Number>(static_cast<float>(static_cast<signed char>((word >> 8 * i) & 255)) * scales[4 * w / group]);
}
