// One item of a step's attention, from queries to answers: the loop that both ways of reading the context share.
#pragma once
#include <algorithm>

#include "attention_direct.h"
#include "attention_packed.h"
#include "isa.h"

namespace {

using octavo::AttentionArgs;
using octavo::AttentionPlan;
using octavo::Item;
using octavo::Sequence;

thread_local octavo::Scratch attention_scratch;

template <class M, class T>
class Attend {
 public:
  // next: the item that this thread takes afterwards, if it reads where keys and values lie; or null.
  Attend(const AttentionArgs& args, const Item& item, const Item* next)
      : args_(args), item_(item), next_(next), plan_(*args.plan), sequence_(plan_.sequences[item.sequence]),
        dim_(args.head_dim), width_((dim_ + 31) / 32 * 32), group_(args.num_heads / args.num_kv_heads),
        space_(attention_scratch, width_) {}

  void run() {
    take_queries();
    if (item_.num_rows <= octavo::FEW_ROWS) walk<Direct<M, T>>();
    else walk<Packed<M, T>>();
    if (item_.num_pieces == 1) return finish();
    leave();
    int32_t& finished = args_.plan->finished[item_.group];
    if (__atomic_add_fetch(&finished, 1, __ATOMIC_ACQ_REL) < item_.num_pieces) return;
    finished = 0;
    add_up();
    finish();
  }

 private:
  // Of row r in q and out, both of heads of `dim` side by side.
  int64_t at(int64_t r, int64_t stride) const {
    const int64_t row = item_.first_row + r;
    return (sequence_.first_token + row / group_) * stride + (item_.head * group_ + row % group_) * dim_;
  }

  void take_queries() {
    const int64_t rows = item_.num_rows, size = octavo::bytes_of(args_.dtype);
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* q = static_cast<const uint8_t*>(args_.q) + at(r, args_.q_stride) * size;
      typename M::Number* to = space_.queries + r * width_;
      for (int64_t d = 0; d < width_; d += 16) {
        const int64_t left = dim_ - d;
        M::store(to + d, left > 0 ? load_numbers(args_.dtype, q, d, left < 16 ? left : 16) : Simd::set1(0.0f));
      }
      space_.largest[r] = -INFINITY, space_.total[r] = 0.0f;
    }
    if (rows > octavo::FEW_ROWS)
      memset(static_cast<void*>(space_.queries + rows * width_), 0,
             size_t((15 & -rows) * width_) * sizeof(typename M::Number));
    memset(space_.answers, 0, size_t((rows + 15) / 16 * 16 * width_) * sizeof(float));
  }

  Softmax softmax() const {
    const float scale = args_.scale * (args_.k_scales ? args_.k_scales[item_.head] : 1.0f);
    const int64_t before = sequence_.kv_len - sequence_.q_len;
    const bool capped = args_.softcap != 0.0f;
    // Row 0 may be in the middle of its token: rows are counted from that token's first one.
    return {before, group_, args_.window, args_.causal != 0, scale * LOG2_E * (capped ? 2.0f / args_.softcap : 1.0f),
            args_.softcap * LOG2_E, item_.first_row, nullptr, nullptr};
  }

  // The tokens that follow a tile are located too, those of the next item among them, so that they can be fetched.
  template <class Read>
  void walk() {
    Softmax softmax = this->softmax();
    const T* keys = static_cast<const T*>(args_.k_cache);
    const T* values = static_cast<const T*>(args_.v_cache);
    for (int64_t begin = item_.begin; begin < item_.end; begin += STRETCH) {
      const int64_t end = std::min(begin + STRETCH, item_.end), beyond = std::min(end + FETCHED, item_.end);
      locate(item_, begin, beyond, space_.offsets);
      int64_t located = beyond - begin;
      if (end == item_.end && next_) {
        const int64_t stop = std::min(next_->begin + FETCHED, next_->end);
        locate(*next_, next_->begin, stop, space_.offsets + located);
        located += stop - next_->begin;
      }
      for (int64_t t = begin; t < end; t += Read::TOKENS) {
        const int64_t count = std::min(Read::TOKENS, end - t), after = t - begin + count;
        const Tile<T> tile{keys, values, space_.offsets + (t - begin), count, std::min(FETCHED, located - after), dim_, width_};
        if constexpr (SCALE_BYTES<T> > 0) take_scales(tile, softmax);
        Read::run(tile, space_, softmax, item_.num_rows, t);
      }
    }
  }

  void take_scales(const Tile<T>& tile, Softmax& softmax) {
    for (int64_t i = 0; i < tile.count; ++i) {
      memcpy(space_.key_scales + i, tile.keys + tile.offsets[i] + dim_, sizeof(float));
      memcpy(space_.value_scales + i, tile.values + tile.offsets[i] + dim_, sizeof(float));
    }
    for (int64_t i = tile.count; i < up(tile.count, 32); ++i) space_.key_scales[i] = space_.value_scales[i] = 0.0f;
    softmax.key_scales = space_.key_scales, softmax.value_scales = space_.value_scales;
  }

