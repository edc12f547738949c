// Runs every kind of product in buffers of exactly the size that api.h promises to touch: see test_cpu_native.py.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "layout.h"

using namespace octavo;

int main() {
  int products = 0;
  const int64_t bytes_of_block[NUM_KINDS] = {0, 0, 18, 20, 22, 24, 34, 144, 176, 210};
  for (const char* isa : {"generic", "avx2", "avx512"}) {
    if (!octavo_use_isa(isa)) continue;
    for (int threads : {1, 3}) {
      octavo_set_threads(threads);
      for (int kind = 0; kind < NUM_KINDS; ++kind)
        for (int dtype = 0; dtype < 2; ++dtype)
          for (int gate = 0; gate < 4; ++gate)
            for (int64_t n : {2, 34, 400})
              for (int64_t tokens : {0, 1, 3, 15}) {
                if (!is_packed(kind) && kind != dtype) continue;
                const int64_t k = is_packed(kind) ? 512 : 51, size = dtype == AS_BF16 ? 2 : 4;
                std::vector<uint8_t> weight;
                if (is_packed(kind)) {
                  std::vector<uint8_t> rows(n * (k / FORMATS[kind].columns()) * bytes_of_block[kind]);
                  for (auto& byte : rows) byte = uint8_t(rand());
                  weight.resize(octavo_packed_bytes(kind, gate, n, k));
                  octavo_pack(kind, gate, n, k, rows.data(), weight.data());
                } else {
                  weight.resize(n * k * size, 0x3e);
                }
                std::vector<uint8_t> x(tokens * k * size, 0x3f), y(tokens * n * size / (gate ? 2 : 1)), bias(n * size, 0x3e);
                if (!x.empty()) x[1] = x[2] = x[3] = 0xff;  // a NaN among them
                const Linear layer{kind, dtype, gate, 0, n, k, weight.data()};
                const LinearArgs args{&layer, x.data(), tokens % 2 ? bias.data() : nullptr, y.data(), tokens};
                octavo_linear(&args);
                ++products;
              }
    }
  }
  octavo_set_threads(1);  // joins the workers
  printf("%d products\n", products);
}
