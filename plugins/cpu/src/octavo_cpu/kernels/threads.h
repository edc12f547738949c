// A pool that shares out pieces of one job. Every thread, the caller among them, begins with its own part of them, the same
// one each time, and then takes what others have left: a worker that the operating system keeps from running delays
// nothing but the piece it holds.
#pragma once
#include <cstdint>

namespace octavo {

using Work = void (*)(const void* context, int64_t begin, int64_t end);

// Runs work(context, begin, end) over [0, total) in pieces of `grain`, and returns when all are done. A job of one
// piece, or one that comes while another runs, is done by the caller alone.
void parallel_for(int64_t total, int64_t grain, Work work, const void* context);

// Not while a job runs.
void set_threads(int num_threads);
int num_threads();

}  // namespace octavo
