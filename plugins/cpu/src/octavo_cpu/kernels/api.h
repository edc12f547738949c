// The C functions of the library, as `native.py` calls them. Plain pointers only: no C++ ABI crosses this line.
//
// Shapes: T tokens, N out_features, K in_features. Rows are contiguous.
#pragma once
#include <cstdint>

#define OCTAVO_API extern "C" __attribute__((visibility("default")))

namespace octavo {

// How a weight lies in memory. 0 and 1 are torch's own row-major weights; the others are packed by `octavo_pack`.
enum Kind : int32_t { BF16 = 0, F32 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 4, Q5_1 = 5, Q8_0 = 6, Q4_K = 7, Q5_K = 8, Q6_K = 9, NUM_KINDS = 10 };

// The numbers of x, y and the bias.
enum Dtype : int32_t { AS_BF16 = 0, AS_F32 = 1 };

// With a gate the first half of the N outputs are gates: y is [T, N / 2].
enum Gate : int32_t { NO_GATE = 0, SILU = 1, GELU = 2, GELU_TANH = 3 };

// One layer, fixed at load; `native.Linear` is its twin.
struct Linear {
  int32_t kind, dtype, gate, reserved;
  int64_t num_out, num_in;
  const void* weight;
};

}  // namespace octavo

// The version of this header; the Python side refuses a library of another one.
constexpr int OCTAVO_ABI = 2;
OCTAVO_API int octavo_abi();

// Takes the instruction set `name` ("generic", "avx2", "avx512"), or the best one for "". 0 if this CPU lacks it.
OCTAVO_API int octavo_use_isa(const char* name);
OCTAVO_API const char* octavo_isa();

// Threads of one product, the caller's included. Takes effect with the next product.
OCTAVO_API void octavo_set_threads(int num_threads);

// Bytes of a packed weight; 0 if the kind is not a packed one or num_in is not whole blocks of it.
OCTAVO_API int64_t octavo_packed_bytes(int kind, int gate, int64_t num_out, int64_t num_in);
// rows: GGUF blocks [N, bytes of a row]. packed: `octavo_packed_bytes` bytes.
OCTAVO_API void octavo_pack(int kind, int gate, int64_t num_out, int64_t num_in, const void* rows, void* packed);

// Functions of a step: void octavo_<name>(const octavo::<Name>Args*), so that a tape can hold the call and make it again.
// They allocate nothing but their thread's scratch, and read what differs from step to step through pointers.

namespace octavo {

struct LinearArgs {
  const Linear* layer;
  const void* x;     // [T, K]
  const void* bias;  // [N] or null
  void* y;           // [T, N], or [T, N / 2] with a gate
  int64_t num_tokens;
};

// A recorded step: call i is functions[i](args + offsets[i]).
struct ReplayArgs {
  void (*const* functions)(const void*);
  const uint8_t* args;
  const int64_t* offsets;
  int64_t num_calls;
};

}  // namespace octavo

// y = x W^T + bias, gated if the layer is. Safe from several threads at once.
OCTAVO_API void octavo_linear(const octavo::LinearArgs* args);

OCTAVO_API void octavo_replay(const octavo::ReplayArgs* args);
