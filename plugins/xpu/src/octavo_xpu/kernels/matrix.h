// The matrix units (XMX) of a sub-group of 16:  C[8, 16] += A[8, K] B[K, 16], K = 16 numbers of 16 bits or 32 of 8.
//
//   lane n has   C   column n, 8 words
//                A   column n, 8 x 16 bits (of 8-bit numbers: columns 2 n and 2 n + 1)
//                B   column n, 8 words of 2 (or 4) rows each, the first lowest
//
// The layout is that of OpenCL's cl_intel_subgroup_matrix_multiply_accumulate, whose functions Intel's GPU compiler
// turns into one instruction (dpas). So a sum is in registers as a kernel wants it, and the 16-bit weights that softmax
// makes of C are an A without moving: joint_matrix hides both behind memory. MATRIX is XMX or EMULATED by the caller;
// EMULATED computes the same on devices without the units, to test kernels there.

#ifndef OCTAVO_XPU_MATRIX
#define OCTAVO_XPU_MATRIX

#include "numbers.h"

#define XMX 1
#define EMULATED 2

using Shorts = short __attribute__((ext_vector_type(8)));
using Words = int __attribute__((ext_vector_type(8)));
using Floats = float __attribute__((ext_vector_type(8)));

#if MATRIX == XMX
SYCL_EXTERNAL Floats intel_sub_group_bf16_bf16_matrix_mad_k16(Shorts a, Words b, Floats c);
SYCL_EXTERNAL Floats intel_sub_group_f16_f16_matrix_mad_k16(Shorts a, Words b, Floats c);
SYCL_EXTERNAL Words intel_sub_group_i8_i8_matrix_mad_k32(Shorts a, Words b, Words c);
#endif

inline short bits_of(Bfloat16 x) { return sycl::bit_cast<short>(x.bits); }
inline short bits_of(sycl::half x) { return sycl::bit_cast<short>(x); }
inline short bits_of(float x) { return static_cast<short>(x); }  // never: float32 has no units

inline int pair_of(short low, short high) {
  return static_cast<int>(static_cast<unsigned short>(low) | static_cast<unsigned>(static_cast<unsigned short>(high)) << 16);
}

template <typename T>
inline float of_bits(short bits) {
  if constexpr (sizeof(T) == 2)
    return wide(sycl::bit_cast<T>(bits));
  else
    return bits;
}

// c + a b for numbers of T: Bfloat16 or half.
template <typename T>
inline Floats multiply_add(Shorts a, Words b, Floats c) {
#if MATRIX == XMX
  if constexpr (std::is_same_v<T, Bfloat16>)
    return intel_sub_group_bf16_bf16_matrix_mad_k16(a, b, c);
  else
    return intel_sub_group_f16_f16_matrix_mad_k16(a, b, c);
#else
  auto sub_group = work_item::get_sub_group();
  for (int k = 0; k < LANES; ++k) {
    float factor = of_bits<T>(static_cast<short>(b[k / 2] >> 16 * (k % 2)));
    for (int row = 0; row < 8; ++row)
      c[row] += of_bits<T>(static_cast<short>(sycl::group_broadcast(sub_group, static_cast<int>(a[row]), k))) * factor;
  }
  return c;
#endif
}

// c + a b for int8.
inline Words multiply_add_int8(Shorts a, Words b, Words c) {
#if MATRIX == XMX
  return intel_sub_group_i8_i8_matrix_mad_k32(a, b, c);
#else
  auto sub_group = work_item::get_sub_group();
  for (int k = 0; k < 2 * LANES; ++k) {
    int factor = static_cast<signed char>(b[k / 4] >> 8 * (k % 4));
    for (int row = 0; row < 8; ++row) {
      int both = sycl::group_broadcast(sub_group, static_cast<int>(a[row]), k / 2);
      c[row] += static_cast<signed char>(both >> 8 * (k % 2)) * factor;
    }
  }
  return c;
#endif
}

#endif
