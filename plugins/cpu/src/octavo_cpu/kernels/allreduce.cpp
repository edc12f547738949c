// Collectives of ranks on one machine, through memory that they share.
//
//     header        one line a rank: how many exchanges it has written
//     rank 0        slot 0 | slot 1
//     rank 1        slot 0 | slot 1   ...
//
// An exchange: every rank writes its part into its own slot, counts it, waits until all have, and reads all slots. The
// next exchange uses the other slot. So a slot is written again only after everyone has written the exchange between,
// and nobody does that before it has read the slot: one wait an exchange is enough. Larger data goes in several.
//
// All ranks add in the order of the ranks, in float: they get the same bits, whatever order they arrive in.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "api.h"
#include "threads.h"

namespace octavo {
namespace {

// The rank whose loss ended an exchange of this process; -1 without one. A process is in one group at a time.
std::atomic<int> lost_rank{-1};

constexpr int64_t SLOT_BYTES = 256 << 10;  // two ranks' slots stay in a core's cache
constexpr int64_t GRAIN = 16 << 10;        // numbers added by one thread at a time

// How a rank waits: it looks, then lets others run, then sleeps. A rank that waits longer has a reason: it looks
// whether the other still lives.
constexpr int SPINS = 2000, YIELDS = 1000, SLEEPS_BETWEEN_CHECKS = 100;
constexpr timespec SLEEP{0, 50'000};

struct alignas(64) Count {
  std::atomic<uint64_t> exchanges;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "ranks share these numbers");

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A rank holds a lock on its byte of the file as long as its process lives: the system drops it however that ends.
struct flock byte_of(int rank) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

int64_t bytes_of(int size) { return int64_t(sizeof(Count) + 2 * SLOT_BYTES) * size; }

}  // namespace

struct Group {
  int file, rank, size;
  uint8_t* memory;
  uint64_t exchanges = 0;  // that this rank has begun

  Count& count(int r) const { return reinterpret_cast<Count*>(memory)[r]; }
  uint8_t* slot(int r) const {
    return memory + sizeof(Count) * size + SLOT_BYTES * (2 * r + int64_t(exchanges & 1));
  }

