#include <initializer_list>

#include "simd_avx512.h"

#include "product.h"

const octavo::Isa octavo::AVX512{"avx512", prepare, multiply};
