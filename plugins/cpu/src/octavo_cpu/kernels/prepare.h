// What a product makes of its activations first: 8-bit codes for packed weights, float32 for plain ones.
#pragma once
#include "isa.h"

namespace {

using namespace octavo;

inline F load_row(int dtype, const void* row, int64_t i) {
  return dtype == AS_BF16 ? Simd::load_bf16(static_cast<const uint16_t*>(row) + i)
                          : Simd::load(static_cast<const float*>(row) + i);
}

inline float load_one(int dtype, const void* row, int64_t i) {
  if (dtype == AS_F32) return static_cast<const float*>(row)[i];
  const uint32_t bits = uint32_t(static_cast<const uint16_t*>(row)[i]) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline const void* row_of(int dtype, const void* x, int64_t row, int64_t width) {
  return static_cast<const uint8_t*>(x) + row * width * (dtype == AS_BF16 ? 2 : 4);
}

// The largest magnitude becomes 127. A block with an infinity or a NaN gets a scale of NaN, which no product hides.
inline void quantize(int dtype, const void* row, int64_t at, Activations& out) {
  const F lo = load_row(dtype, row, at), hi = load_row(dtype, row, at + 16), zero = Simd::set1(0.0f);
  const float largest = Simd::largest(Simd::max(Simd::abs(lo), Simd::abs(hi)));
  const float finite = Simd::sum(Simd::fma(lo, zero, Simd::mul(hi, zero)));  // 0, or NaN
  const float scale = largest / 127.0f + finite;
  // A scale too small to invert leaves nothing that float32 could tell from zero.
  const F inverse = Simd::set1(largest > 1e-35f ? 127.0f / largest : 0.0f);
  const Simd::I a = Simd::to_int(Simd::mul(lo, inverse)), b = Simd::to_int(Simd::mul(hi, inverse));
  Simd::store_s8(out.codes, a);
  Simd::store_s8(out.codes + 16, b);
  out.sums[0] = Simd::sum(a);
  out.sums[1] = Simd::sum(b);
  if (!(finite == 0.0f)) out.sums[0] = out.sums[1] = 0, memset(out.codes, 0, GROUP);
  out.scale = scale;
  out.scaled_sum = scale * float(out.sums[0] + out.sums[1]);
}

void prepare(const void* context, int64_t begin, int64_t end) {
  const Product& job = *static_cast<const Product*>(context);
  const int dtype = job.layer->dtype;
  const int64_t width = job.layer->num_in;
  for (int64_t t = begin; t < end; ++t) {
    const void* row = row_of(dtype, job.x, t, width);
    if (is_packed(job.layer->kind)) {
      Activations* out = static_cast<Activations*>(job.prepared) + t * (width / GROUP);
      for (int64_t i = 0; i < width; i += GROUP) quantize(dtype, row, i, *out++);
    } else {
      float* out = static_cast<float*>(job.prepared) + t * width;
      int64_t i = 0;
      for (; i + 16 <= width; i += 16) Simd::store(out + i, load_row(dtype, row, i));
      for (; i < width; ++i) out[i] = load_one(dtype, row, i);
    }
  }
}

}  // namespace
