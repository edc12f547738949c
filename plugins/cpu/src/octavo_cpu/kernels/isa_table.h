// The table of one instruction set. `isa_*.cpp` include its lanes (`simd_*.h`) and then this; what a file may use beyond
// them, the compiler's own macros tell.
#pragma once
#include "attention_item.h"
#include "product.h"
#include "small.h"

namespace {

constexpr octavo::Isa table(const char* name) {
  return {name, most_tokens, plan, prepare, multiply, SMALL_OPS, attend};
}

}  // namespace
