// What a step does to the request table, before the model and after it: octavo.ops.bookkeeping says what and why.
#include "api.h"

using namespace octavo;

namespace {

// The columns of a KV group that hold a context's blocks.
void copy_blocks(const BeginArgs& a, const int32_t* blocks, int32_t* table, int64_t length, bool over) {
  for (int64_t g = 0; g < a.num_groups; ++g) {
    const int64_t first = a.groups[2 * g], size = a.groups[2 * g + 1], used = (length + size - 1) / size;
    for (int64_t c = first; c < first + used && c < a.num_columns; ++c) table[c] = over ? 0 : blocks[c];
  }
}

}  // namespace

void octavo_begin(const BeginArgs* args) {
  const BeginArgs& a = *args;
  int32_t *rows = a.seqs, *lengths = a.seqs + a.seqs_stride;
  const int32_t* samples = a.seqs + 2 * a.seqs_stride;
  int64_t* picks[3] = {a.picks, a.picks + a.picks_stride, a.picks + 2 * a.picks_stride};
  for (int64_t s = 0; s < a.num_seqs; ++s) {
    const int64_t begin = a.q_starts[s], end = a.q_starts[s + 1], row = rows[s];
    const bool over = a.ended[row] != 0;
    const int64_t length = over ? end - begin : lengths[s];
    const int32_t *tokens = a.tokens + row * a.row_tokens, *blocks = a.blocks + row * a.num_columns;
    for (int64_t t = begin; t < end && t < a.num_tokens; ++t) {
      const int64_t at = length - end + t;
      a.ids[t] = tokens[at];
      a.positions[t] = at;
      for (int64_t g = 0; g < a.num_groups; ++g) {
        const int64_t first = a.groups[2 * g], size = a.groups[2 * g + 1];
        a.slots[g * a.slots_stride + t] = (over ? 0 : blocks[first + at / size] * size) + at % size;
      }
    }
    copy_blocks(a, blocks, a.block_table + s * a.table_stride, length, over);
    const bool sampled = samples[s] != 0 && !over;
    picks[0][s] = end > 0 ? end - 1 : 0;
    picks[1][s] = sampled ? row : a.num_rows - 1;
    picks[2][s] = sampled ? length : 0;
    lengths[s] = int32_t(length);
  }
  for (int64_t t = a.q_starts[a.num_seqs]; t < a.num_tokens; ++t) {
    a.ids[t] = 0;
    a.positions[t] = 0;
    for (int64_t g = 0; g < a.num_groups; ++g) a.slots[g * a.slots_stride + t] = 0;
  }
}

void octavo_commit(const CommitArgs* args) {
  const CommitArgs& a = *args;
  const int64_t *rows = a.picks + a.picks_stride, *positions = a.picks + 2 * a.picks_stride;
  for (int64_t i = 0; i < a.num_chosen; ++i) {
    const int64_t row = rows[i], position = positions[i], token = a.chosen[i];
    a.tokens[row * a.row_tokens + position] = int32_t(token < 0 ? 0 : token);
    bool over = token < 0 || position + 1 >= a.limits[2 * row + 1];
    for (int64_t e = 0; e < a.num_stops; ++e)
      over = over || (a.stops[row * a.num_stops + e] == token && position >= a.limits[2 * row]);
    a.ended[row] = over;
  }
}
