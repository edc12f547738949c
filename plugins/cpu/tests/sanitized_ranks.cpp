// Three processes that add and join buffers of exactly the size that api.h promises to touch; then one dies, and the
// others notice: see test_cpu_communicator.py.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "api.h"
#include "threads.h"

using namespace octavo;

constexpr int SIZE = 3, DIED = 7;

void expect(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "not so: %s\n", what);
  exit(1);
}

int run(int rank, const char* name, std::atomic<int>& joined) {
  int error = 0;
  while (rank != 0 && joined == 0) usleep(1000);  // rank 0 makes the memory
  Group* group = octavo_group_open(name, rank, SIZE, &error);
  expect(group != nullptr, "a rank joins");
  ++joined;
  while (joined < SIZE) usleep(1000);
  set_threads(rank == 1 ? 3 : 1);
  for (int64_t size : {int64_t(0), int64_t(1), int64_t(777), int64_t(65536), int64_t(131072 + 3), int64_t(400001)}) {
    std::vector<float> wide(size, float(rank + 1));
    std::vector<uint16_t> narrow(size, rank == 0 ? 0x3f80 : 0x4000);  // 1 and 2
    if (size > 2) narrow[1] = 0x7fff;                                 // a NaN
    AllReduceArgs reduce{group, wide.data(), size, AS_F32, 0};
    octavo_all_reduce(&reduce);
    reduce = {group, narrow.data(), size, AS_BF16, 0};
    octavo_all_reduce(&reduce);
    for (int64_t i = 0; i < size; ++i) {
      expect(wide[i] == 6, "1 + 2 + 3 is 6");
      expect(size > 2 && i == 1 ? (narrow[i] & 0x7fff) > 0x7f80 : narrow[i] == 0x40a0, "1 + 2 + 2 is 5, and a NaN stays one");
    }
    std::vector<uint8_t> own(2 * size, uint8_t(10 + rank)), all(2 * size * SIZE);
    const AllGatherArgs gather{group, own.data(), all.data(), 2, size};
    octavo_all_gather(&gather);
    for (int64_t i = 0; i < int64_t(all.size()); ++i) expect(all[i] == 10 + i / size % SIZE, "rows side by side");
  }
  if (rank == 2) _exit(DIED);
  std::vector<float> one(1, 1);
  const AllReduceArgs reduce{group, one.data(), 1, AS_F32, 0};
  octavo_all_reduce(&reduce);
  expect(octavo_lost_rank() == 2, "a rank that died is noticed");
  octavo_all_reduce(&reduce);
  octavo_group_close(group);
  return 0;
}

int main() {
  const std::string name = "/octavo-test-" + std::to_string(getpid());
  int error = 0;
  expect(octavo_group_open(name.c_str(), 1, SIZE, &error) == nullptr && error != 0, "nobody joins what is not there");
  void* shared = mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto& joined = *new (shared) std::atomic<int>(0);
  int children[SIZE];
  for (int rank = 0; rank < SIZE; ++rank)
    if ((children[rank] = fork()) == 0) exit(run(rank, name.c_str(), joined));
  bool good = true;
  for (int rank = 0; rank < SIZE; ++rank) {
    int status = 0;
    waitpid(children[rank], &status, 0);
    good &= WIFEXITED(status) && WEXITSTATUS(status) == (rank == 2 ? DIED : 0);
  }
  octavo_group_unlink(name.c_str());
  puts(good ? "good" : "bad");
  return good ? 0 : 1;
}
