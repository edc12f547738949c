// What all kernels share. `Number` is the dtype of activations: NUMBER is BFLOAT16, FLOAT16 or FLOAT32.
// Numbers are computed as float and rounded when they are stored.

#ifndef OCTAVO_XPU_NUMBERS
#define OCTAVO_XPU_NUMBERS

#include <sycl/sycl.hpp>

namespace syclexp = sycl::ext::oneapi::experimental;
namespace work_item = sycl::ext::oneapi::this_work_item;

using int64 = long;

constexpr int LANES = 16;
static_assert(sizeof(int64) == 8, "arguments of type int64 are 8 bytes");

// A function on groups of one to three dimensions, in sub-groups of LANES items.
#define KERNEL                                                                  \
  extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((syclexp::nd_range_kernel<3>)) \
      SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((syclexp::sub_group_size<LANES>)) void

// bfloat16 by its bits: devices without the type compute it too, and all round alike.
struct Bfloat16 {
  unsigned short bits;
};

inline float wide(float x) { return x; }
inline float wide(sycl::half x) { return static_cast<float>(x); }
inline float wide(Bfloat16 x) { return sycl::bit_cast<float>(static_cast<unsigned>(x.bits) << 16); }

template <typename T>
inline T narrow(float x);
template <>
inline float narrow<float>(float x) {
  return x;
}
template <>
inline sycl::half narrow<sycl::half>(float x) {
  return static_cast<sycl::half>(x);
}
template <>
inline Bfloat16 narrow<Bfloat16>(float x) {
  unsigned bits = sycl::bit_cast<unsigned>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<unsigned short>((bits >> 16) | 0x40)};  // stays a NaN
  return {static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};  // to nearest, ties to even
}

#define BFLOAT16 1
#define FLOAT16 2
#define FLOAT32 3
#if NUMBER == BFLOAT16
using Number = Bfloat16;
#elif NUMBER == FLOAT16
using Number = sycl::half;
#elif NUMBER == FLOAT32
using Number = float;
#else
#error "NUMBER names the dtype"
#endif

inline float rounded(float x) { return wide(narrow<Number>(x)); }

#endif
