// How keys and values lie in a paged cache, and a row written into it.
//
// The element of block b, head h, token n of the block and dimension d is at
//     b * block_stride + h * head_stride + n * token_stride + d
// in elements: any order of axes with the head's dimensions innermost. Keys and values have the same strides. In a cache of
// bytes a float follows the dimensions: the scale of these codes.
#pragma once
#include <cmath>
#include <cstring>

#include "api.h"

namespace octavo {

inline int64_t bytes_of(int32_t dtype) { return dtype == AS_F32 ? 4 : dtype == AS_E4M3 || dtype == AS_I8 ? 1 : 2; }

inline float from_bits(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline uint32_t to_bits(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return bits;
}

inline float from_half(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest < 0x400) return from_bits(sign | to_bits(float(rest) * 0x1p-24f));
  return from_bits(sign | ((rest << 13) + (112u << 23)));
}

// To nearest, ties to even; what is too large becomes infinite.
inline uint16_t to_half(float x) {
  const uint16_t sign = uint16_t(to_bits(x) >> 16 & 0x8000);
  uint32_t u = to_bits(x) & 0x7fffffff;
  if (u > 0x7f800000) return sign | 0x7e00;
  if (u >= to_bits(65520.0f)) return sign | 0x7c00;
  // Below 2^-14 they are multiples of 2^-24: adding 1/2 rounds there, and leaves the code in the last bits.
  if (u < to_bits(0x1p-14f)) return uint16_t(sign | (to_bits(from_bits(u) + 0.5f) & 0xffff));
  u += 0xfff + (u >> 13 & 1);
  return uint16_t(sign | ((u >> 13) - ((127 - 15) << 10)));
}

// The nearest of the float8 numbers with 4 bits of exponent and 3 of mantissa, ties to even. They have no infinity: what
// is too large becomes their largest, 448. A NaN stays one.
inline uint8_t to_e4m3(float x) {
  const uint8_t sign = uint8_t(to_bits(x) >> 24 & 0x80);
  uint32_t u = to_bits(x) & 0x7fffffff;
  if (u > 0x7f800000) return sign | 0x7f;
  if (u >= to_bits(448.0f)) return sign | 0x7e;
  // Below 2^-6 they are multiples of 2^-9: adding 2^14 rounds there, and leaves the code in the last bits.
  if (u < to_bits(0x1p-6f)) return uint8_t(sign | (to_bits(from_bits(u) + 0x1p14f) & 0xff));
  u += 0x7ffff + (u >> 20 & 1);
  return uint8_t(sign | ((u >> 20) - ((127 - 7) << 3)));
}

inline float element(int32_t dtype, const void* row, int64_t i) {
  if (dtype == AS_F32) return static_cast<const float*>(row)[i];
  const uint16_t bits = static_cast<const uint16_t*>(row)[i];
  return dtype == AS_F16 ? from_half(bits) : from_bits(uint32_t(bits) << 16);
}

// Where a token's slot and a head begin in the cache.
inline void* cache_row(void* cache, const KVStrides& strides, int64_t slot, int64_t head) {
  const int64_t at = slot / strides.block_size * strides.block + head * strides.head +
                     slot % strides.block_size * strides.token;
  return static_cast<uint8_t*>(cache) + at * bytes_of(strides.dtype);
}

// The scale of a row whose largest absolute number is this, and what numbers are multiplied with to become codes: 0 if
// the row holds an infinity or no number, whose scale then says so, or next to nothing.
inline float scale_of(float largest) { return largest / 127; }
inline float inverse_of(float scale) { return scale > 1e-30f && scale < INFINITY ? 1 / scale : 0; }

// One head's key or value, numbers of `dtype`, over `scale`. A cache has the numbers' own dtype, or is of float8 or bytes.
inline void write_row(void* row, int32_t cache_dtype, const void* numbers, int32_t dtype, int64_t dim, float scale) {
  if (cache_dtype == dtype) {
    memcpy(row, numbers, size_t(dim * bytes_of(dtype)));
  } else if (cache_dtype == AS_I8) {
    float largest = 0;
    for (int64_t i = 0; i < dim; ++i) {
      const float x = std::fabs(element(dtype, numbers, i));
      largest = std::isnan(largest) || x <= largest ? largest : x;
    }
    const float own = scale_of(largest), inverse = inverse_of(own);
    int8_t* codes = static_cast<int8_t*>(row);
    for (int64_t i = 0; i < dim; ++i)
      codes[i] = inverse == 0 ? 0 : int8_t(std::nearbyint(element(dtype, numbers, i) * inverse));
    memcpy(codes + dim, &own, sizeof(own));
  } else {
    uint8_t* codes = static_cast<uint8_t*>(row);
    for (int64_t i = 0; i < dim; ++i) codes[i] = to_e4m3(element(dtype, numbers, i) / scale);
  }
}

}  // namespace octavo
