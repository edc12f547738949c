// The C functions of the library, as `native.py` calls them. Plain pointers only: no C++ ABI crosses this line.
//
// Shapes: T tokens, N out_features, K in_features. Rows are contiguous.
#pragma once
#include <cstdint>

#define OCTAVO_API extern "C" __attribute__((visibility("default")))

namespace octavo {

// The numbers of a weight, packed by `octavo_pack`: plain ones, GGUF blocks, and bytes with one scale a row.
enum Kind : int32_t {
  BF16 = 0, F32 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 4, Q5_1 = 5, Q8_0 = 6, Q4_K = 7, Q5_K = 8, Q6_K = 9, F16 = 10, I8 = 11,
  NUM_KINDS = 12
};

// Numbers as torch holds them. Activations are of the first two, of a product also of the third; a KV cache may be any.
enum Dtype : int32_t { AS_BF16 = 0, AS_F32 = 1, AS_F16 = 2, AS_E4M3 = 3, AS_I8 = 4 };

// With a gate the first half of the N outputs are gates: y is [T, N / 2].
enum Gate : int32_t { NO_GATE = 0, SILU = 1, GELU = 2, GELU_TANH = 3 };

// One layer, fixed at load; `linear_native.Layer` is its twin.
struct Linear {
  int32_t kind, dtype, gate;
  int32_t exact;  // GGUF blocks and bytes: never round activations to 8 bits
  int64_t num_out, num_in;
  const void* weight;
};

}  // namespace octavo

// The version of this header; the Python side refuses a library of another one.
constexpr int OCTAVO_ABI = 7;
OCTAVO_API int octavo_abi();

// Takes the instruction set `name` ("generic", "avx2", "avx512", "avx512_bf16", "amx", "neon"), or the best one for "". 0 if this CPU lacks it.
OCTAVO_API int octavo_use_isa(const char* name);
OCTAVO_API const char* octavo_isa();

// Threads of one product, the caller's included. Takes effect with the next product.
OCTAVO_API void octavo_set_threads(int num_threads);

// Bytes of a packed weight; 0 if num_in is not whole blocks of the kind.
OCTAVO_API int64_t octavo_packed_bytes(int kind, int gate, int64_t num_out, int64_t num_in);
// rows: numbers [N, K] or GGUF blocks [N, bytes of a row]. scales: float [N] of I8, else null. packed:
// `octavo_packed_bytes` bytes, aligned to 64.
OCTAVO_API void octavo_pack(int kind, int gate, int64_t num_out, int64_t num_in, const void* rows, const float* scales,
                            void* packed);
// Asks the system for large pages: a weight is read faster with fewer of them to look up. Harmless where there are none.
OCTAVO_API void octavo_large_pages(void* memory, int64_t num_bytes);

// Joins the group of ranks that share the memory `name`, made by rank 0 before the others come. Null if that fails: error
// is the errno. Collectives begin when all have joined (who has not yet is taken for dead); nobody needs the name then.
namespace octavo { struct Group; }
OCTAVO_API octavo::Group* octavo_group_open(const char* name, int rank, int size, int* error);
OCTAVO_API void octavo_group_unlink(const char* name);
OCTAVO_API void octavo_group_close(octavo::Group* group);
// A rank whose process ended while this one waited for it: what collectives gave since is undefined. -1 without one.
OCTAVO_API int octavo_lost_rank();

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

// A KV cache [blocks, heads, tokens of a block, dimensions]: strides in elements, dimensions side by side.
struct KVStrides {
  int64_t dtype, block_size, block, head, token;
};

// out [R, D] = norm of row r of x, which begins at (r / group) * outer_stride + (r % group) * inner_stride.
struct NormArgs {
  const void* x;
  void* residual;  // [R, D] or null: x is added to it first, and the sum is normed
  const void* weight;
  void* out;
  int64_t num_rows, width, group, outer_stride, inner_stride;
  float eps;
  int32_t dtype, weight_dtype, reserved;
};

enum Norm : int32_t { NO_NORM = 0, NORM_HEAD = 1, NORM_ROW = 2 };

// qkv [T, (H + 2 Hkv) D]: queries and keys are normed and rotated in place; with caches, keys and values go there.
struct QkvArgs {
  void* qkv;
  const int64_t* positions;
  const void* cos_sin;                  // [positions, rotated] or null
  const void *q_weight, *k_weight;      // or null
  void *k_cache, *v_cache;              // or null
  const int64_t* slots;
  const float *k_scales, *v_scales;     // [Hkv], or null: k_scale and v_scale
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, rotated;
  KVStrides k_strides, v_strides;
  float eps, k_scale, v_scale;
  int32_t dtype, weight_dtype, norm;
};

// out [R, I] = act(x[:, :I]) * x[:, I:]
struct GateArgs {
  const void* x;
  void* out;
  int64_t num_rows, width;
  int32_t dtype, gate;
};

// residual += x * scale
struct AddArgs {
  const void* x;
  void* residual;
  int64_t size;
  float scale;
  int32_t dtype;
};

// out [R, left_bytes + right_bytes]: two rows side by side.
struct JoinArgs {
  const void *left, *right;
  void* out;
  int64_t num_rows, left_bytes, right_bytes;
};

