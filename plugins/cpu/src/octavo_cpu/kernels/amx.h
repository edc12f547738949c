// AMX tiles: eight registers of up to 16 rows of 64 bytes.
//
// Written as assembly, as GCC's intrinsics do not tell the compiler which memory a tile or its configuration is read
// from, so that what was stored there just before may not be there yet.
#pragma once
#include <cstdint>

namespace {

// Rows of the tiles that hold sums and left sides may be fewer than 16; right sides are always whole.
//
//     tiles 0..3: sums    4, 5: left sides [rows, 64 bytes]    6, 7: right sides [16, 64 bytes]
//
// A configuration belongs to a thread and must be given back: a thread that holds one pays for it when it is switched.
// rows: 0 for no tiles.
class AmxTiles {
 public:
  explicit AmxTiles(int rows) : held_(rows > 0) {
    if (!held_) return;
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) config.rows[i] = uint8_t(i < 6 ? rows : 16);
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~AmxTiles() {
    if (held_) asm volatile("tilerelease");
  }
  AmxTiles(const AmxTiles&) = delete;

 private:
  const bool held_;
};

template <int TILE>
inline void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(TILE)); }

template <int TILE>
inline void tile_load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(TILE) : "memory");
}

// For what is read once: it does not push from the first-level cache what is read again.
template <int TILE>
inline void tile_stream(const void* p, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
inline void tile_store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(TILE) : "memory");
}

// sums += left x right, bfloat16 to float32: row i of right holds columns 2i and 2i + 1 of each of 16 outputs in turn.
template <int SUMS, int LEFT, int RIGHT>
inline void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(LEFT), "i"(RIGHT));
}

// The same of signed bytes to int32, four columns a row.
template <int SUMS, int LEFT, int RIGHT>
inline void tile_dot_s8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(LEFT), "i"(RIGHT));
}

}  // namespace
