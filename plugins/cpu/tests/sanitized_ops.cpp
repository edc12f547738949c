// Runs the small ops in buffers of exactly the size that api.h promises to touch: see test_cpu_sanitizers.py.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kv_cache.h"
#include "layout.h"

using namespace octavo;

template <class T>
using Buffer = std::vector<T>;
using Bytes = Buffer<uint8_t>;

// count numbers of a dtype, all small; a NaN among them if asked.
Bytes numbers(int64_t count, int dtype, bool with_nan = false) {
  Bytes all(size_t(count * bytes_of(dtype)), 0x3d);
  if (with_nan && !all.empty())
    for (int64_t i = 0; i < bytes_of(dtype); ++i) all[size_t(i)] = 0xff;
  return all;
}

int ops = 0;

void norms(int dtype, int weight_dtype, int64_t rows, int64_t width) {
  const int64_t heads = 3, gap = 5;  // rows of `heads` neighbours, then something else
  for (const bool residual : {false, true})
    for (const bool strided : {false, true}) {
      if (strided && (residual || rows % heads)) continue;
      const int64_t outer = strided ? heads * width + gap : width;
      const int64_t used = rows == 0 ? 0 : strided ? (rows / heads - 1) * outer + heads * width : rows * width;
      Bytes x = numbers(used, dtype, rows > 1), sum = numbers(rows * width, dtype), out = numbers(rows * width, dtype);
      const Bytes weight = numbers(width, weight_dtype);
      const NormArgs args{x.data(), residual ? sum.data() : nullptr, weight.data(), out.data(), rows, width,
                          strided ? heads : 1, outer, strided ? width : 0, 1e-5f, dtype, weight_dtype, 0};
      octavo_norm(&args);
      ++ops;
    }
}

void heads(int dtype, int weight_dtype, int64_t tokens, int64_t dim, int64_t rotated) {
  const int64_t q = 3, kv = 2, size = 4, blocks = 1 + tokens / size;
  for (int norm : {NO_NORM, NORM_HEAD, NORM_ROW})
    for (int stored : {-1, dtype, int(AS_E4M3), int(AS_I8)})
      for (const bool side_by_side : {false, true}) {
        const bool cached = stored >= 0;
        const int64_t content = stored == AS_I8 ? dim + 4 : dim;  // bytes have a scale behind them
        Bytes qkv = numbers(tokens * (q + 2 * kv) * dim, dtype), table = numbers(6 * rotated, dtype);
        const Bytes q_weight = numbers(norm == NORM_ROW ? q * dim : dim, weight_dtype);
        const Bytes k_weight = numbers(norm == NORM_ROW ? kv * dim : dim, weight_dtype);
        Bytes k_cache(cached ? size_t(blocks * kv * size * content * bytes_of(stored)) : 0), v_cache(k_cache.size());
        Buffer<int64_t> positions(size_t(tokens), 5), slots;
        for (int64_t t = 0; t < tokens; ++t) slots.push_back(blocks * size - 1 - t);
        const Buffer<float> scales(size_t(kv), 0.5f);
        const KVStrides strides{cached ? stored : 0, size, kv * size * content, side_by_side ? content : size * content,
                                side_by_side ? kv * content : content};
        const QkvArgs args{qkv.data(), positions.data(), rotated ? table.data() : nullptr, norm ? q_weight.data() : nullptr,
                           norm ? k_weight.data() : nullptr, cached ? k_cache.data() : nullptr,
                           cached ? v_cache.data() : nullptr, slots.data(), side_by_side && stored != AS_I8 ? scales.data() : nullptr, nullptr,
                           tokens, q, kv, dim, rotated, strides, strides, 1e-6f, 1.0f, 2.0f, dtype, weight_dtype, norm};
        octavo_qkv(&args);
        ++ops;
      }
}