// out [T, width] = table[ids - first], times scale if scaled; zeros for an id that the table does not have.
struct EmbeddingArgs {
  const void *ids, *table;
  const Linear* packed;  // whose weight is the table, or null
  void* out;
  int64_t num_tokens, width, num_rows, first;
  float scale;
  int32_t scaled, wide_ids, dtype;
};

// out = x * scale, then softcap * tanh(out / softcap) unless softcap is 0.
struct LogitsArgs {
  const void* x;
  float* out;
  int64_t size;
  float scale, softcap;
  int32_t dtype, reserved;
};

// tokens [R]: the likeliest, or drawn at a temperature; -1 where there is none. rows: of temperature and seeds, or null.
struct SampleArgs {
  const void* logits;
  const float* temperature;  // or null: the likeliest
  const int64_t *seeds, *positions, *rows;
  int64_t* tokens;
  int64_t num_rows, vocab, stride;
  int32_t dtype, reserved;
};

struct TopArgs {
  float* logits;
  const int64_t* top_k;
  const float* top_p;
  int64_t num_rows, vocab, stride;
};

struct MinPArgs {
  float* logits;
  const float* threshold;
  int64_t num_rows, vocab, stride;
};

// The tensors of octavo.ops.bookkeeping.begin_step; strides in elements.
struct BeginArgs {
  const int32_t *tokens, *blocks, *groups, *ended;
  int32_t* seqs;
  const int32_t* q_starts;
  int32_t* ids;
  int64_t *positions, *slots;
  int32_t* block_table;
  int64_t* picks;
  int64_t num_tokens, num_seqs, num_rows, num_columns, num_groups;
  int64_t row_tokens, seqs_stride, slots_stride, table_stride, picks_stride;
};

struct CommitArgs {
  int32_t *tokens, *ended;
  const int32_t *limits, *stops;
  const int64_t *chosen, *picks;
  int64_t num_chosen, num_stops, row_tokens, picks_stride;
};

// data [size], of AS_BF16 or AS_F32: in place, the sum of all ranks'.
struct AllReduceArgs {
  Group* group;
  void* data;
  int64_t size;
  int32_t dtype, reserved;
};

// own [R, row_bytes] of each rank -> all [R, ranks, row_bytes]
struct AllGatherArgs {
  Group* group;
  const void* own;
  void* all;
  int64_t num_rows, row_bytes;
};

// Attention over a paged cache: kv_cache.h says how a cache lies, attention.h how a step's work is cut.
struct AttentionPlan;

struct AttentionPlanArgs {
  AttentionPlan* plan;
  const int32_t* q_starts;  // [num_seqs + 1], read now
  const int32_t* kv_lens;   // [num_seqs], read now
  int64_t num_seqs, num_kv_heads, group, head_dim;
  int64_t window, causal;      // 0: no window
  const int32_t* block_table;  // read by every layer, as are slots: their memory has to stay
  int64_t table_stride;
  const int64_t* slots;
};

struct AttentionArgs {
  AttentionPlan* plan;
  const void* q;      // [T, H, D], tokens q_stride apart
  const void* k;      // [T, Hkv, D], as v: to be written first; null where the cache holds them
  const void* v;
  void* k_cache;
  void* v_cache;
  void* out;              // [T, H, D], contiguous
  const float* sinks;     // [H] or null
  const float* k_scales;  // [Hkv] or null; others than 1 need a cache in float8
  const float* v_scales;
  int64_t q_stride, k_stride, v_stride;
  KVStrides kv;
  int64_t num_tokens, num_heads, num_kv_heads, head_dim;
  int64_t window, causal;
  int64_t dtype;  // of q, k, v and out
  float scale;    // positive
  float softcap;  // 0: none
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

OCTAVO_API void octavo_norm(const octavo::NormArgs* args);
OCTAVO_API void octavo_qkv(const octavo::QkvArgs* args);
OCTAVO_API void octavo_gate(const octavo::GateArgs* args);
OCTAVO_API void octavo_add(const octavo::AddArgs* args);
OCTAVO_API void octavo_join(const octavo::JoinArgs* args);
OCTAVO_API void octavo_embedding(const octavo::EmbeddingArgs* args);
OCTAVO_API void octavo_logits(const octavo::LogitsArgs* args);
OCTAVO_API void octavo_sample(const octavo::SampleArgs* args);
// In place: what is not among the top_k likeliest (0: all), nor in the least set of probability top_p, becomes -inf.
OCTAVO_API void octavo_top(const octavo::TopArgs* args);
// In place: what is less likely than threshold times the likeliest becomes -inf.
OCTAVO_API void octavo_min_p(const octavo::MinPArgs* args);
OCTAVO_API void octavo_begin(const octavo::BeginArgs* args);
OCTAVO_API void octavo_commit(const octavo::CommitArgs* args);
OCTAVO_API void octavo_all_reduce(const octavo::AllReduceArgs* args);
OCTAVO_API void octavo_all_gather(const octavo::AllGatherArgs* args);
OCTAVO_API void octavo_attention(const octavo::AttentionArgs* args);
// Cuts a step's attention, the same for all layers. Outside the step: it reads what only the host knows.
OCTAVO_API void octavo_attention_plan(const octavo::AttentionPlanArgs* args);
OCTAVO_API octavo::AttentionPlan* octavo_attention_plan_new();
OCTAVO_API void octavo_attention_plan_free(octavo::AttentionPlan* plan);
OCTAVO_API void octavo_replay(const octavo::ReplayArgs* args);
