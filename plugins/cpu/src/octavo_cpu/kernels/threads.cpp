#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {
namespace {

// How often an idle worker looks before it sleeps: some 50 us. A decode step has its next product by then; an idle
// server leaves the core to the processes beside it.
constexpr int SPINS = 2000;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The job's state is one word, so that claiming a piece checks at once that it is still this job's:
//
//     63 .. 48 | 47 .. 24 | 23 .. 0
//     job      | pieces   | next piece
//
// A job's other fields are written before the word and stand until all its pieces are done.
constexpr int PIECE_BITS = 24;
constexpr uint64_t PIECE_MASK = (uint64_t(1) << PIECE_BITS) - 1;

class Pool {
 public:
  void resize(int threads) {
    std::lock_guard<std::mutex> alone(jobs_);
    threads = threads < 1 ? 1 : threads;
    if (threads == threads_) return;
    stop();
    threads_ = threads;
  }

  int size() const { return threads_.load(std::memory_order_relaxed); }

  void run(int64_t total, int64_t grain, Work work, const void* context) {
    if (total <= 0) return;
    grain = grain < 1 ? 1 : grain;
    if ((total + grain - 1) / grain > int64_t(PIECE_MASK)) grain = total / int64_t(PIECE_MASK) + 1;
    const uint64_t pieces = uint64_t((total + grain - 1) / grain);
    std::unique_lock<std::mutex> mine(jobs_, std::try_to_lock);
    if (pieces == 1 || !mine || threads_ == 1) return work(context, 0, total);
    if (workers_.empty()) start();
    total_ = total, grain_ = grain, work_ = work, context_ = context;
    done_.store(0, std::memory_order_relaxed);
    ++job_;
    state_.store(uint64_t(job_) << 48 | pieces << PIECE_BITS, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      { std::lock_guard<std::mutex> lock(sleep_); }
      wake_.notify_all();
    }
    while (take_piece()) {
    }
    // What is left is being worked on. A worker may have been stopped in its piece: give it the core.
    for (int i = 0; done_.load(std::memory_order_acquire) != pieces; ++i) {
      if (i < SPINS) relax();
      else std::this_thread::yield();
    }
  }

 private:
  bool has_piece() const {
    const uint64_t s = state_.load(std::memory_order_seq_cst);
    return (s & PIECE_MASK) < (s >> PIECE_BITS & PIECE_MASK);
  }

  bool take_piece() {
    uint64_t s = state_.load(std::memory_order_acquire);
    do {
      if ((s & PIECE_MASK) >= (s >> PIECE_BITS & PIECE_MASK)) return false;
    } while (!state_.compare_exchange_weak(s, s + 1, std::memory_order_acq_rel, std::memory_order_acquire));
    const int64_t begin = int64_t(s & PIECE_MASK) * grain_;
    work_(context_, begin, begin + grain_ < total_ ? begin + grain_ : total_);
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  void start() {
    stopping_.store(false);
    for (int i = 1; i < threads_; ++i) workers_.emplace_back([this] { serve(); });
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(sleep_);
      stopping_.store(true);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
  }

  void serve() {
    for (int idle = 0; !stopping_.load(std::memory_order_relaxed);) {
      if (take_piece()) {
        idle = 0;
      } else if (++idle < SPINS) {
        relax();
      } else {
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [this] { return stopping_.load() || has_piece(); });
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
        idle = 0;
      }
    }
  }

  std::mutex jobs_;  // held while a job runs
  std::atomic<int> threads_{1};
  std::vector<std::thread> workers_;
  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};

  uint16_t job_ = 0;
  int64_t total_ = 0, grain_ = 1;
  Work work_ = nullptr;
  const void* context_ = nullptr;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<uint64_t> done_{0};
};

// Never destroyed: at exit its threads may still wait in it. A fork's child has no workers, so it starts a new one.
Pool* the_pool = nullptr;

void renew_after_fork() {
  const int threads = the_pool->size();
  the_pool = new Pool;
  the_pool->resize(threads);
}

Pool& pool() {
  static const bool made = [] {
    the_pool = new Pool;
    pthread_atfork(nullptr, nullptr, renew_after_fork);
    return true;
  }();
  (void)made;
  return *the_pool;
}

}  // namespace

void parallel_for(int64_t total, int64_t grain, Work work, const void* context) { pool().run(total, grain, work, context); }
void set_threads(int num_threads) { pool().resize(num_threads); }
int num_threads() { return pool().size(); }

}  // namespace octavo
