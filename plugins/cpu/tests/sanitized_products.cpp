// Runs every kind of product in buffers of exactly the size that api.h promises to touch: see test_cpu_sanitizers.py.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "layout.h"

using namespace octavo;

int main(int count, char** names) {
  const std::vector<const char*> all{"generic", "avx2", "avx512", "avx512_bf16", "amx", "neon"};
  int products = 0;
  const int64_t bytes_of_block[NUM_KINDS] = {0, 0, 18, 20, 22, 24, 34, 144, 176, 210, 0, 0};
  for (const char* isa : count > 1 ? std::vector<const char*>(names + 1, names + count) : all) {
    if (!octavo_use_isa(isa)) continue;
    for (int threads : {1, 3}) {
      octavo_set_threads(threads);
      for (int kind = 0; kind < NUM_KINDS; ++kind)
        for (int dtype : {AS_BF16, AS_F32, AS_F16})
          for (int gate : {NO_GATE, SILU, GELU, GELU_TANH})
            for (int exact : {0, 1})
              for (int64_t n : {2, 34, 400})
                for (int64_t tokens : {0, 1, 3, 15, 37}) {
                  const int plain = dtype == AS_BF16 ? BF16 : dtype == AS_F32 ? F32 : F16;
                  if (!is_blocks(kind) && kind != I8 && (exact || kind != plain)) continue;
                  const int64_t k = is_blocks(kind) ? 512 : 51, size = dtype == AS_F32 ? 4 : 2;
                  const int64_t row = is_blocks(kind) ? k / FORMATS[kind].columns() * bytes_of_block[kind] : k * size_of(kind);
                  std::vector<uint8_t> rows(n * row);
                  for (auto& byte : rows) byte = is_blocks(kind) ? uint8_t(rand()) : 0x3e;
                  std::vector<float> scales(n, 0.01f);
                  std::vector<uint8_t> weight(octavo_packed_bytes(kind, gate, n, k));
                  octavo_pack(kind, gate, n, k, rows.data(), scales.data(), weight.data());
                  std::vector<uint8_t> x(tokens * k * size, 0x3f), y(tokens * n * size / (gate ? 2 : 1)), bias(n * size, 0x3e);
                  if (!x.empty()) x[1] = x[2] = x[3] = 0xff;  // a NaN among them
                  const Linear layer{kind, dtype, gate, exact, n, k, weight.data()};
                  const LinearArgs args{&layer, x.data(), tokens % 2 ? bias.data() : nullptr, y.data(), tokens};
                  octavo_linear(&args);
                  ++products;
                }
    }
  }
  octavo_set_threads(1);  // joins the workers
  printf("%d products\n", products);
}
