// The entry points of a step's small functions: what is shared out over threads, and in which pieces.
#include <cmath>
#include <cstring>

#include "choice.h"
#include "isa.h"
#include "scratch.h"

namespace octavo {
namespace {

// Numbers of a piece: some 5 us of work. Less is not worth another thread's attention.
constexpr int64_t PIECE = 1 << 15;

int64_t rows_of(int64_t width) { return PIECE / (width + 1) + 1; }

void join_rows(const void* context, int64_t begin, int64_t end) {
  const JoinArgs& a = *static_cast<const JoinArgs*>(context);
  for (int64_t r = begin; r < end; ++r) {
    uint8_t* out = static_cast<uint8_t*>(a.out) + r * (a.left_bytes + a.right_bytes);
    memcpy(out, static_cast<const uint8_t*>(a.left) + r * a.left_bytes, size_t(a.left_bytes));
    memcpy(out + a.left_bytes, static_cast<const uint8_t*>(a.right) + r * a.right_bytes, size_t(a.right_bytes));
  }
}

thread_local Scratch memory;

}  // namespace

void* filter_memory(size_t bytes) { return memory.of(bytes); }

}  // namespace octavo

using namespace octavo;

void octavo_norm(const NormArgs* a) { parallel_for(a->num_rows, rows_of(a->width), chosen_isa().small.norm, a); }

void octavo_qkv(const QkvArgs* a) {
  const int64_t width = (a->num_heads + 2 * a->num_kv_heads) * a->head_dim;
  parallel_for(a->num_tokens, rows_of(width), chosen_isa().small.qkv, a);
}

void octavo_gate(const GateArgs* a) { parallel_for(a->num_rows, rows_of(4 * a->width), chosen_isa().small.act_and_mul, a); }

void octavo_add(const AddArgs* a) { parallel_for((a->size + 15) / 16, PIECE / 16, chosen_isa().small.add, a); }

void octavo_join(const JoinArgs* a) { parallel_for(a->num_rows, rows_of(a->left_bytes + a->right_bytes), join_rows, a); }

void octavo_embedding(const EmbeddingArgs* a) {
  // Of a packed weight the whole panel is read for one row.
  parallel_for(a->num_tokens, rows_of(a->packed ? PANEL * a->width : a->width), chosen_isa().small.embedding, a);
}

void octavo_logits(const LogitsArgs* a) { parallel_for((a->size + 15) / 16, PIECE / 16, chosen_isa().small.logits, a); }

void octavo_sample(const SampleArgs* a) {
  const int64_t chunks = (a->vocab + CHUNK_TOKENS - 1) / CHUNK_TOKENS;
  auto* choices = static_cast<Choice*>(memory.of(size_t(a->num_rows * chunks) * sizeof(Choice) + 1));
  const ChoiceJob job{a, choices, chunks};
  parallel_for(a->num_rows * chunks, 1, chosen_isa().small.sample, &job);
  for (int64_t r = 0; r < a->num_rows; ++r) {
    const Choice* best = choices + r * chunks;
    bool sound = best->sound;
    float largest = best->largest;
    for (const Choice* c = best + 1; c < choices + (r + 1) * chunks; ++c) {
      sound = sound && c->sound;
      largest = c->largest > largest ? c->largest : largest;
      if (c->score > best->score) best = c;  // of equal ones the lower id, which comes first
    }
    a->tokens[r] = sound && std::isfinite(largest) ? best->token : -1;
  }
}

void octavo_top(const TopArgs* a) { parallel_for(a->num_rows, 1, chosen_isa().small.top, a); }

void octavo_min_p(const MinPArgs* a) { parallel_for(a->num_rows, 1, chosen_isa().small.min_p, a); }
