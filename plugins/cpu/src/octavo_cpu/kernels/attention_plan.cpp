// A step's attention cut into items and jobs: see attention.h.
#include <algorithm>

#include "attention.h"
#include "threads.h"

namespace octavo {
namespace {

constexpr int64_t LEAST_ROWS = 128;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

class Cutter {
 public:
  explicit Cutter(const AttentionPlanArgs& args) : args_(args), plan_(*args.plan) {}

  void cut() {
    plan_.sequences.clear(), plan_.items.clear();
    num_groups_ = 0, partials_ = 0;
    for (int64_t s = 0; s < args_.num_seqs; ++s)
      plan_.sequences.push_back({args_.q_starts[s], args_.q_starts[s + 1] - args_.q_starts[s], args_.kv_lens[s]});
    // Long items first: short ones level the threads at the end.
    for (int64_t s = 0; s < args_.num_seqs; ++s)
      if (rows_of(s) > FEW_ROWS) cut_many(s);
    for (int64_t s = 0; s < args_.num_seqs; ++s)
      if (rows_of(s) <= FEW_ROWS)
        for (int64_t h = 0; h < args_.num_kv_heads; ++h) add(s, h, 0, rows_of(s), PIECE_FEW);
    plan_.finished.assign(num_groups_, 0);
    if (int64_t(plan_.partials.size()) < partials_) plan_.partials.resize(partials_);
    deal();
    plan_.num_tokens = args_.num_seqs ? args_.q_starts[args_.num_seqs] : 0;
    plan_.block_table = args_.block_table, plan_.table_stride = args_.table_stride, plan_.slots = args_.slots;
  }

 private:
  int64_t rows_of(int64_t s) const { return plan_.sequences[s].q_len * args_.group; }

  void cut_many(int64_t s) {
    // Four items of a head at least, as long as they are not small, so that a short prompt has work for every thread.
    const int64_t rows = rows_of(s), most = std::clamp(rows / 4, LEAST_ROWS, MOST_ROWS), tiles = ceil_div(rows, most);
    const int64_t each = ceil_div(ceil_div(rows, tiles), 16) * 16;
    for (int64_t h = 0; h < args_.num_kv_heads; ++h)
      for (int64_t first = (ceil_div(rows, each) - 1) * each; first >= 0; first -= each)
        add(s, h, first, std::min(each, rows - first), PIECE_MANY);
  }

  void add(int64_t s, int64_t head, int64_t first_row, int64_t num_rows, int64_t most) {
    if (num_rows == 0) return;
    const Sequence& sequence = plan_.sequences[s];
    int64_t begin = 0, end = sequence.kv_len;
    if (args_.causal) {
      const int64_t before = sequence.kv_len - sequence.q_len;
      end = before + (first_row + num_rows - 1) / args_.group + 1;
      if (args_.window) begin = std::max(int64_t(0), before + first_row / args_.group + 1 - args_.window);
    }
    const int64_t pieces = ceil_div(end - begin, most), each = ceil_div(ceil_div(end - begin, pieces), 16) * 16;
    const int64_t num_pieces = ceil_div(end - begin, each);
    for (int64_t piece = 0; piece < num_pieces; ++piece) {
      const int64_t from = begin + piece * each;
      plan_.items.push_back({int32_t(s), int32_t(head), int32_t(first_row), int32_t(num_rows), from,
                             std::min(end, from + each), int32_t(piece), int32_t(num_pieces), num_groups_, partials_});
    }
    if (num_pieces > 1) ++num_groups_, partials_ += num_pieces * partial_size(num_rows, args_.head_dim);
  }

  // About eight jobs a thread, none of them below some microseconds. Reading a token costs what a product with some
  // tens of rows does.
  void deal() {
    int64_t total = 0;
    for (const Item& item : plan_.items) total += cost(item);
    const int64_t least = (1 << 20) / args_.head_dim, wanted = std::max(total / (8 * num_threads()), least);
    plan_.jobs.assign(1, 0);
    int64_t sum = 0;
    for (size_t i = 0; i < plan_.items.size(); ++i) {
      sum += cost(plan_.items[i]);
      if (sum >= wanted || i + 1 == plan_.items.size()) plan_.jobs.push_back(int64_t(i) + 1), sum = 0;
    }
  }

  static int64_t cost(const Item& item) { return (item.end - item.begin) * std::max(item.num_rows, 64); }

  const AttentionPlanArgs& args_;
  AttentionPlan& plan_;
  int32_t num_groups_ = 0;
  int64_t partials_ = 0;
};

}  // namespace
}  // namespace octavo

using namespace octavo;

AttentionPlan* octavo_attention_plan_new() { return new AttentionPlan; }
void octavo_attention_plan_free(AttentionPlan* plan) { delete plan; }
void octavo_attention_plan(const AttentionPlanArgs* args) { Cutter(*args).cut(); }
