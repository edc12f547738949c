// From sums to outputs: scales, bias, gate, and rounding to the output's numbers.
#pragma once
#include "activation.h"
#include "prepare.h"

namespace {

inline void store_row(int dtype, void* row, int64_t i, F x) {
  if (dtype == AS_F32) return Simd::store(static_cast<float*>(row) + i, x);
  uint16_t* half = static_cast<uint16_t*>(row) + i;
  if (dtype == AS_BF16) Simd::store_bf16(half, x);
  else Simd::store_half(half, x);
}

inline void store_some(int dtype, void* row, int64_t first, int64_t count, F x) {
  if (count >= PANEL) return store_row(dtype, row, first, x);
  if (count <= 0) return;
  const int64_t size = dtype_bytes(dtype);
  alignas(64) uint8_t all[PANEL * 4];
  store_row(dtype, all, 0, x);
  memcpy(static_cast<uint8_t*>(row) + first * size, all, size_t(count * size));
}

// x as the dtype holds it.
inline F rounded(int dtype, F x) {
  if (dtype == AS_F32) return x;
  alignas(64) uint8_t bits[PANEL * 4];
  store_row(dtype, bits, 0, x);
  return load_row(dtype, bits, 0);
}

// The outputs of one pair of panels.
class Finish {
 public:
  Finish(const Product& job, int64_t pair) : job_(job), layer_(*job.layer) {
    width_ = layer_.gate ? layer_.num_out / 2 : layer_.num_out;
    first_[0] = layer_.gate ? pair * PANEL : pair * 2 * PANEL;
    first_[1] = layer_.gate ? width_ + first_[0] : first_[0] + PANEL;
    count_ = width_ - first_[0];
    for (int side = 0; side < 2; ++side) {
      const int64_t count = layer_.gate || side == 0 ? count_ : count_ - PANEL;
      bias_[side] = job.bias ? load_some(layer_.dtype, job.bias, first_[side], count) : Simd::set1(0.0f);
    }
  }

  // left, right: the sums of token t, a panel each.
  void operator()(int64_t t, F left, F right) const {
    const int dtype = layer_.dtype;
    uint8_t* row = static_cast<uint8_t*>(job_.y) + t * width_ * dtype_bytes(dtype);
    if (job_.bias) left = Simd::add(left, bias_[0]), right = Simd::add(right, bias_[1]);
    if (layer_.gate) {  // rounded where the product and the activation alone would be
      const F gate = rounded(dtype, activate(layer_.gate, rounded(dtype, left)));
      return store_some(dtype, row, first_[0], count_, Simd::mul(gate, rounded(dtype, right)));
    }
    store_some(dtype, row, first_[0], count_, left);
    store_some(dtype, row, first_[1], count_ - PANEL, right);
  }

 private:
  const Product& job_;
  const Linear& layer_;
  int64_t width_, first_[2], count_;
  F bias_[2];
};

// Sums as they are; those of 8-bit codes times the scales of their row (at the head of the pair) and token.
template <int KIND>
class Scaled {
 public:
  Scaled(const Product&, const uint8_t*) {}
  F operator()(int64_t, int, F sum) const { return sum; }
};

template <>
class Scaled<I8> {
 public:
  Scaled(const Product& job, const uint8_t* pair)
      : tokens_(job.scales),
        rows_{Simd::load(reinterpret_cast<const float*>(pair)), Simd::load(reinterpret_cast<const float*>(pair) + PANEL)} {}
  F operator()(int64_t t, int side, Simd::I sum) const {
    return Simd::mul(Simd::to_float(sum), Simd::mul(rows_[side], Simd::set1(tokens_[t].scale)));
  }

 private:
  const TokenScale* tokens_;
  F rows_[2];
};

}  // namespace
