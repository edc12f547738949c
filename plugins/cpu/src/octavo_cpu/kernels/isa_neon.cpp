#include <initializer_list>

#include "simd_neon.h"

#include "isa_table.h"

const octavo::Isa octavo::NEON = table("neon");
