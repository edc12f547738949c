// Runs attention in buffers of exactly the size that api.h promises to touch: see test_cpu_sanitizers.py.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kv_cache.h"

using namespace octavo;

int main(int count, char** names) {
  const std::vector<const char*> all{"generic", "avx2", "avx512", "avx512_bf16", "amx", "neon"};
  int steps = 0;
  AttentionPlan* plan = octavo_attention_plan_new();
  for (const char* isa : count > 1 ? std::vector<const char*>(names + 1, names + count) : all) {
    if (!octavo_use_isa(isa)) continue;
    for (int threads : {1, 3})
      for (int dtype : {AS_BF16, AS_F32, AS_F16})
        for (int stored : {dtype, int(AS_E4M3), int(AS_I8)})
          for (int64_t dim : {37, 64, 80})
            for (int64_t kv_heads : {1, 2})
              for (int64_t window : {0, 9}) {
                octavo_set_threads(threads);
                const int64_t group = 3, heads = kv_heads * group, size = 16;
                const std::vector<int32_t> starts{0, 1, 2, 2, 45, 47}, lens{530, 17, 0, 60, 9};
                const int64_t width = 34, seqs = 5, tokens = 48;  // one token of padding
                std::vector<int32_t> table(seqs * width);
                int32_t blocks = 1;
                for (int64_t s = 0; s < seqs; ++s)
                  for (int64_t b = 0; b * size < lens[s]; ++b) table[s * width + b] = blocks++;
                std::vector<int64_t> slots(tokens);
                for (int64_t s = 0; s < seqs; ++s)
                  for (int64_t t = starts[s]; t < starts[s + 1]; ++t) {
                    const int64_t position = lens[s] - starts[s + 1] + t;
                    slots[t] = table[s * width + position / size] * size + position % size;
                  }
                const int64_t content = dim + (stored == AS_I8 ? 4 : 0), head = size * content, block = kv_heads * head;
                const int64_t bytes = bytes_of(dtype);
                std::vector<uint8_t> k_cache(blocks * block * bytes_of(stored)), v_cache(k_cache.size());
                std::vector<uint8_t> q(tokens * heads * dim * bytes, 0x3c), out(q.size());
                std::vector<uint8_t> k(tokens * kv_heads * dim * bytes, 0x3a), v(k.size(), 0x3b);
                std::vector<float> sinks(heads, 0.5f), scales(kv_heads, 2.0f);
                const AttentionPlanArgs cut{plan,  starts.data(), lens.data(),  seqs,  kv_heads,    group, dim,
                                            window, 1,            table.data(), width, slots.data()};
                octavo_attention_plan(&cut);
                const bool scaled = stored == AS_E4M3;
                const AttentionArgs args{plan, q.data(), k.data(), v.data(), k_cache.data(), v_cache.data(), out.data(),
                                         steps % 2 ? sinks.data() : nullptr, scaled ? scales.data() : nullptr,
                                         scaled ? scales.data() : nullptr, heads * dim, kv_heads * dim, kv_heads * dim,
                                         {stored, size, block, head, content}, tokens, heads, kv_heads, dim, window, 1,
                                         dtype, 0.125f, steps % 3 ? 0.0f : 20.0f};
                for (int layer = 0; layer < 2; ++layer) octavo_attention(&args);
                ++steps;
              }
  }
  octavo_set_threads(1);  // joins the workers
  octavo_attention_plan_free(plan);
  printf("%d steps\n", steps);
}
