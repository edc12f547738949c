// Every index of every job is worked on exactly once, whatever the number of threads and callers: see test_cpu_threads.py.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "threads.h"

static void count(const void* context, int64_t begin, int64_t end) {
  int* counts = static_cast<int*>(const_cast<void*>(context));
  for (int64_t i = begin; i < end; ++i) ++counts[i];
}

static void run(int jobs, int salt) {
  for (int k = 0; k < jobs; ++k) {
    std::vector<int> counts(size_t(1 + (k * 7 + salt) % 40));
    octavo::parallel_for(int64_t(counts.size()), 1 + (k + salt) % 3, count, counts.data());
    for (int c : counts)
      if (c != 1) printf("an index was worked on %d times\n", c), exit(1);
    // Long enough for workers to fall asleep.
    if (k % 5000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

int main() {
  for (int threads : {2, 3, 5, 1, 4}) {
    octavo::set_threads(threads);
    run(15000, threads);
  }
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) callers.emplace_back([caller] { run(4000, caller); });
  for (auto& caller : callers) caller.join();
  octavo::set_threads(1);  // joins the workers
  puts("good");
}