  bool lives(int r) const {
    struct flock lock = byte_of(r);
    return fcntl(file, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
  }

  // False if that rank is gone.
  bool wait_for(int r) const {
    const auto& theirs = count(r).exchanges;
    for (int64_t i = 0; theirs.load(std::memory_order_acquire) < exchanges; ++i) {
      if (i < SPINS) {
        relax();
      } else if (i < SPINS + YIELDS) {
        sched_yield();
      } else {
        nanosleep(&SLEEP, nullptr);
        // It may have counted as its last act.
        if ((i - SPINS - YIELDS) % SLEEPS_BETWEEN_CHECKS == SLEEPS_BETWEEN_CHECKS - 1 && !lives(r))
          return theirs.load(std::memory_order_acquire) >= exchanges;
      }
    }
    return true;
  }

  // Shows this rank's bytes to all, and returns once all slots can be read. False if a rank is gone, from then on always.
  bool exchange(const void* own, int64_t num_bytes) {
    if (lost_rank.load(std::memory_order_relaxed) >= 0) return false;
    ++exchanges;
    memcpy(slot(rank), own, size_t(num_bytes));
    count(rank).exchanges.store(exchanges, std::memory_order_release);
    for (int r = 0; r < size; ++r)
      if (r != rank && !wait_for(r)) {
        lost_rank.store(r, std::memory_order_relaxed);
        return false;
      }
    return true;
  }
};

namespace {

inline float wide(float x) { return x; }
inline float wide(uint16_t x) {  // bfloat16
  const uint32_t bits = uint32_t(x) << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

inline void narrow(float x, float& y) { y = x; }
inline void narrow(float x, uint16_t& y) {  // to nearest even; a NaN stays one
  uint32_t bits;
  memcpy(&bits, &x, 4);
  y = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class T>
struct Sum {
  const Group* group;
  T* data;

  static void piece(const void* context, int64_t begin, int64_t end) {
    const auto& job = *static_cast<const Sum*>(context);
    constexpr int64_t BLOCK = 256;
    for (; begin < end; begin += BLOCK) {
      const int64_t n = std::min(BLOCK, end - begin);
      float sum[BLOCK];
      for (int r = 0; r < job.group->size; ++r) {
        const T* part = reinterpret_cast<const T*>(job.group->slot(r)) + begin;
        if (r == 0)
          for (int64_t i = 0; i < n; ++i) sum[i] = wide(part[i]);
        else
          for (int64_t i = 0; i < n; ++i) sum[i] += wide(part[i]);
      }
      for (int64_t i = 0; i < n; ++i) narrow(sum[i], job.data[begin + i]);
    }
  }
};

template <class T>
void all_reduce(Group& group, T* data, int64_t size) {
  for (int64_t n; size > 0; data += n, size -= n) {
    n = std::min(size, SLOT_BYTES / int64_t(sizeof(T)));
    if (!group.exchange(data, n * int64_t(sizeof(T)))) return;
    const Sum<T> job{&group, data};
    parallel_for(n, GRAIN, Sum<T>::piece, &job);
  }
}

}  // namespace
}  // namespace octavo

using namespace octavo;

Group* octavo_group_open(const char* name, int rank, int size, int* error) {
  const int file = shm_open(name, rank == 0 ? O_RDWR | O_CREAT | O_EXCL : O_RDWR, S_IRUSR | S_IWUSR);
  if (file < 0) return *error = errno, nullptr;
  auto give_up = [&](int reason) {
    close(file);
    *error = reason;
    return nullptr;
  };
  if (rank == 0) {
#ifdef __APPLE__
    if (ftruncate(file, bytes_of(size)) != 0) return give_up(errno);
#else
    // Taken now: a page that is not to be had later would end the process.
    if (const int reason = posix_fallocate(file, 0, bytes_of(size))) return give_up(reason);
#endif
  }
  struct flock lock = byte_of(rank);
  if (fcntl(file, F_SETLK, &lock) != 0) return give_up(errno);
  void* memory = mmap(nullptr, size_t(bytes_of(size)), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return give_up(errno);
  lost_rank.store(-1);
  return new Group{file, rank, size, static_cast<uint8_t*>(memory)};
}

void octavo_group_unlink(const char* name) { shm_unlink(name); }

void octavo_group_close(Group* group) {
  munmap(group->memory, size_t(bytes_of(group->size)));
  close(group->file);
  delete group;
}

int octavo_lost_rank() { return lost_rank.load(); }

void octavo_all_reduce(const AllReduceArgs* args) {
  if (args->dtype == AS_F32)
    all_reduce(*args->group, static_cast<float*>(args->data), args->size);
  else
    all_reduce(*args->group, static_cast<uint16_t*>(args->data), args->size);
}

void octavo_all_gather(const AllGatherArgs* args) {
  Group& group = *args->group;
  const int64_t width = args->row_bytes, total = args->num_rows * width;
  const auto* own = static_cast<const uint8_t*>(args->own);
  auto* all = static_cast<uint8_t*>(args->all);
  for (int64_t done = 0; done < total;) {
    const int64_t n = std::min(total - done, SLOT_BYTES);
    if (!group.exchange(own + done, n)) return;
    for (int r = 0; r < group.size; ++r)
      for (int64_t at = done; at < done + n;) {  // bytes [done, done + n) of the rank's rows, row by row
        const int64_t row = at / width, column = at % width, length = std::min(width - column, done + n - at);
        memcpy(all + (row * group.size + r) * width + column, group.slot(r) + (at - done), size_t(length));
        at += length;
      }
    done += n;
  }
}
