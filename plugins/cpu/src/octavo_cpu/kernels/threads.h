// A pool that shares out pieces of one job. The caller works too, and takes every piece that nobody else has taken:
// a worker that the operating system keeps from running delays nothing but the piece it holds.
#pragma once
#include <cstdint>

namespace octavo {

using Work = void (*)(const void* context, int64_t begin, int64_t end);

// Runs work(context, begin, end) over [0, total) in pieces of `grain`, and returns when all are done. A job of one
// piece, or one that comes while another runs, is done by the caller alone.
void parallel_for(int64_t total, int64_t grain, Work work, const void* context);

void set_threads(int num_threads);
int num_threads();

}  // namespace octavo
