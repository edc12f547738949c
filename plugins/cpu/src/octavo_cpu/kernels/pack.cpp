// Plain numbers and GGUF blocks into panels, at load. Block layouts: ggml's `ggml-common.h`, decoders its `ggml-quants.c`.
#include <sys/mman.h>

#include <cstring>

#include "layout.h"
#include "threads.h"

namespace octavo {
namespace {

// One block of one row, decoded as far as it stays integers.
struct Block {
  uint8_t codes[256];  // unsigned, but for Q8_0
  uint8_t scale[16], offset[8];
  uint16_t half_scale, half_offset;
};

uint16_t half(const uint8_t* p) {
  uint16_t h;
  memcpy(&h, p, 2);
  return h;
}

void nibbles(const uint8_t* from, int count, uint8_t* to) {
  for (int i = 0; i < count; ++i) to[i] = from[i] & 15, to[i + count] = from[i] >> 4;
}

void five_bit(const uint8_t* high, const uint8_t* low, Block& b) {
  uint32_t bits;
  memcpy(&bits, high, 4);
  nibbles(low, 16, b.codes);
  for (int i = 0; i < 32; ++i) b.codes[i] |= (bits >> i & 1) << 4;
}

// The eight 6-bit scales and offsets of Q4_K and Q5_K in 12 bytes; the last four have their upper two bits apart.
void six_bit_scales(const uint8_t* q, Block& b) {
  for (int i = 0; i < 4; ++i) {
    b.scale[i] = q[i] & 63, b.offset[i] = q[i + 4] & 63;
    b.scale[i + 4] = (q[i + 8] & 15) | (q[i] >> 6) << 4;
    b.offset[i + 4] = q[i + 8] >> 4 | (q[i + 4] >> 6) << 4;
  }
}

constexpr int64_t source_bytes(int kind) {
  constexpr int64_t bytes[NUM_KINDS] = {0, 0, 18, 20, 22, 24, 34, 144, 176, 210, 0, 0};
  return bytes[kind];
}

void decode(int kind, const uint8_t* p, Block& b) {
  b.half_scale = half(kind == Q6_K ? p + 208 : p);
  switch (kind) {
    case Q4_0:
      return nibbles(p + 2, 16, b.codes);
    case Q4_1:
      b.half_offset = half(p + 2);
      return nibbles(p + 4, 16, b.codes);
    case Q5_0:
      return five_bit(p + 2, p + 6, b);
    case Q5_1:
      b.half_offset = half(p + 2);
      return five_bit(p + 4, p + 8, b);
    case Q8_0:
      memcpy(b.codes, p + 2, 32);
      return;
    case Q4_K:
    case Q5_K: {
      b.half_offset = half(p + 2);
      six_bit_scales(p + 4, b);
      const uint8_t *high = p + 16, *low = kind == Q4_K ? p + 16 : p + 48;
      for (int j = 0; j < 4; ++j) nibbles(low + 32 * j, 32, b.codes + 64 * j);
      if (kind == Q5_K)
        for (int i = 0; i < 256; ++i) b.codes[i] |= (high[i % 32] >> (i / 32) & 1) << 4;
      return;
    }
    case Q6_K:
      for (int i = 0; i < 256; ++i) {
        const int part = i / 128, j = i % 128;  // each half: 64 bytes of low bits, 32 of high ones
        const int low = p[64 * part + j % 64] >> (j / 64 * 4) & 15;
        const int high = p[128 + 32 * part + j % 32] >> (j / 32 * 2) & 3;
        b.codes[i] = uint8_t(low | high << 4);
      }
      memcpy(b.scale, p + 192, 16);
      return;
  }
}

// The planes of one group: `blocks` of the panel's rows, columns from `column` on.
void write_group(const Format& f, const Block* blocks, int column, uint8_t* out) {
  memset(out, 0, f.group_bytes());
  for (int r = 0; r < PANEL; ++r)
    for (int q = 0; q < QUADS; ++q)
      for (int c = 0; c < 4; ++c) {
        const int code = blocks[r].codes[column + 4 * q + c], at = 4 * r + c;
        if (f.bits == 8) {
          out[VECTOR * q + at] = uint8_t(code);
          continue;
        }
        out[VECTOR * (q & 3) + at] |= uint8_t((code & 15) << (q < 4 ? 0 : 4));
        if (f.bits == 5) out[VECTOR * 4 + at] |= uint8_t(code >> 4 << q);
        if (f.bits == 6) out[VECTOR * (4 + q / 4) + at] |= uint8_t(code >> 4 << 2 * (q & 3));
      }
}

void write_block(const Format& f, const Block* blocks, uint8_t* out) {
  for (int r = 0; r < PANEL; ++r) {
    memcpy(out + 2 * r, &blocks[r].half_scale, 2);
    if (f.offset) memcpy(out + 2 * PANEL + 2 * r, &blocks[r].half_offset, 2);
  }
  out += f.head_bytes();
  if (!f.super) return write_group(f, blocks, 0, out);
  for (int g = 0; g < 8; ++g) {
    for (int r = 0; r < PANEL; ++r) {
      out[r] = f.offset ? blocks[r].scale[g] : blocks[r].scale[2 * g];
      out[PANEL + r] = f.offset ? blocks[r].offset[g] : blocks[r].scale[2 * g + 1];
    }
    write_group(f, blocks, int(GROUP) * g, out + 2 * PANEL);
    out += 2 * PANEL + f.group_bytes();
  }
}

struct Job {
  int kind, gate;
  int64_t num_out, num_in;
  const uint8_t* rows;
  const float* scales;
  uint8_t* packed;
};

// The rows of one panel: `count` from `first` on.
struct Rows {
  int64_t first, count;
  Rows(const Job& job, int64_t pair, int side) {
    const int64_t width = job.gate ? job.num_out / 2 : job.num_out, at = job.gate ? pair * PANEL : (2 * pair + side) * PANEL;
    first = job.gate && side ? width + at : at;
    count = width - at < 0 ? 0 : width - at < PANEL ? width - at : PANEL;
  }
};

// One tile of a dense weight: rows' columns from `column` on.
void write_tile(const Job& job, const Rows& rows, int64_t column, uint8_t* out) {
  const int64_t size = size_of(job.kind), columns = tile_columns(job.kind), each = 4 / size;
  const int64_t there = job.num_in - column < columns ? job.num_in - column : columns;
  memset(out, 0, TILE);
  for (int64_t r = 0; r < rows.count; ++r) {
    const uint8_t* from = job.rows + ((rows.first + r) * job.num_in + column) * size;
    if (job.kind == F16) {
      for (int64_t c = 0; c < there; ++c) memcpy(out + (c * PANEL + r) * 2, from + c * 2, 2);
    } else if (there == columns) {
      for (int64_t v = 0; v < 16; ++v) memcpy(out + v * VECTOR + r * 4, from + v * 4, 4);
    } else {
      for (int64_t c = 0; c < there; ++c) memcpy(out + c / each * VECTOR + (r * each + c % each) * size, from + c * size, size_t(size));
    }
  }
}

void pack_dense(const Job& job, int64_t pair, uint8_t* out) {
  const Rows sides[2] = {Rows(job, pair, 0), Rows(job, pair, 1)};
  if (job.kind == I8) {
    memset(out, 0, size_t(dense_head(I8)));
    for (int side = 0; side < 2; ++side)
      memcpy(out + side * PANEL * 4, job.scales + sides[side].first, size_t(sides[side].count * 4));
    out += dense_head(I8);
  }
  for (int64_t column = 0; column < job.num_in; column += tile_columns(job.kind))
    for (const Rows& rows : sides) write_tile(job, rows, column, out), out += TILE;
}

void pack_blocks(const Job& job, int64_t pair, uint8_t* out) {
  const Format f = FORMATS[job.kind];
  const int64_t num_blocks = job.num_in / f.columns(), size = source_bytes(job.kind);
  Block blocks[PANEL];
  for (int side = 0; side < 2; ++side) {
    const Rows rows(job, pair, side);
    for (int64_t i = 0; i < num_blocks; ++i, out += f.block_bytes()) {
      memset(blocks, 0, sizeof blocks);
      for (int64_t r = 0; r < rows.count; ++r) decode(job.kind, job.rows + ((rows.first + r) * num_blocks + i) * size, blocks[r]);
      write_block(f, blocks, out);
    }
  }
}

void pack_pairs(const void* context, int64_t begin, int64_t end) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t bytes = pair_bytes(job.kind, job.num_in);
  for (int64_t pair = begin; pair < end; ++pair) {
    uint8_t* out = job.packed + pair * bytes;
    if (is_dense(job.kind)) pack_dense(job, pair, out);
    else pack_blocks(job, pair, out);
  }
}

}  // namespace
}  // namespace octavo

int64_t octavo_packed_bytes(int kind, int gate, int64_t num_out, int64_t num_in) {
  using namespace octavo;
  if (is_blocks(kind) && num_in % FORMATS[kind].columns()) return 0;
  return num_pairs(gate, num_out) * pair_bytes(kind, num_in);
}

void octavo_pack(int kind, int gate, int64_t num_out, int64_t num_in, const void* rows, const float* scales, void* packed) {
  using namespace octavo;
  const Job job{kind, gate, num_out, num_in, static_cast<const uint8_t*>(rows), scales, static_cast<uint8_t*>(packed)};
  parallel_for(num_pairs(gate, num_out), 4, pack_pairs, &job);
}

void octavo_large_pages(void* memory, int64_t num_bytes) {
#if defined(MADV_HUGEPAGE)
  // Whole pages of the usual size: the system finds the large ones among them.
  const uintptr_t page = 4096, begin = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + uintptr_t(num_bytes)) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)memory, (void)num_bytes;
#endif
}
