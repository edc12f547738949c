#include <initializer_list>

#include "simd_avx512.h"

#include "isa_table.h"

const octavo::Isa octavo::AVX512_BF16 = table("avx512_bf16");
