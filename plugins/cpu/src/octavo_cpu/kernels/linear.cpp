// The entry points: which instruction set runs, and a product shared out over threads.
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <cstring>

#include "isa.h"
#include "scratch.h"

namespace octavo {
namespace {

#if defined(__x86_64__)
// The tiles' memory is large enough that Linux gives it only to processes that ask; their threads inherit the grant.
bool has_amx() {
#if defined(__linux__)
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned BF16_BIT = 1u << 22, TILE_BIT = 1u << 24, INT8_BIT = 1u << 25, ALL_BITS = BF16_BIT | TILE_BIT | INT8_BIT;
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return (d & ALL_BITS) == ALL_BITS && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return false;
#endif
}
#endif

bool cpu_has(const char* name) {
  if (!strcmp(name, "generic")) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!strcmp(name, "avx2")) return avx2;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  if (!strcmp(name, "avx512")) return avx512;
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  if (!strcmp(name, "avx512_bf16")) return bf16;
  if (!strcmp(name, "amx")) return bf16 && has_amx();
#elif defined(__aarch64__)
#if defined(__linux__)
  if (!strcmp(name, "neon")) return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  if (!strcmp(name, "neon")) return true;  // every Apple processor multiplies bytes
#endif
#endif
  return false;
}

// Best last.
const Isa* const ALL[] = {
    &GENERIC,
#if defined(__x86_64__)
    &AVX2, &AVX512, &AVX512_BF16, &AMX,
#elif defined(__aarch64__)
    &NEON,
#endif
};

const Isa* find(const char* name) {
  const Isa* found = nullptr;
  for (const Isa* isa : ALL)
    if (cpu_has(isa->name) && (!*name || !strcmp(name, isa->name))) found = isa;
  return found;
}

const Isa* chosen = find("");

thread_local Scratch scratch;

// Bytes of weight that one core reads, and multiply-adds that it makes, in a nanosecond, roughly.
constexpr int64_t BYTES_PER_NS = 16, PRODUCTS_PER_NS = 256;

// What a piece must be worth: below it the other threads are left alone.
constexpr int64_t PIECE_NS = 3000;

// Pieces of equal size, a few for each thread.
int64_t grain_for(int64_t total, int64_t ns_each) {
  const int64_t most = 4 * int64_t(num_threads()), worth = total * ns_each / PIECE_NS;
  const int64_t pieces = worth < 1 ? 1 : worth < most ? worth : most;
  return ceil_div(total, pieces);
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
  const Linear& layer = *args->layer;
  const int64_t width = layer.gate ? layer.num_out / 2 : layer.num_out, size = layer.dtype == AS_F32 ? 4 : 2;
  const int64_t pairs = num_pairs(layer.gate, layer.num_out), most = isa.most_tokens(layer);
  for (int64_t done = 0, tokens; done < args->num_tokens; done += tokens) {
    tokens = args->num_tokens - done < most ? args->num_tokens - done : most;
    const auto* x = static_cast<const uint8_t*>(args->x) + done * layer.num_in * size;
    Product job{&layer, x, args->bias, static_cast<uint8_t*>(args->y) + done * width * size, tokens, AS_THEY_ARE, 0, x, nullptr};
    isa.plan(job);
    if (job.form != AS_THEY_ARE) {
      const int64_t bytes = ceil_div(tokens * job.stride, VECTOR) * VECTOR;
      auto* memory = static_cast<uint8_t*>(scratch.of(size_t(bytes + (job.form == BYTES ? tokens * int64_t(sizeof(TokenScale)) : 0))));
      job.rows = memory;
      job.scales = reinterpret_cast<TokenScale*>(memory + bytes);
      parallel_for(tokens, grain_for(tokens, layer.num_in * size / BYTES_PER_NS), isa.prepare, &job);
    }
    const int64_t pair_ns = pair_bytes(layer.kind, layer.num_in) / BYTES_PER_NS + 2 * PANEL * layer.num_in * tokens / PRODUCTS_PER_NS;
    parallel_for(pairs, grain_for(pairs, pair_ns), isa.multiply, &job);
  }
}
