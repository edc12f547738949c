#include <initializer_list>

#include "simd_avx512.h"

#include "isa_table.h"

const octavo::Isa octavo::AMX = table("amx");
