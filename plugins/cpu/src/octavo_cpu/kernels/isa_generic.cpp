#include <initializer_list>

#include "simd_generic.h"

#include "isa_table.h"

const octavo::Isa octavo::GENERIC = table("generic");
