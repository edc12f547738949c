// The work of a step's attention: cut once into items, which every layer then runs.
//
//   sequence    its new tokens are the queries, the last `q_len` positions of its context of `kv_len`
//   rows        the queries of one KV head: row r is token r / G and the r % G-th of its G query heads
//   item        some rows against a part of their context, by one thread
//   group       the items of the same rows; each leaves a partial answer, the last one to finish adds them up
//   job         neighbouring items, worth handing to a thread
#pragma once
#include <vector>

#include "kv_cache.h"

namespace octavo {

constexpr int64_t FEW_ROWS = 12;     // up to so many rows read keys and values where they lie
constexpr int64_t MOST_ROWS = 512;   // of an item: keys and values are packed once for all of them
constexpr int64_t STRETCH = 256;     // tokens of the context that an item looks at together
constexpr int64_t FETCHED = 64;        // tokens that items of few rows fetch in advance
constexpr int64_t PIECE_FEW = 512;   // most context of an item of few rows, and of one of many. Fixed, so that an answer
constexpr int64_t PIECE_MANY = 4096; // depends neither on the batch around it nor on the number of threads.

struct Sequence {
  int64_t first_token, q_len, kv_len;
};

struct Item {
  int32_t sequence, head;
  int32_t first_row, num_rows;
  int64_t begin, end;  // positions of the context
  int32_t piece, num_pieces, group;
  int64_t partial;  // its group's partial answers, in floats; num_pieces 1: none
};

}  // namespace octavo

// Opaque to Python; its address stays, its content is the step's.
struct octavo::AttentionPlan {
  std::vector<Sequence> sequences;
  std::vector<Item> items;
  std::vector<int64_t> jobs;  // job j is items[jobs[j]] .. items[jobs[j + 1] - 1]
  std::vector<float> partials;
  std::vector<int32_t> finished;  // items of each group; 0 between layers
  int64_t num_tokens = 0;         // that belong to a sequence
  const int32_t* block_table = nullptr;
  int64_t table_stride = 0;
  const int64_t* slots = nullptr;
};

namespace octavo {

// Floats of a partial answer: sums, largest score and sum of weights of each row.
inline int64_t partial_size(int64_t rows, int64_t dim) { return rows * (dim + 2); }

}  // namespace octavo
