// The entry point of attention: new keys and values into the cache, then the items of the plan, then padding.
#include "attention.h"

#include "isa.h"

namespace octavo {
namespace {

void write_tokens(const void* context, int64_t begin, int64_t end) {
  const AttentionArgs& args = *static_cast<const AttentionArgs*>(context);
  const int64_t* slots = args.plan->slots;
  const int64_t size = bytes_of(args.dtype);
  for (int64_t t = begin; t < end; ++t)
    for (int64_t h = 0; h < args.num_kv_heads; ++h) {
      const int64_t k = (t * args.k_stride + h * args.head_dim) * size, v = (t * args.v_stride + h * args.head_dim) * size;
      write_row(cache_row(args.k_cache, args.kv, slots[t], h), args.kv.dtype, static_cast<const uint8_t*>(args.k) + k,
                args.dtype, args.head_dim, args.k_scales ? args.k_scales[h] : 1.0f);
      write_row(cache_row(args.v_cache, args.kv, slots[t], h), args.kv.dtype, static_cast<const uint8_t*>(args.v) + v,
                args.dtype, args.head_dim, args.v_scales ? args.v_scales[h] : 1.0f);
    }
}

}  // namespace
}  // namespace octavo

using namespace octavo;

void octavo_attention(const AttentionArgs* args) {
  // Some 10 us of copying each.
  if (args->k) parallel_for(args->num_tokens, 1 + (1 << 15) / (args->num_kv_heads * args->head_dim), write_tokens, args);
  const AttentionPlan& plan = *args->plan;
  parallel_for(int64_t(plan.jobs.size()) - 1, 1, chosen_isa().attend, args);
  const int64_t width = args->num_heads * args->head_dim * bytes_of(args->dtype);
  const int64_t padding = args->num_tokens - plan.num_tokens;
  if (padding > 0) memset(static_cast<uint8_t*>(args->out) + plan.num_tokens * width, 0, size_t(padding * width));
}
