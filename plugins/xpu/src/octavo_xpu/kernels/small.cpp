// Norms, rotations, gates and writes into the cache. T tokens, D features or head size, H heads.

#include "numbers.h"

// A row's 1 / rms over the whole work-group.
inline float inverse_rms(float squares, int64 size, float eps) {
  auto group = work_item::get_nd_item<3>().get_group();
  return 1.0f / sycl::sqrt(sycl::reduce_over_group(group, squares, sycl::plus<float>()) / size + eps);
}

// A normed value times its weight. A weight in the activations' dtype multiplies what was rounded to it.
inline float weighted(float normed, const void *weight, int64 weight_is_float, int64 i) {
  if (weight_is_float) return normed * static_cast<const float *>(weight)[i];
  return rounded(normed) * wide(static_cast<const Number *>(weight)[i]);
}

// One work-group a row. Row r of x begins at (r / inner) * outer_stride + (r % inner) * inner_stride.
KERNEL rms_norm(const Number *x, const void *weight, Number *out, int64 size, int64 inner, int64 outer_stride,
                int64 inner_stride, int64 weight_is_float, float eps) {
  auto item = work_item::get_nd_item<3>();
  int64 row = item.get_group(0), lane = item.get_local_id(2), step = item.get_local_range(2);
  const Number *from = x + row / inner * outer_stride + row % inner * inner_stride;
  Number *to = out + row * size;
  float squares = 0;
  for (int64 i = lane; i < size; i += step) squares += wide(from[i]) * wide(from[i]);
  float factor = inverse_rms(squares, size, eps);
  for (int64 i = lane; i < size; i += step)
    to[i] = narrow<Number>(weighted(wide(from[i]) * factor, weight, weight_is_float, i));
}

// residual += x, rounded; x = its norm. Both contiguous [T, D], both in place.
KERNEL add_rms_norm(Number *x, Number *residual, const void *weight, int64 size, int64 weight_is_float, float eps) {
  auto item = work_item::get_nd_item<3>();
  int64 row = item.get_group(0), lane = item.get_local_id(2), step = item.get_local_range(2);
  Number *normed = x + row * size, *total = residual + row * size;
  float squares = 0;
  for (int64 i = lane; i < size; i += step) {
    total[i] = narrow<Number>(wide(normed[i]) + wide(total[i]));
    squares += wide(total[i]) * wide(total[i]);
  }
  float factor = inverse_rms(squares, size, eps);
  for (int64 i = lane; i < size; i += step)
    normed[i] = narrow<Number>(weighted(wide(total[i]) * factor, weight, weight_is_float, i));
}

// out[t, i] = act(x[t, i]) * x[t, size + i]. kind: 0 silu, 1 gelu by erf, 2 gelu by tanh.
KERNEL act_and_mul(const Number *x, Number *out, int64 size, int64 row_stride, int64 kind) {
  auto item = work_item::get_nd_item<3>();
  int64 row = item.get_group(0), i = item.get_global_id(2);
  if (i >= size) return;
  float gate = wide(x[row * row_stride + i]), act;
  if (kind == 0)
    act = gate / (1.0f + sycl::exp(-gate));
  else if (kind == 1)
    act = 0.5f * gate * (1.0f + sycl::erf(gate * 0.70710678f));
  else
    act = 0.5f * gate * (1.0f + sycl::tanh(0.79788456f * (gate + 0.044715f * gate * gate * gate)));
  out[row * size + i] = narrow<Number>(rounded(act) * wide(x[row * row_stride + size + i]));
}

// Rotate one head from `from` to `to`, which may be the same: an item reads both partners before it writes them.
inline void rotate(const Number *from, Number *to, const Number *table, int64 rotated, int64 size, int64 lane) {
  int64 half = rotated / 2;
  for (int64 i = lane; i < half; i += LANES) {
    float first = wide(from[i]), second = wide(from[half + i]);
    float cos = wide(table[i]), sin = wide(table[half + i]);
    to[i] = narrow<Number>(first * cos - second * sin);
    to[half + i] = narrow<Number>(second * cos + first * sin);
  }
  if (from != to)
    for (int64 i = rotated + lane; i < size; i += LANES) to[i] = from[i];
}

// q [T, H, D] and k [T, Hkv, D], of any stride but the last, into contiguous ones. One sub-group a head.
KERNEL rope(const Number *q, const Number *k, Number *q_out, Number *k_out, const int64 *positions,
            const Number *cos_sin, int64 num_heads, int64 num_kv_heads, int64 size, int64 rotated, int64 q_token,
            int64 q_head, int64 k_token, int64 k_head) {
  auto item = work_item::get_nd_item<3>();
  int64 token = item.get_group(0), lane = item.get_local_id(2);
  const Number *table = cos_sin + positions[token] * rotated;
  for (int64 head = item.get_local_id(1); head < num_heads + num_kv_heads; head += item.get_local_range(1)) {
    int64 of_k = head - num_heads;
    if (of_k < 0)
      rotate(q + token * q_token + head * q_head, q_out + (token * num_heads + head) * size, table, rotated, size,
             lane);
    else
      rotate(k + token * k_token + of_k * k_head, k_out + (token * num_kv_heads + of_k) * size, table, rotated, size,
             lane);
  }
}

