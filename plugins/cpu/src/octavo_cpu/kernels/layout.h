// How a packed weight lies in memory: the same on every instruction set.
//
// A panel is 16 output rows; a group is 32 columns; a quad is 4 columns. One "vector" of codes is 64 bytes: a quad of each of
// the 16 rows, byte r * 4 + c. So the dot product of one vector with four broadcast activations leaves each row's
// sum in its own lane, and nothing is ever summed across lanes.
//
//     group  = planes:  low 4 bits  4 vectors: vector v holds quad v in its low nibbles, quad v + 4 in its high ones
//                       1 more bit  1 vector:  bit q of a byte belongs to quad q
//                       2 more bits 2 vectors: bits 2i, 2i+1 of vector v belong to quad 4v + i
//                       8 bits      8 vectors: vector q is quad q
//     block of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0  = scale f16[16], (offset f16[16],) one group
//     block of Q4_K, Q5_K = scale f16[16], offset f16[16], then 8 x (scale u8[16], offset u8[16], group)
//     block of Q6_K       = scale f16[16], then 8 x (scale s8[2][16]: columns 0-15 and 16-31, group)
//
// A panel is its blocks in order, so that a product reads one stream. With a gate, panels of gate rows alternate
// with the panels of the rows they gate. Rows that pad the last panel are zeros.
#pragma once
#include "api.h"

namespace octavo {

constexpr int64_t PANEL = 16, GROUP = 32, QUADS = 8, VECTOR = 64;

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
};

constexpr bool is_packed(int kind) { return kind >= Q4_0 && kind < NUM_KINDS; }
constexpr int64_t num_panels(int64_t rows) { return (rows + PANEL - 1) / PANEL; }

// 32 activations as 8-bit codes: x = code * scale. `sums` of the codes of columns 0-15 and 16-31 serve the biases and
// offsets of weights. Codes are -127..127.
struct Activations {
  float scale, scaled_sum;
  int32_t sums[2];
  int8_t codes[GROUP];
};

}  // namespace octavo
