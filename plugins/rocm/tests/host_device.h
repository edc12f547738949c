// What `gemv.hip` asks of a GPU, on a CPU: the threads of a block are fibers that take turns, so that a wave's lanes
// can exchange numbers. Compiled in front of it in place of kernels/device.h.
#include <ucontext.h>

#include <cstdlib>
#include <vector>

#define KERNEL extern "C"
#define DEVICE static inline
#define STREAM(pointer) (*(pointer))

namespace host {

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(64 * 1024);
  bool done = false;
};

struct Block {
  int index = 0, thread = 0;
  std::vector<Fiber> fibers;
  std::vector<float> numbers;
  std::vector<int> arrived;
  ucontext_t scheduler;
  void (*body)(void**) = nullptr;
  void** arguments = nullptr;
};
static Block block;

static void yield() { swapcontext(&block.fibers[block.thread].context, &block.scheduler); }

// Goes on when all lanes of the wave have come here as often as this one.
static void meet() {
  int own = block.thread, wave = own / WAVE * WAVE;
  int count = ++block.arrived[own];
  for (;;) {
    bool all = true;
    for (int lane = wave; lane < wave + WAVE; lane++) {
      bool came = block.arrived[lane] >= count;
      if (!came && block.fibers[lane].done) std::abort();  // a lane left while others exchange: undefined on a GPU
      all = all && came;
    }
    if (all) return;
    yield();
  }
}

static void enter() {
  block.body(block.arguments);
  block.fibers[block.thread].done = true;
  yield();
}

}  // namespace host

DEVICE int thread_index() { return host::block.thread; }
DEVICE int block_index() { return host::block.index; }

DEVICE float from_lane(float number, int mask) {
  int own = host::block.thread;
  host::block.numbers[own] = number;
  host::meet();
  float found = host::block.numbers[own / WAVE * WAVE + ((own % WAVE) ^ mask)];
  host::meet();
  return found;
}

// Runs a kernel, block after block. `body` unpacks the arguments.
static void run_grid(void (*body)(void**), int grid, int threads, void** arguments) {
  host::Block& b = host::block;
  b.body = body;
  b.arguments = arguments;
  b.fibers.resize(threads);
  for (b.index = 0; b.index < grid; b.index++) {
    b.numbers.assign(threads, 0.0f);
    b.arrived.assign(threads, 0);
    for (auto& fiber : b.fibers) {
      fiber.done = false;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, host::enter, 0);
    }
    for (bool busy = true; busy;) {
      busy = false;
      for (b.thread = 0; b.thread < threads; b.thread++) {
        if (b.fibers[b.thread].done) continue;
        busy = true;
        swapcontext(&b.scheduler, &b.fibers[b.thread].context);
      }
    }
  }
}
