// Paged attention, for prompts and decoding alike. T tokens, S sequences, H heads, Hkv KV heads, D = HEAD_SIZE.
//
// Defined by the caller: HEAD_SIZE, GROUP = H / Hkv, TOKENS of a tile, SUB_GROUPS of a work-group; DECODE: no sequence
// has more than one query, so that tile i is sequence i.
//
//   work-group = (tile of TOKENS queries of one sequence, KV head, part of the context)
//   rows       = TOKENS x GROUP pairs of (token, head): they share every key that is read, through local memory
//   sub-group  = some of the rows; its lane j scores the j-th key of a step of LANES keys, and holds the columns
//                j, j + LANES, ... of the output
//
// Softmax is online (Milakov and Gimelshein 2018), in float32. With several parts of the context each leaves its sums
// in `partial`, and `merge` adds them.

#include "tiles.h"

constexpr int ROWS = TOKENS * GROUP;
constexpr int ROWS_EACH = (ROWS + SUB_GROUPS - 1) / SUB_GROUPS;
constexpr int COLUMNS = (HEAD_SIZE + LANES - 1) / LANES;
constexpr int PADDED = HEAD_SIZE + 1;  // lanes read one column of LANES keys: other banks each
constexpr int PARTIAL = HEAD_SIZE + 2;
constexpr float LEAST = -3.0e38f;  // instead of -infinity, whose differences are NaN

KERNEL attention(const Number *q, const Number *k_cache, const Number *v_cache, Number *out, float *partial,
                 const int *block_table, const int *q_starts, const int *kv_lens, const float *sinks,
                 const float *k_scales, const float *v_scales, int64 num_seqs, int64 num_heads, int64 num_parts,
                 int64 q_token, int64 q_head, int64 table_width, int64 block_size, int64 k_block, int64 k_head,
                 int64 k_offset, int64 v_block, int64 v_head, int64 v_offset, int64 window, float scale, float softcap,
                 float k_scale, float v_scale) {
  auto item = work_item::get_nd_item<3>();
  auto group = item.get_group();
  auto sub_group = item.get_sub_group();
  syclexp::work_group_static<float[ROWS * HEAD_SIZE]> queries;
  syclexp::work_group_static<float[LANES * PADDED]> keys;
  syclexp::work_group_static<float[LANES * PADDED]> values;

  int64 tile = item.get_group(0), kv_head = item.get_group(1), part = item.get_group(2);
  int64 sequence = DECODE ? tile : sequence_of(q_starts, num_seqs, tile);
  int64 end = q_starts[sequence + 1], kv_len = kv_lens[sequence];
  int64 first_token = q_starts[sequence];
  if (!DECODE) first_token += (tile - q_starts[sequence] / TOKENS - sequence) * TOKENS;
  int lane = sub_group.get_local_linear_id(), worker = sub_group.get_group_linear_id();
  int64 here = item.get_local_linear_id(), everyone = SUB_GROUPS * LANES;
  float by_k = scale * (k_scales ? k_scales[kv_head] : k_scale), by_v = v_scales ? v_scales[kv_head] : v_scale;
  for (int64 i = here; i < ROWS * HEAD_SIZE; i += everyone) {
    int64 row = i / HEAD_SIZE, token = first_token + row / GROUP, head = kv_head * GROUP + row % GROUP;
    queries[i] = token < end ? wide(q[token * q_token + head * q_head + i % HEAD_SIZE]) * by_k : 0.0f;
  }

  // Positions that some row sees, and of those the share of this part, in whole steps of LANES.
  int64 to_end = kv_len - end;  // token + to_end is its position
  int64 last_token = sycl::min(first_token + TOKENS, end) - 1;
  int64 seen_from = window > 0 ? sycl::max<int64>(0, first_token + to_end - window + 1) : 0;
  int64 seen_to = last_token + to_end + 1;
  int64 each = ((seen_to - seen_from + num_parts - 1) / num_parts + LANES - 1) / LANES * LANES;
  int64 from = seen_from + part * each, to = sycl::min(from + each, seen_to);
  bool empty = first_token >= end || kv_len == 0;  // of the whole work-group: it computes nothing
  if (empty) to = from;

  float sums[ROWS_EACH][COLUMNS], most[ROWS_EACH], total[ROWS_EACH];
  for (int r = 0; r < ROWS_EACH; ++r) {
    most[r] = LEAST;
    total[r] = 0;
    for (int c = 0; c < COLUMNS; ++c) sums[r][c] = 0;
  }

  for (int64 start = from; start < to; start += LANES) {
    sycl::group_barrier(group);  // all have read the keys before
    for (int64 i = here; i < LANES * HEAD_SIZE; i += everyone) {
      int64 key = i / HEAD_SIZE, column = i % HEAD_SIZE, position = start + key;
      float k = 0, v = 0;
      if (position < to) {
        int64 block = block_table[sequence * table_width + position / block_size], offset = position % block_size;
        k = wide(k_cache[block * k_block + kv_head * k_head + offset * k_offset + column]);
        v = wide(v_cache[block * v_block + kv_head * v_head + offset * v_offset + column]);
      }
      keys[key * PADDED + column] = k;
      values[key * PADDED + column] = v;
    }
    sycl::group_barrier(group);

    for (int r = 0; r < ROWS_EACH; ++r) {
      int row = worker * ROWS_EACH + r;
      int64 token = first_token + row / GROUP;
      if (row >= ROWS || token >= end) break;  // of the whole sub-group
      int64 query = token + to_end, position = start + lane;
      float score = 0;
      for (int column = 0; column < HEAD_SIZE; ++column)
        score += queries[row * HEAD_SIZE + column] * keys[lane * PADDED + column];
      if (softcap > 0) score = softcap * sycl::tanh(score / softcap);
      bool seen = position < to && position <= query && (window <= 0 || position > query - window);
      score = seen ? score : LEAST;

      float highest = sycl::fmax(most[r], sycl::reduce_over_group(sub_group, score, sycl::maximum<float>()));
      float weight = seen ? sycl::exp(score - highest) : 0.0f, shrink = sycl::exp(most[r] - highest);
      most[r] = highest;
      total[r] = total[r] * shrink + sycl::reduce_over_group(sub_group, weight, sycl::plus<float>());
      for (int c = 0; c < COLUMNS; ++c) sums[r][c] *= shrink;
      for (int key = 0; key < LANES; ++key) {
        float share = sycl::group_broadcast(sub_group, weight, key);
        for (int c = 0; c < COLUMNS; ++c) {
          int column = c * LANES + lane;
          if (HEAD_SIZE % LANES == 0 || column < HEAD_SIZE) sums[r][c] += share * values[key * PADDED + column];
        }
      }
    }
  }

  for (int r = 0; r < ROWS_EACH; ++r) {
    int row = worker * ROWS_EACH + r;
    int64 token = first_token + row / GROUP, head = kv_head * GROUP + row % GROUP;
    if (row >= ROWS || token >= end || empty) break;
    int64 index = token * num_heads + head;
    float highest = most[r], all = total[r];
    if (num_parts == 1 && sinks) {  // a logit that takes weight and gives no value
      highest = sycl::fmax(highest, sinks[head]);
      all = all * sycl::exp(most[r] - highest) + sycl::exp(sinks[head] - highest);
    }
    float *left = partial + (index * num_parts + part) * PARTIAL;
    float factor = num_parts == 1 ? by_v * sycl::exp(most[r] - highest) / all : by_v;
    for (int c = 0; c < COLUMNS; ++c) {
      int column = c * LANES + lane;
      if (column >= HEAD_SIZE) break;
      if (num_parts == 1)
        out[index * HEAD_SIZE + column] = narrow<Number>(sums[r][c] * factor);
      else
        left[column] = sums[r][c] * factor;
    }
    if (num_parts > 1 && lane == 0) {
      left[HEAD_SIZE] = most[r];
      left[HEAD_SIZE + 1] = all;
    }
  }
}

