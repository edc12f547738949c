// Paged attention of prompts in the matrix units. As attention.cpp, whose words it uses; bfloat16 and float16.
//
// Defined by the caller: HEAD_SIZE, a multiple of 16, GROUP = H / Hkv, TOKENS of a tile, SUB_GROUPS of a work-group,
// MATRIX (see matrix.h).
//
//   work-group = (tile of TOKENS queries of one sequence, KV head); its rows are TOKENS x GROUP pairs of (token, head)
//   sub-group  = 8 of the rows: a step's scores are C[8, KEYS], lane j has those of key j (and j + 16)
//
//   scores = Q K^T    A: Q, in local memory          B: 16 keys, a lane has one of them
//   out   += P V      A: the weights where they are  B: 16 values, a lane has one column of them
//
// Softmax is online (Milakov and Gimelshein 2018), in float32; weights are rounded to the cache's dtype.

#include "matrix.h"
#include "tiles.h"

constexpr int ROWS = TOKENS * GROUP;
constexpr int BLOCKS = HEAD_SIZE / LANES;
constexpr int HALVES = HEAD_SIZE > 64 ? 1 : 2;  // wide sums leave few registers
constexpr int KEYS = HALVES * LANES;
constexpr int PADDED = HEAD_SIZE + 2;  // lanes read one word of KEYS keys: other banks each
constexpr float LEAST = -3.0e38f;      // instead of -infinity, whose differences are NaN