// The strides of a cache [B, Hkv, N, D]; D is contiguous.
struct Place {
  int64 block, head, offset;
};

inline Number *slot_of(Number *cache, Place stride, int64 slot, int64 block_size, int64 head) {
  return cache + slot / block_size * stride.block + slot % block_size * stride.offset + head * stride.head;
}

// Norm and rotate the heads of a packed projection in place; where there is a cache, keys and values go into it, over
// their scale. One sub-group a head. A row of qkv: H queries, Hkv keys, Hkv values.
KERNEL qkv_norm_rope(Number *qkv, const int64 *positions, const Number *cos_sin, const void *q_weight,
                     const void *k_weight, Number *k_cache, Number *v_cache, const int64 *slots, const float *k_scales,
                     const float *v_scales, int64 num_heads, int64 num_kv_heads, int64 size, int64 row_stride,
                     int64 rotated, int64 weight_is_float, int64 block_size, int64 k_block, int64 k_head,
                     int64 k_offset, int64 v_block, int64 v_head, int64 v_offset, float eps, float k_scale,
                     float v_scale) {
  auto item = work_item::get_nd_item<3>();
  auto sub_group = item.get_sub_group();
  int64 token = item.get_group(0), lane = item.get_local_id(2);
  int64 heads = num_heads + 2 * num_kv_heads;
  for (int64 head = item.get_local_id(1); head < heads; head += item.get_local_range(1)) {
    Number *at = qkv + token * row_stride + head * size;
    bool of_q = head < num_heads, of_v = head >= num_heads + num_kv_heads;
    const void *weight = of_q ? q_weight : of_v ? nullptr : k_weight;
    if (weight) {
      float squares = 0;
      for (int64 i = lane; i < size; i += LANES) squares += wide(at[i]) * wide(at[i]);
      squares = sycl::reduce_over_group(sub_group, squares, sycl::plus<float>());
      float factor = 1.0f / sycl::sqrt(squares / size + eps);
      for (int64 i = lane; i < size; i += LANES)
        at[i] = narrow<Number>(weighted(wide(at[i]) * factor, weight, weight_is_float, i));
      sycl::group_barrier(sub_group);  // an item rotates what its neighbours normed
    }
    if (cos_sin && !of_v) rotate(at, at, cos_sin + positions[token] * rotated, rotated, size, lane);
    if (of_q || !k_cache) continue;
    sycl::group_barrier(sub_group);  // and stores what they rotated
    int64 kv_head = head - num_heads - (of_v ? num_kv_heads : 0);
    Number *to = of_v ? slot_of(v_cache, {v_block, v_head, v_offset}, slots[token], block_size, kv_head)
                      : slot_of(k_cache, {k_block, k_head, k_offset}, slots[token], block_size, kv_head);
    const float *scales = of_v ? v_scales : k_scales;
    float scale = scales ? scales[kv_head] : of_v ? v_scale : k_scale;
    for (int64 i = lane; i < size; i += LANES) to[i] = scale == 1.0f ? at[i] : narrow<Number>(wide(at[i]) / scale);
  }
}

// k, v [T, Hkv, D], of any stride but the last, into their slots. One sub-group a head.
KERNEL kv_write(const Number *k, const Number *v, Number *k_cache, Number *v_cache, const int64 *slots,
                const float *k_scales, const float *v_scales, int64 num_kv_heads, int64 size, int64 k_token,
                int64 k_row, int64 v_token, int64 v_row, int64 block_size, int64 k_block, int64 k_head,
                int64 k_offset, int64 v_block, int64 v_head, int64 v_offset, float k_scale, float v_scale) {
  auto item = work_item::get_nd_item<3>();
  int64 token = item.get_group(0), lane = item.get_local_id(2);
  for (int64 head = item.get_local_id(1); head < num_kv_heads; head += item.get_local_range(1)) {
    float by_k = k_scales ? k_scales[head] : k_scale, by_v = v_scales ? v_scales[head] : v_scale;
    const Number *from_k = k + token * k_token + head * k_row, *from_v = v + token * v_token + head * v_row;
    Number *to_k = slot_of(k_cache, {k_block, k_head, k_offset}, slots[token], block_size, head);
    Number *to_v = slot_of(v_cache, {v_block, v_head, v_offset}, slots[token], block_size, head);
    for (int64 i = lane; i < size; i += LANES) {
      to_k[i] = by_k == 1.0f ? from_k[i] : narrow<Number>(wide(from_k[i]) / by_k);
      to_v[i] = by_v == 1.0f ? from_v[i] : narrow<Number>(wide(from_v[i]) / by_v);
    }
  }
}
