#include <initializer_list>

#include "simd_avx2.h"

#include "isa_table.h"

const octavo::Isa octavo::AVX2 = table("avx2");