KERNEL attention(const Number *q, const Number *k_cache, const Number *v_cache, Number *out, const int *block_table,
                 const int *q_starts, const int *kv_lens, const float *sinks, const float *k_scales,
                 const float *v_scales, int64 num_seqs, int64 num_heads, int64 q_token, int64 q_head,
                 int64 table_width, int64 block_size, int64 k_block, int64 k_head, int64 k_offset, int64 v_block,
                 int64 v_head, int64 v_offset, int64 window, float scale, float softcap, float k_scale,
                 float v_scale) {
  auto item = work_item::get_nd_item<3>();
  auto group = item.get_group();
  auto sub_group = item.get_sub_group();
  syclexp::work_group_static<short[8 * SUB_GROUPS * HEAD_SIZE]> queries;
  syclexp::work_group_static<short[KEYS * PADDED]> keys;
  syclexp::work_group_static<short[KEYS * PADDED]> values;

  int64 tile = item.get_group(0), kv_head = item.get_group(1);
  int64 sequence = sequence_of(q_starts, num_seqs, tile);
  int64 end = q_starts[sequence + 1], kv_len = kv_lens[sequence];
  int64 first_token = q_starts[sequence] + (tile - q_starts[sequence] / TOKENS - sequence) * TOKENS;
  int lane = sub_group.get_local_linear_id(), first_row = 8 * sub_group.get_group_linear_id();
  int64 here = item.get_local_linear_id(), everyone = SUB_GROUPS * LANES;
  float by_k = scale * (k_scales ? k_scales[kv_head] : k_scale), by_v = v_scales ? v_scales[kv_head] : v_scale;
  if (first_token >= end || kv_len == 0) return;  // the whole work-group

  Floats sums[BLOCKS];
  float most[8], total[8];
  for (int r = 0; r < 8; ++r) {
    int row = first_row + r;
    int64 token = first_token + row / GROUP, head = kv_head * GROUP + row % GROUP;
    for (int b = 0; b < BLOCKS; ++b) {
      bool real = row < ROWS && token < end;
      queries[(first_row + r) * HEAD_SIZE + b * LANES + lane] = real ? bits_of(q[token * q_token + head * q_head + b * LANES + lane]) : short(0);
      sums[b][r] = 0;
    }
    most[r] = LEAST;
    total[r] = 0;
  }

  int64 to_end = kv_len - end;  // token + to_end is its position
  int64 last_token = sycl::min(first_token + TOKENS, end) - 1;
  int64 from = window > 0 ? sycl::max<int64>(0, first_token + to_end - window + 1) : 0, to = last_token + to_end + 1;
  for (int64 start = from; start < to; start += KEYS) {
    sycl::group_barrier(group);  // all have read the keys before
    for (int64 i = here; i < KEYS * HEAD_SIZE; i += everyone) {
      int64 key = i / HEAD_SIZE, column = i % HEAD_SIZE, position = start + key;
      short k = 0, v = 0;
      if (position < to) {
        int64 block = block_table[sequence * table_width + position / block_size], offset = position % block_size;
        k = bits_of(k_cache[block * k_block + kv_head * k_head + offset * k_offset + column]);
        v = bits_of(v_cache[block * v_block + kv_head * v_head + offset * v_offset + column]);
      }
      keys[key * PADDED + column] = k;
      values[key * PADDED + column] = v;
    }
    sycl::group_barrier(group);

    Floats scores[HALVES] = {};
    for (int half = 0; half < HALVES; ++half)
      for (int b = 0; b < BLOCKS; ++b) {
        Words of_key;
        for (int i = 0; i < 8; ++i) {
          int at = (half * LANES + lane) * PADDED + b * LANES + 2 * i;
          of_key[i] = pair_of(keys[at], keys[at + 1]);
        }
        Shorts of_query;
        for (int r = 0; r < 8; ++r) of_query[r] = queries[(first_row + r) * HEAD_SIZE + b * LANES + lane];
        scores[half] = multiply_add<Number>(of_query, of_key, scores[half]);
      }

    Shorts weights[HALVES];
    for (int r = 0; r < 8; ++r) {
      int64 query = first_token + (first_row + r) / GROUP + to_end;
      bool seen[HALVES];
      float score[HALVES];
      for (int half = 0; half < HALVES; ++half) {
        int64 position = start + half * LANES + lane;
        score[half] = scores[half][r] * by_k;
        if (softcap > 0) score[half] = softcap * sycl::tanh(score[half] / softcap);
        seen[half] = position < to && position <= query && (window <= 0 || position > query - window);
        if (!seen[half]) score[half] = LEAST;
      }
      float best = sycl::reduce_over_group(sub_group, sycl::fmax(score[0], score[HALVES - 1]), sycl::maximum<float>());
      float highest = sycl::fmax(most[r], best), shrink = sycl::exp(most[r] - highest), all = 0;
      for (int half = 0; half < HALVES; ++half) {
        float weight = seen[half] ? sycl::exp(score[half] - highest) : 0.0f;
        weights[half][r] = bits_of(narrow<Number>(weight));
        all += weight;
      }
      most[r] = highest;
      total[r] = total[r] * shrink + sycl::reduce_over_group(sub_group, all, sycl::plus<float>());
      for (int b = 0; b < BLOCKS; ++b) sums[b][r] *= shrink;
    }

    for (int b = 0; b < BLOCKS; ++b)
      for (int half = 0; half < HALVES; ++half) {
        Words of_column;
        for (int i = 0; i < 8; ++i) {
          int at = (half * LANES + 2 * i) * PADDED + b * LANES + lane;
          of_column[i] = pair_of(values[at], values[at + PADDED]);
        }
        sums[b] = multiply_add<Number>(weights[half], of_column, sums[b]);
      }
  }

  for (int r = 0; r < 8; ++r) {
    int row = first_row + r;
    int64 token = first_token + row / GROUP, head = kv_head * GROUP + row % GROUP;
    if (row >= ROWS || token >= end) break;
    float highest = most[r], all = total[r];
    if (sinks) {  // a logit that takes weight and gives no value
      highest = sycl::fmax(highest, sinks[head]);
      all = all * sycl::exp(most[r] - highest) + sycl::exp(sinks[head] - highest);
    }
    float factor = by_v * sycl::exp(most[r] - highest) / all;
    for (int b = 0; b < BLOCKS; ++b)
      out[(token * num_heads + head) * HEAD_SIZE + b * LANES + lane] = narrow<Number>(sums[b][r] * factor);
  }
}
