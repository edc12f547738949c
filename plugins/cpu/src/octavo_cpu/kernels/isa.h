// What each instruction set supplies, as one table of functions. `isa_*.cpp` fill one each.
#pragma once
#include "layout.h"
#include "threads.h"

namespace octavo {

// A step of a product over some of its tokens. x: what `prepare` made of the activations.
struct Product {
  const Linear* layer;
  const void* x;      // activations in their own dtype [T, K]; while preparing
  void* prepared;     // Activations [T, K / 32] for packed weights, float [T, K] for plain ones
  const void* bias;   // or null
  void* y;
  int64_t num_tokens;
};

// The small functions of a step, over rows or tokens; `small.h` fills them in for every instruction set.
struct SmallOps {
  Work norm, qkv, act_and_mul, embedding, logits, sample, top, min_p;
};

struct Isa {
  const char* name;
  Work prepare;   // over tokens
  Work multiply;  // over panels of outputs
  SmallOps small;
};

// The one that runs.
const Isa& chosen_isa();

extern const Isa GENERIC;
#if defined(__x86_64__)
extern const Isa AVX2, AVX512;
#endif

}  // namespace octavo
