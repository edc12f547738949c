// How a packed weight lies in memory: the same on every instruction set.
//
// A pair is 32 output rows, or with a gate 16 gate rows and the 16 rows that they gate: a left and a right panel of 16.
// One "vector" is 64 bytes: 4 bytes of each of the 16 rows. So the dot product of one vector with broadcast activations
// leaves each row's sum in its own lane, and nothing is ever summed across lanes. Rows that pad the last pair are zeros.
//
// Plain numbers (`is_dense`): a tile is 16 vectors, and tiles of the left and the right panel alternate. Columns are
// padded with zeros to whole tiles. I8 has the scales of its rows, f32[32], before the tiles of a pair.
//
//     vector of BF16, F32, I8  = rows of 2, 1, 4 columns: that is also what AMX and VNNI read as their right side
//     vector of F16            = 2 columns of 16 rows
//
// GGUF blocks (`is_blocks`): the left panel, then the right one. A group is 32 columns, a quad 4: the bytes of quad
// q of the 16 rows, at r * 4 + c, are one vector if codes have 8 bits.
//
//     group  = planes:  low 4 bits  4 vectors: vector v holds quad v in its low nibbles, quad v + 4 in its high ones
//                       1 more bit  1 vector:  bit q of a byte belongs to quad q
//                       2 more bits 2 vectors: bits 2i, 2i+1 of vector v belong to quad 4v + i
//                       8 bits      8 vectors: vector q is quad q
//     block of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0  = scale f16[16], (offset f16[16],) one group
//     block of Q4_K, Q5_K = scale f16[16], offset f16[16], then 8 x (scale u8[16], offset u8[16], group)
//     block of Q6_K       = scale f16[16], then 8 x (scale s8[2][16]: columns 0-15 and 16-31, group)
//
// So a product reads one stream.
#pragma once
#include "api.h"

namespace octavo {

constexpr int64_t PANEL = 16, GROUP = 32, QUADS = 8, VECTOR = 64, TILE = 16 * VECTOR;

// value = (code - bias) * scale (+ or - offset). super: two levels of scales over 256 columns.
struct Format {
  int bits, bias;
  bool offset, super;
  constexpr int64_t columns() const { return super ? 256 : 32; }
  constexpr int64_t group_bytes() const { return bits == 8 ? 8 * VECTOR : 4 * VECTOR + (bits - 4) * VECTOR; }
  constexpr int64_t head_bytes() const { return PANEL * 2 * (offset ? 2 : 1); }
  constexpr int64_t block_bytes() const { return head_bytes() + (super ? 8 * (2 * PANEL + group_bytes()) : group_bytes()); }
};

constexpr Format FORMATS[NUM_KINDS] = {
    {},                       // BF16
    {},                       // F32
    {4, 8, false, false},     // Q4_0
    {4, 0, true, false},      // Q4_1
    {5, 16, false, false},    // Q5_0
    {5, 0, true, false},      // Q5_1
    {8, 0, false, false},     // Q8_0, signed
    {4, 0, true, true},       // Q4_K
    {5, 0, true, true},       // Q5_K
    {6, 32, false, true},     // Q6_K
    {},                       // F16
    {},                       // I8
};

constexpr bool is_blocks(int kind) { return kind >= Q4_0 && kind <= Q6_K; }
constexpr bool is_dense(int kind) { return kind == BF16 || kind == F32 || kind == F16 || kind == I8; }

// How a product reads I8 whose activations keep their bits.
constexpr int I8_AS_F32 = NUM_KINDS, I8_AS_BF16 = NUM_KINDS + 1;
constexpr bool is_bytes(int kind) { return kind == I8 || kind >= NUM_KINDS; }

constexpr int64_t size_of(int kind) { return is_bytes(kind) ? 1 : kind == F32 ? 4 : 2; }

// Columns of a dense tile.
constexpr int64_t tile_columns(int kind) { return TILE / (PANEL * size_of(kind)); }

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t dense_head(int kind) { return is_bytes(kind) ? 2 * PANEL * 4 : 0; }

constexpr int64_t pair_bytes(int kind, int64_t num_in) {
  return is_blocks(kind) ? 2 * (num_in / FORMATS[kind].columns()) * FORMATS[kind].block_bytes()
                         : dense_head(kind) + ceil_div(num_in, tile_columns(kind)) * 2 * TILE;
}
constexpr int64_t num_pairs(int gate, int64_t num_out) { return gate ? ceil_div(num_out / 2, PANEL) : ceil_div(num_out, 2 * PANEL); }

// 32 activations as 8-bit codes: x = code * scale. `sums` of the codes of columns 0-15 and 16-31 serve the biases and
// offsets of weights. Codes are -127..127.
struct Activations {
  float scale, scaled_sum;
  int32_t sums[2];
  int8_t codes[GROUP];
};

// The scale of a whole token's codes, which are a row of bytes; and the sum of those codes.
struct TokenScale {
  float scale;
  int32_t sum;
};

}  // namespace octavo
