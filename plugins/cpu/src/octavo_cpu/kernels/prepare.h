// What a product makes of its activations first: see `Form`.
#pragma once
#include "isa.h"

namespace {

using namespace octavo;

inline int64_t dtype_bytes(int dtype) { return dtype == AS_F32 ? 4 : 2; }

inline F load_row(int dtype, const void* row, int64_t i) {
  if (dtype == AS_F32) return Simd::load(static_cast<const float*>(row) + i);
  const uint16_t* half = static_cast<const uint16_t*>(row) + i;
  return dtype == AS_BF16 ? Simd::load_bf16(half) : Simd::load_half(reinterpret_cast<const uint8_t*>(half));
}

// Numbers first..first+count-1 of a row (at most 16); zeros behind them.
inline F load_some(int dtype, const void* row, int64_t first, int64_t count) {
  if (count >= PANEL) return load_row(dtype, row, first);
  const int64_t size = dtype_bytes(dtype);
  alignas(64) uint8_t some[PANEL * 4] = {};
  if (count > 0) memcpy(some, static_cast<const uint8_t*>(row) + first * size, size_t(count * size));
  return load_row(dtype, some, 0);
}

// The largest magnitude becomes 127. Numbers with an infinity or a NaN among them get a scale of NaN, which no product hides.
struct Rounding {
  float scale, inverse;
  Rounding(float largest, float zero)  // zero: 0, or NaN
      : scale(largest / 127.0f + zero), inverse(largest > 1e-35f ? 127.0f / largest : 0.0f) {}
  // (A scale too small to invert leaves nothing that float32 could tell from zero.)
  bool fails() const { return !(scale - scale == 0.0f); }
  Simd::I codes(F x) const { return fails() ? Simd::set1(int32_t(0)) : Simd::to_int(Simd::mul(x, Simd::set1(inverse))); }
};

inline void quantize_group(int dtype, const void* row, int64_t at, Activations& out) {
  const F lo = load_row(dtype, row, at), hi = load_row(dtype, row, at + 16), zero = Simd::set1(0.0f);
  const Rounding rounding(Simd::largest(Simd::max(Simd::abs(lo), Simd::abs(hi))),
                          Simd::sum(Simd::fma(lo, zero, Simd::mul(hi, zero))));
  const Simd::I a = rounding.codes(lo), b = rounding.codes(hi);
  Simd::store_s8(out.codes, a);
  Simd::store_s8(out.codes + 16, b);
  out.sums[0] = Simd::sum(a);
  out.sums[1] = Simd::sum(b);
  out.scale = rounding.scale;
  out.scaled_sum = out.scale * float(out.sums[0] + out.sums[1]);
}

inline void quantize_row(int dtype, const void* row, int64_t width, int8_t* out, int64_t padded, TokenScale& scale) {
  const F zero = Simd::set1(0.0f);
  F largest = zero, finite = zero;
  for (int64_t i = 0; i < width; i += 16) {
    const F x = load_some(dtype, row, i, width - i);
    largest = Simd::max(largest, Simd::abs(x));
    finite = Simd::fma(x, zero, finite);
  }
  const Rounding rounding(Simd::largest(largest), Simd::sum(finite));
  Simd::I sum = Simd::set1(int32_t(0));
  for (int64_t i = 0; i < padded; i += 16) {
    const Simd::I codes = rounding.codes(load_some(dtype, row, i, width - i));
    Simd::store_s8(out + i, codes);
    sum = Simd::add(sum, codes);
  }
  scale = {rounding.scale, Simd::sum(sum)};
}

void prepare(const void* context, int64_t begin, int64_t end) {
  const Product& job = *static_cast<const Product*>(context);
  const int dtype = job.layer->dtype;
  const int64_t width = job.layer->num_in, row_bytes = width * dtype_bytes(dtype);
  for (int64_t t = begin; t < end; ++t) {
    const void* row = static_cast<const uint8_t*>(job.x) + t * row_bytes;
    uint8_t* out = const_cast<uint8_t*>(job.rows) + t * job.stride;
    switch (job.form) {
      case AS_THEY_ARE:
        break;
      case COPIED:
        memcpy(out, row, size_t(row_bytes));
        memset(out + row_bytes, 0, size_t(job.stride - row_bytes));
        break;
      case FLOATS:
        for (int64_t i = 0; i < job.stride / 4; i += 16)
          Simd::store(reinterpret_cast<float*>(out) + i, load_some(dtype, row, i, width - i));
        break;
      case BYTES:
        quantize_row(dtype, row, width, reinterpret_cast<int8_t*>(out), job.stride, job.scales[t]);
        break;
      case GROUPS:
        for (int64_t i = 0; i < width; i += GROUP) quantize_group(dtype, row, i, reinterpret_cast<Activations*>(out)[i / GROUP]);
        break;
    }
  }
}

}  // namespace
