#include <initializer_list>

#include "simd_avx2.h"

#include "product.h"
#include "small.h"

const octavo::Isa octavo::AVX2{"avx2", prepare, multiply, SMALL_OPS};