// Add the parts of a decode step, in which token i is sequence i's. One sub-group a head.
KERNEL merge(const float *partial, Number *out, const int *q_starts, const int *kv_lens, const float *sinks,
             int64 num_heads, int64 num_parts) {
  auto item = work_item::get_nd_item<3>();
  int64 sequence = item.get_group(0), head = item.get_group(1), lane = item.get_local_id(2);
  if (q_starts[sequence] == q_starts[sequence + 1] || kv_lens[sequence] == 0) return;
  int64 index = q_starts[sequence] * num_heads + head;
  const float *parts = partial + index * num_parts * PARTIAL;
  float highest = sinks ? sinks[head] : LEAST;
  for (int64 part = 0; part < num_parts; ++part) highest = sycl::fmax(highest, parts[part * PARTIAL + HEAD_SIZE]);
  float all = sinks ? sycl::exp(sinks[head] - highest) : 0.0f;
  for (int64 part = 0; part < num_parts; ++part) {
    const float *left = parts + part * PARTIAL;
    all += left[HEAD_SIZE + 1] * sycl::exp(left[HEAD_SIZE] - highest);
  }
  for (int64 column = lane; column < HEAD_SIZE; column += LANES) {
    float sum = 0;
    for (int64 part = 0; part < num_parts; ++part) {
      const float *left = parts + part * PARTIAL;
      sum += left[column] * sycl::exp(left[HEAD_SIZE] - highest);
    }
    out[index * HEAD_SIZE + column] = narrow<Number>(sum / all);
  }
}
