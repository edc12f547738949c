// The entry points: which instruction set runs, and a product shared out over threads.
#include <cstdlib>
#include <cstring>

#include "isa.h"

namespace octavo {
namespace {

bool cpu_has(const char* name) {
  if (!strcmp(name, "generic")) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!strcmp(name, "avx2")) return avx2;
  if (!strcmp(name, "avx512"))
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
#endif
  return false;
}

// Best last.
const Isa* const ALL[] = {
    &GENERIC,
#if defined(__x86_64__)
    &AVX2, &AVX512,
#endif
};

const Isa* find(const char* name) {
  const Isa* found = nullptr;
  for (const Isa* isa : ALL)
    if (cpu_has(isa->name) && (!*name || !strcmp(name, isa->name))) found = isa;
  return found;
}

const Isa* chosen = find("");

// Grows to the largest product of its thread and stays: no allocation in a step.
class Scratch {
 public:
  ~Scratch() { free(memory_); }
  void* of(size_t bytes) {
    if (bytes > size_) {
      free(memory_);
      size_ = (bytes + 4095) / 4096 * 4096;
      memory_ = aligned_alloc(64, size_);
      if (!memory_) abort();
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
};

thread_local Scratch scratch;

// Tokens of one pass: bounds the scratch memory.
constexpr int64_t PASS = 256;

// About 10 us of work: what a piece must be worth, and below it the other threads are left alone.
constexpr int64_t PIECE_WORK = 1 << 16;

int64_t grain_for(int64_t total, int64_t work_each) {
  const int64_t even = total / (4 * int64_t(num_threads())), least = PIECE_WORK / (work_each + 1) + 1;
  return even > least ? even : least;
}

}  // namespace

const Isa& chosen_isa() { return *chosen; }

}  // namespace octavo

using namespace octavo;

int octavo_abi() { return OCTAVO_ABI; }

int octavo_use_isa(const char* name) {
  const Isa* found = find(name);
  if (found) chosen = found;
  return found != nullptr;
}

const char* octavo_isa() { return chosen->name; }

void octavo_set_threads(int count) { set_threads(count); }

void octavo_linear(const LinearArgs* args) {
  const Isa& isa = *chosen;
  const Linear* layer = args->layer;
  const int64_t num_tokens = args->num_tokens;
  const int64_t num_in = layer->num_in, width = layer->gate ? layer->num_out / 2 : layer->num_out;
  const int64_t size = layer->dtype == AS_BF16 ? 2 : 4;
  const bool packed = is_packed(layer->kind);
  for (int64_t done = 0; done < num_tokens; done += PASS) {
    const int64_t tokens = num_tokens - done < PASS ? num_tokens - done : PASS;
    Product job{layer, static_cast<const uint8_t*>(args->x) + done * num_in * size, nullptr, args->bias,
                static_cast<uint8_t*>(args->y) + done * width * size, tokens};
    if (!packed && layer->dtype == AS_F32) {
      job.prepared = const_cast<void*>(job.x);  // they are float32 already
    } else {
      job.prepared = scratch.of(packed ? tokens * (num_in / GROUP) * sizeof(Activations) : tokens * num_in * 4);
      parallel_for(tokens, grain_for(tokens, num_in), isa.prepare, &job);
    }
    const int64_t panels = num_panels(width);
    parallel_for(panels, grain_for(panels, PANEL * num_in * tokens * (layer->gate ? 2 : 1) / 4), isa.multiply, &job);
  }
}
