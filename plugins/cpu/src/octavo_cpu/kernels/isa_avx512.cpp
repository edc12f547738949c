#include <initializer_list>

#include "simd_avx512.h"

#include "product.h"
#include "small.h"

const octavo::Isa octavo::AVX512{"avx512", prepare, multiply, SMALL_OPS};
