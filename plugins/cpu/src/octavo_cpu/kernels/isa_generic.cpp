#include <initializer_list>

#include "simd_generic.h"

#include "product.h"
#include "small.h"

const octavo::Isa octavo::GENERIC{"generic", prepare, multiply, SMALL_OPS};
