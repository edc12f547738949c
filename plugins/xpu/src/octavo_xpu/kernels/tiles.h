// How the tokens of a step are cut into tiles of TOKENS, each of one sequence.
//
//   tiles of a step:  | seq 0 | seq 1 ... | seq 2 |      tile q_starts[i] / TOKENS + i is the first of sequence i, so
//                       0      1  2  3      5             that a step's grid follows from bounds and can be recorded

#ifndef OCTAVO_XPU_TILES
#define OCTAVO_XPU_TILES

#include "numbers.h"

// The sequence that a tile belongs to: the last whose first tile is not behind it.
inline int64 sequence_of(const int *q_starts, int64 num_seqs, int64 tile) {
  int64 low = 0, high = num_seqs - 1;
  while (low < high) {
    int64 middle = (low + high + 1) / 2;
    if (q_starts[middle] / TOKENS + middle <= tile)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

#endif