  // Where keys and values of an item's tokens begin.
  void locate(const Item& item, int64_t begin, int64_t end, int64_t* offsets) const {
    const int32_t* table = plan_.block_table + item.sequence * plan_.table_stride;
    const int64_t size = args_.kv.block_size;
    for (int64_t t = begin; t < end;) {
      int64_t offset = table[t / size] * args_.kv.block + item.head * args_.kv.head + t % size * args_.kv.token;
      const int64_t stop = std::min((t / size + 1) * size, end);
      for (; t < stop; ++t, offset += args_.kv.token) *offsets++ = offset;
    }
  }

  // -- partial answers: of each piece [rows][dim], then [rows] largest and [rows] total --

  float* partial(int64_t piece) const {
    return args_.plan->partials.data() + item_.partial + piece * octavo::partial_size(item_.num_rows, dim_);
  }

  void leave() const {
    float* to = partial(item_.piece);
    for (int64_t r = 0; r < item_.num_rows; ++r, to += dim_)
      memcpy(to, space_.answers + r * width_, size_t(dim_) * sizeof(float));
    memcpy(to, space_.largest, size_t(item_.num_rows) * sizeof(float));
    memcpy(to + item_.num_rows, space_.total, size_t(item_.num_rows) * sizeof(float));
  }

  void add_up() {
    const int64_t rows = item_.num_rows;
    for (int64_t r = 0; r < rows; ++r) {
      float largest = -INFINITY, total = 0.0f;
      float* answer = space_.answers + r * width_;
      for (int64_t piece = 0; piece < item_.num_pieces; ++piece) {
        const float one = partial(piece)[rows * dim_ + r];
        if (!(one <= largest)) largest = one;
      }
      memset(answer, 0, size_t(width_) * sizeof(float));
      for (int64_t piece = 0; piece < item_.num_pieces; ++piece) {
        const float* from = partial(piece);
        const float one = from[rows * dim_ + r], share = one == -INFINITY ? 0.0f : std::exp2(one - largest);
        if (share == 0.0f) continue;
        total += share * from[rows * dim_ + rows + r];
        for (int64_t d = 0; d < dim_; ++d) answer[d] += share * from[r * dim_ + d];
      }
      space_.largest[r] = largest, space_.total[r] = total;
    }
  }

  // Divides by the weights, a sink among them, and writes the rows out.
  void finish() {
    const int64_t size = octavo::bytes_of(args_.dtype), stride = args_.num_heads * dim_;
    for (int64_t r = 0; r < item_.num_rows; ++r) {
      float total = space_.total[r], scale = args_.v_scales ? args_.v_scales[item_.head] : 1.0f;
      if (args_.sinks) {
        const int64_t head = item_.head * group_ + (item_.first_row + r) % group_;
        const float sink = args_.sinks[head] * LOG2_E, largest = std::fmax(space_.largest[r], sink);
        const float shrink = std::exp2(space_.largest[r] - largest);
        total = total * shrink + std::exp2(sink - largest), scale *= shrink;
      }
      const F factor = Simd::set1(total == 0.0f ? 0.0f : scale / total);
      uint8_t* out = static_cast<uint8_t*>(args_.out) + at(r, stride) * size;
      for (int64_t d = 0; d < dim_; d += 16)
        store_numbers(args_.dtype, out, d, dim_ - d < 16 ? dim_ - d : 16,
                      Simd::mul(Simd::load(space_.answers + r * width_ + d), factor));
    }
  }

  const AttentionArgs& args_;
  const Item& item_;
  const Item* const next_;
  const AttentionPlan& plan_;
  const Sequence& sequence_;
  const int64_t dim_, width_, group_;
  Space<M> space_;
};

template <class M, class T>
void attend_items(const AttentionArgs& args, int64_t begin, int64_t end) {
  const Item* items = args.plan->items.data();
  for (int64_t i = begin; i < end; ++i) {
    const bool fetches = i + 1 < end && items[i + 1].num_rows <= octavo::FEW_ROWS;
    Attend<M, T>(args, items[i], fetches ? items + i + 1 : nullptr).run();
  }
}

// Over the jobs of a plan.
void attend(const void* context, int64_t begin, int64_t end) {
  const AttentionArgs& args = *static_cast<const AttentionArgs*>(context);
  const int64_t first = args.plan->jobs[begin], last = args.plan->jobs[end];
#if defined(__AMX_BF16__)
  const AmxTiles tiles(16);
#endif
#if defined(__AVX512BF16__)
  if (args.dtype == octavo::AS_BF16) {
    if (args.kv.dtype == octavo::AS_BF16) return attend_items<Brains, Brain>(args, first, last);
    if (args.kv.dtype == octavo::AS_E4M3) return attend_items<Brains, Tiny>(args, first, last);
    if (args.kv.dtype == octavo::AS_I8) return attend_items<Brains, Code>(args, first, last);
  }
#endif
  switch (args.kv.dtype) {
    case octavo::AS_BF16: return attend_items<Exact, Brain>(args, first, last);
    case octavo::AS_F16: return attend_items<Exact, Half>(args, first, last);
    case octavo::AS_E4M3: return attend_items<Exact, Tiny>(args, first, last);
    case octavo::AS_I8: return attend_items<Exact, Code>(args, first, last);
    default: return attend_items<Exact, float>(args, first, last);
  }
}

}  // namespace