void rows_of_numbers(int dtype, int64_t rows, int64_t width) {
  for (int gate : {SILU, GELU, GELU_TANH}) {
    const Bytes x = numbers(rows * 2 * width, dtype, true);
    Bytes out = numbers(rows * width, dtype);
    const GateArgs args{x.data(), out.data(), rows, width, dtype, gate};
    octavo_gate(&args);
    ++ops;
  }
  const Bytes left = numbers(rows * width, dtype), right = numbers(rows * 7, dtype), table = numbers(9 * width, dtype);
  Bytes both = numbers(rows * (width + 7), dtype);
  const int64_t size = bytes_of(dtype);
  const JoinArgs join{left.data(), right.data(), both.data(), rows, width * size, 7 * size};
  octavo_join(&join);
  const int64_t known[] = {0, 8, -1, 9, int64_t(1) << 31};
  Buffer<int64_t> wide;
  Buffer<int32_t> narrow;
  for (int64_t r = 0; r < rows; ++r) wide.push_back(known[r % 5]), narrow.push_back(int32_t(known[r % 5]));
  for (int scaled : {0, 1}) {
    Bytes out = numbers(rows * width, dtype);
    EmbeddingArgs args{wide.data(), table.data(), nullptr, out.data(), rows, width, 9, 0, 3.5f, scaled, 1, dtype};
    octavo_embedding(&args);
    args.ids = narrow.data(), args.wide_ids = 0, args.first = 1;
    octavo_embedding(&args);
    const AddArgs add{left.data(), out.data(), rows * width, 0.5f, dtype};
    octavo_add(&add);
    Buffer<float> logits(size_t(rows * width));
    const LogitsArgs finish{left.data(), logits.data(), rows * width, scaled ? 0.5f : 1.0f, scaled ? 30.0f : 0.0f, dtype, 0};
    octavo_logits(&finish);
    ops += 4;
  }
}

// Rows out of packed weights.
void look_ups(int dtype, int64_t rows) {
  const int64_t bytes_of_block[NUM_KINDS] = {0, 0, 18, 20, 22, 24, 34, 144, 176, 210, 0, 0};
  for (int kind = 0; kind < NUM_KINDS; ++kind) {
    if (kind == I8) continue;
    const int64_t k = is_blocks(kind) ? 512 : 51, n = 35;
    const int64_t row = is_blocks(kind) ? k / FORMATS[kind].columns() * bytes_of_block[kind] : k * size_of(kind);
    const Bytes numbers(size_t(n * row), 0x3d);
    Bytes weight(size_t(octavo_packed_bytes(kind, NO_GATE, n, k))), out(size_t(rows * k * bytes_of(dtype)));
    octavo_pack(kind, NO_GATE, n, k, numbers.data(), nullptr, weight.data());
    const Linear layer{kind, dtype, NO_GATE, 0, n, k, weight.data()};
    const int64_t known[] = {70, 104, 69, 105, 90};
    Buffer<int64_t> ids;
    for (int64_t r = 0; r < rows; ++r) ids.push_back(known[r % 5]);
    for (int scaled : {0, 1}) {
      const EmbeddingArgs args{ids.data(), nullptr, &layer, out.data(), rows, k, n, 70, 3.5f, scaled, 1, dtype};
      octavo_embedding(&args);
      ++ops;
    }
  }
}

void choices(int dtype, int64_t rows, int64_t vocab, int64_t stride) {
  const int64_t used = rows ? (rows - 1) * stride + vocab : 0;
  Bytes logits = numbers(used, dtype, rows > 2);
  if (dtype == AS_F32 && rows) reinterpret_cast<float*>(logits.data())[vocab - 1] = 3.0f;
  const Buffer<float> temperature(size_t(rows), 0.7f);
  Buffer<int64_t> seeds(size_t(rows), -3), order, tokens(static_cast<size_t>(rows));
  for (int64_t r = 0; r < rows; ++r) order.push_back(rows - 1 - r);
  SampleArgs args{logits.data(), temperature.data(), seeds.data(), seeds.data(), order.data(), tokens.data(), rows, vocab, stride, dtype, 0};
  octavo_sample(&args);
  args.temperature = nullptr, args.seeds = args.positions = args.rows = nullptr;
  octavo_sample(&args);
  ops += 2;
  if (dtype != AS_F32) return;
  auto* floats = reinterpret_cast<float*>(logits.data());
  for (int64_t i = 0; i < used; ++i) floats[i] = float(i * 37 % 101);
  Buffer<int64_t> top_k;
  Buffer<float> share;
  for (int64_t r = 0; r < rows; ++r) top_k.push_back(r % 4 * 3), share.push_back(0.3f * float(r % 4));
  const TopArgs top{floats, top_k.data(), share.data(), rows, vocab, stride};
  octavo_top(&top);
  const MinPArgs min_p{floats, share.data(), rows, vocab, stride};
  octavo_min_p(&min_p);
  ops += 2;
}

