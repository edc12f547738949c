// What each instruction set supplies, as one table of functions. `isa_table.h` fills one for each.
#pragma once
#include "layout.h"
#include "threads.h"

namespace octavo {

// What a product reads of its activations.
enum Form {
  AS_THEY_ARE,  // x itself
  COPIED,       // its rows, padded with zeros to whole tiles
  FLOATS,       // the same, as float32
  BYTES,        // the same as 8-bit codes, with one TokenScale a row
  GROUPS,       // Activations [T, K / 32]
};

// A product of some of its tokens.
struct Product {
  const Linear* layer;
  const void* x;  // [T, K] in the layer's dtype
  const void* bias;
  void* y;
  int64_t num_tokens;
  // Set by the instruction set's `plan`:
  Form form;
  int64_t stride;  // bytes of a row of what the product reads
  // That: x, or scratch memory.
  const uint8_t* rows;
  TokenScale* scales;
};

// The small functions of a step, over rows or tokens; `small.h` fills them in for every instruction set.
struct SmallOps {
  Work norm, add, qkv, act_and_mul, embedding, logits, sample, top, min_p;
};

struct Isa {
  const char* name;
  int64_t (*most_tokens)(const Linear& layer);  // of one product: more would not stay in the cache
  void (*plan)(Product& product);
  Work prepare;   // over tokens
  Work multiply;  // over pairs of panels
  SmallOps small;
  Work attend;  // over jobs of an attention plan
};

// The one that runs.
const Isa& chosen_isa();

extern const Isa GENERIC;
#if defined(__x86_64__)
extern const Isa AVX2, AVX512, AVX512_BF16, AMX;
#elif defined(__aarch64__)
extern const Isa NEON;
#endif

}  // namespace octavo
