#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {
namespace {

using Clock = std::chrono::steady_clock;

// How long an idle worker looks for work, and then how long it looks and offers its core to whoever wants it each time; then
// it sleeps. The second reaches from one decode step to the next: waking a sleeper takes 40 us, and now and then the
// system puts it behind the caller, on the same core, for a whole step. An idle server sleeps.
constexpr std::chrono::microseconds PATIENCE{50}, COURTESY{2000};
constexpr int LOOKS = 64;  // between two glances at the clock

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The current job in one word, and in one word for each thread how far its share of the pieces is taken, by itself or by
// others that have none left:
//
//     63 .. 24 | 23 .. 0
//     job      | number of pieces, or the share's next piece
//
// A share with the number of an earlier job is untouched: it begins at the share's first piece. Claiming a piece of a job
// succeeds only while the job has that piece left, so whoever did may read the job's other fields: they stand until all
// its pieces are done.
constexpr int PIECE_BITS = 24;
constexpr uint64_t PIECE_MASK = (uint64_t(1) << PIECE_BITS) - 1;

struct alignas(64) Share {  // alone on its cache line: a thread at work on its own share disturbs nobody
  std::atomic<uint64_t> word{0};
};

class Pool {
 public:
  explicit Pool(int threads) : shares_(size_t(threads)) {}

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(sleep_);
      stopping_.store(true);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return int(shares_.size()); }

  void run(int64_t total, int64_t grain, Work work, const void* context) {
    if (total <= 0) return;
    grain = grain < 1 ? 1 : grain;
    if ((total + grain - 1) / grain > int64_t(PIECE_MASK)) grain = total / int64_t(PIECE_MASK) + 1;
    const int64_t pieces = (total + grain - 1) / grain;
    if (pieces == 1 || size() == 1) return work(context, 0, total);
    std::unique_lock<std::mutex> mine(jobs_, std::try_to_lock);
    if (!mine) return work(context, 0, total);
    if (workers_.empty())
      for (int i = 1; i < size(); ++i) workers_.emplace_back([this, i] { serve(i); });
    total_ = total, grain_ = grain, work_ = work, context_ = context;
    done_.store(0, std::memory_order_relaxed);
    job_.store(++last_job_ << PIECE_BITS | uint64_t(pieces), std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      { std::lock_guard<std::mutex> lock(sleep_); }
      wake_.notify_all();
    }
    take_pieces(0);
    // What is left is being worked on. A worker may have been stopped in its piece: give it the core.
    for (int looks = 0; done_.load(std::memory_order_acquire) != pieces; ++looks) {
      if (looks < 100 * LOOKS) relax();
      else std::this_thread::yield();
    }
  }

 private:
  // The next piece of a thread's share, or -1.
  int64_t claim(int owner, uint64_t job, int64_t pieces) {
    const int64_t first = pieces * owner / size(), end = pieces * (owner + 1) / size();
    std::atomic<uint64_t>& share = shares_[size_t(owner)].word;
    for (uint64_t word = share.load(std::memory_order_acquire);;) {
      const uint64_t of = word >> PIECE_BITS;
      const int64_t next = of == job ? int64_t(word & PIECE_MASK) : first;
      if (of > job || next >= end) return -1;
      if (share.compare_exchange_weak(word, job << PIECE_BITS | uint64_t(next + 1), std::memory_order_acq_rel,
                                      std::memory_order_acquire))
        return next;
    }
  }

  // Pieces of the current job, the own ones first, until none is left.
  void take_pieces(int self) {
    const uint64_t word = job_.load(std::memory_order_acquire);
    const uint64_t job = word >> PIECE_BITS;
    const int64_t pieces = int64_t(word & PIECE_MASK);
    int64_t taken = 0;
    for (int i = 0; i < size(); ++i)
      for (int64_t piece; (piece = claim((self + i) % size(), job, pieces)) >= 0; ++taken) {
        const int64_t begin = piece * grain_;
        work_(context_, begin, begin + grain_ < total_ ? begin + grain_ : total_);
      }
    if (taken) done_.fetch_add(taken, std::memory_order_release);
  }

  void serve(int self) {
    uint64_t seen = 0;
    auto since = Clock::now();
    for (int looks = 1; !stopping_.load(std::memory_order_relaxed); ++looks) {
      if (const uint64_t now = job_.load(std::memory_order_acquire); now != seen) {
        seen = now;
        take_pieces(self);
        since = Clock::now(), looks = 0;
      } else if (looks % LOOKS) {
        relax();
      } else if (const auto idle = Clock::now() - since; idle < PATIENCE) {
        relax();
      } else if (idle < COURTESY) {
        std::this_thread::yield();
        looks = -1;
      } else {
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] { return stopping_.load() || job_.load(std::memory_order_seq_cst) != seen; });
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
        looks = 0;
      }
    }
  }

  std::vector<Share> shares_;  // one for each thread, the caller's first
  std::vector<std::thread> workers_;
  std::mutex jobs_;  // held while a job runs
  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};

  uint64_t last_job_ = 0;
  int64_t total_ = 0, grain_ = 1;
  Work work_ = nullptr;
  const void* context_ = nullptr;
  alignas(64) std::atomic<uint64_t> job_{0};
  alignas(64) std::atomic<int64_t> done_{0};
};

// Never destroyed at exit, when its threads may still wait in it. A fork's child has no workers, so it starts a new one.
Pool* the_pool = nullptr;

void renew_after_fork() { the_pool = new Pool(the_pool->size()); }

Pool& pool() {
  static const bool made = [] {
    the_pool = new Pool(1);
    pthread_atfork(nullptr, nullptr, renew_after_fork);
    return true;
  }();
  (void)made;
  return *the_pool;
}

}  // namespace

void parallel_for(int64_t total, int64_t grain, Work work, const void* context) { pool().run(total, grain, work, context); }

int num_threads() { return pool().size(); }

void set_threads(int num_threads) {
  num_threads = num_threads < 1 ? 1 : num_threads;
  if (num_threads == pool().size()) return;
  Pool* before = the_pool;
  the_pool = new Pool(num_threads);
  delete before;
}

}  // namespace octavo