void table_of_requests() {
  const int64_t rows = 4, length = 20, seqs = 3, num_tokens = 7, columns = 6;  // 5 blocks of 4, and 1 of 32
  const Buffer<int32_t> groups{0, 4, 5, 32}, q_starts{0, 1, 1, 5};
  Buffer<int32_t> tokens(rows * length, 7), blocks(rows * columns, 3), ended{0, 1, 0, 0};
  Buffer<int32_t> sequences{2, 1, 0, 20, 9, 17, 1, 1, 1};
  Buffer<int32_t> ids(num_tokens), table(seqs * columns);
  Buffer<int64_t> positions(num_tokens), slots(2 * num_tokens), picks(3 * seqs);
  const BeginArgs begin{tokens.data(), blocks.data(), groups.data(), ended.data(), sequences.data(), q_starts.data(), ids.data(),
                        positions.data(), slots.data(), table.data(), picks.data(), num_tokens, seqs, rows, columns, 2,
                        length, seqs, num_tokens, columns, seqs};
  octavo_begin(&begin);
  const Buffer<int32_t> limits{0, 18, 0, 9, 0, 20, 0, 0}, stops(rows * 2, 5);
  const Buffer<int64_t> chosen{5, -1, 6};
  for (int64_t s = 0; s < seqs; ++s)
    if (picks[2 * seqs + s] >= length) picks[2 * seqs + s] = length - 1;  // a full row chooses no more
  const CommitArgs commit{tokens.data(), ended.data(), limits.data(), stops.data(), chosen.data(), picks.data(), seqs, 2, length, seqs};
  octavo_commit(&commit);
  ops += 2;
}

int main(int count, char** names) {
  const Buffer<const char*> all{"generic", "avx2", "avx512", "avx512_bf16", "amx", "neon"};
  for (const char* isa : count > 1 ? Buffer<const char*>(names + 1, names + count) : all) {
    if (!octavo_use_isa(isa)) continue;
    for (int threads : {1, 3}) {
      octavo_set_threads(threads);
      table_of_requests();
      for (int64_t rows : {0, 1, 40}) look_ups(AS_F16, rows);
      for (int dtype : {AS_BF16, AS_F32}) {
        for (int64_t rows : {0, 1, 3, 90})
          for (int64_t width : {1, 16, 37, 1100}) {
            for (int weight_dtype : {AS_BF16, AS_F32}) norms(dtype, weight_dtype, rows, width);
            rows_of_numbers(dtype, rows, width);
          }
        for (int64_t tokens : {0, 1, 40})
          for (int64_t dim : {24, 64, 80})
            for (int64_t rotated : {int64_t(0), int64_t(24), dim})
              for (int weight_dtype : {AS_BF16, AS_F32}) heads(dtype, weight_dtype, tokens, dim, rotated);
        for (int64_t rows : {0, 1, 40}) look_ups(dtype, rows);
        for (int64_t rows : {0, 1, 5})
          for (int64_t vocab : {1, 15, 300, 16384, 33001}) choices(dtype, rows, vocab, vocab + (rows % 2 ? 3 : 0));
      }
    }
  }
  octavo_set_threads(1);  // joins the workers
  printf("%d ops\n", ops);
}
