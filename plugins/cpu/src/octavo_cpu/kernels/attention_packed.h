// Many rows: the keys and values of a tile are packed into panels, which all rows are then multiplied with.
//
// A panel holds 16 columns of a matrix: row i of it is 64 bytes, M::PAIR of the matrix's rows side by side in each lane.
// Keys lie in panels of 16 tokens, a head's dimensions down; values in panels of 16 dimensions, tokens down. Both are
// filled with zeros: dimensions to multiples of 32, tokens to multiples of 32.
#pragma once
#include "attention_tile.h"

namespace {

constexpr int64_t LANES = 64;  // bytes of a panel's row

// Row i of out: dword i of each of 16 chunks.
#if defined(__AVX512F__)
template <class Chunk>
void transpose(const Chunk* x, uint8_t* out) {
  __m512i a[16], b[16];
  UNROLLED for (int i = 0; i < 16; ++i) a[i] = reinterpret_cast<__m512i>(x[i].a);
  UNROLLED for (int i = 0; i < 16; i += 2)
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  UNROLLED for (int i = 0; i < 16; i += 4)
    UNROLLED for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  // a[4 q + c]: dword c of every quarter, of chunks 4 q .. 4 q + 3.
  UNROLLED for (int c = 0; c < 4; ++c) {
    b[c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), b[4 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
    b[8 + c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd), b[12 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
  }
  UNROLLED for (int c = 0; c < 4; ++c) {
    _mm512_store_si512(out + c * LANES, _mm512_shuffle_i32x4(b[c], b[4 + c], 0x88));
    _mm512_store_si512(out + (8 + c) * LANES, _mm512_shuffle_i32x4(b[c], b[4 + c], 0xdd));
    _mm512_store_si512(out + (4 + c) * LANES, _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x88));
    _mm512_store_si512(out + (12 + c) * LANES, _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xdd));
  }
}
#else
inline void transpose(const F* x, uint8_t* out) {
  float from[16][16];
  float* to = reinterpret_cast<float*>(out);
  UNROLLED for (int i = 0; i < 16; ++i) Simd::store(from[i], x[i]);
  UNROLLED for (int i = 0; i < 16; ++i)
    UNROLLED for (int j = 0; j < 16; ++j) to[16 * i + j] = from[j][i];
}
#endif

template <class M, class T>
typename M::Chunk chunk_of(const Tile<T>& tile, const T* from, int64_t t, int64_t d) {
  if (t >= tile.count || d >= tile.dim) return M::zero();
  const T* p = from + tile.offsets[t] + d;
  return tile.dim - d >= M::WIDTH ? M::load(p) : M::load_some(p, tile.dim - d);
}

template <class M, class T>
void pack_keys(const Tile<T>& tile, uint8_t* panels) {
  for (int64_t t = 0; t < up(tile.count, 32); t += 16)
    for (int64_t d = 0; d < tile.width; d += M::WIDTH, panels += 16 * LANES) {
      typename M::Chunk x[16];
      if (t + 16 <= tile.count && d + M::WIDTH <= tile.dim) {
        UNROLLED for (int i = 0; i < 16; ++i) x[i] = M::load(tile.keys + tile.offsets[t + i] + d);
      } else {
        UNROLLED for (int i = 0; i < 16; ++i) x[i] = chunk_of<M>(tile, tile.keys, t + i, d);
      }
      transpose(x, panels);
    }
}

inline void interleave(F row, F, uint8_t* to, int64_t) { Simd::store(reinterpret_cast<float*>(to), row); }

#if defined(__AVX512BF16__)
// Two tokens' 32 dimensions as a row of two panels.
inline void interleave(Brains::Chunk a, Brains::Chunk b, uint8_t* to, int64_t panel) {
  const __m512i low = _mm512_or_si512(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(a.a)),
                                      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(b.a)), 16));
  const __m512i high = _mm512_or_si512(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(a.a, 1)),
                                       _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(b.a, 1)), 16));
  _mm512_store_si512(to, low), _mm512_store_si512(to + panel, high);
}
#endif

template <class M, class T>
void pack_values(const Tile<T>& tile, uint8_t* panels) {
  const int64_t padded = up(tile.count, 32), panel = padded / M::PAIR * LANES;
  for (int64_t t = 0; t < padded; t += M::PAIR, panels += LANES)
    for (int64_t d = 0; d < tile.width; d += M::WIDTH)
      interleave(chunk_of<M>(tile, tile.values, t, d), chunk_of<M>(tile, tile.values, t + M::PAIR - 1, d),
                 panels + d / 16 * panel, panel);
}

// A matrix of numbers times panels: sums [rows][columns], added to what is there or not. rows in multiples of 16, depth
// and columns of 32. depth: rows of the packed matrix; panel: bytes from one of its panels to the next.
template <class M>
struct Multiply {
  const typename M::Number* left;
  int64_t left_stride;
  const uint8_t* panels;
  int64_t panel;
  float* sums;
  int64_t sums_stride;
  int64_t rows, depth, columns;
  bool add;

  template <int ROWS, int PANELS>
  void block(int64_t row, int64_t column) const {
    const typename M::Number* a = left + row * left_stride;
    const uint8_t* b = panels + column / 16 * panel;
    float* c = sums + row * sums_stride + column;
    F sum[ROWS][PANELS];
    UNROLLED for (int r = 0; r < ROWS; ++r)
      UNROLLED for (int p = 0; p < PANELS; ++p) sum[r][p] = add ? Simd::load(c + r * sums_stride + 16 * p) : Simd::set1(0.0f);
    for (int64_t k = 0; k < depth; k += M::PAIR, b += LANES) {
      typename M::Chunk chunk[PANELS];
      UNROLLED for (int p = 0; p < PANELS; ++p)
        chunk[p] = M::load(reinterpret_cast<const typename M::Number*>(b + p * panel));
      UNROLLED for (int r = 0; r < ROWS; ++r) {
        const auto x = M::broadcast(a + r * left_stride + k);
        UNROLLED for (int p = 0; p < PANELS; ++p) sum[r][p] = M::dot(sum[r][p], x, chunk[p]);
      }
    }
    UNROLLED for (int r = 0; r < ROWS; ++r)
      UNROLLED for (int p = 0; p < PANELS; ++p) Simd::store(c + r * sums_stride + 16 * p, sum[r][p]);
  }

  void run() const {
#if defined(__AVX512F__)
    constexpr int ROWS = 8, PANELS = 2;
#else
    constexpr int ROWS = 4, PANELS = 1;
#endif
    for (int64_t column = 0; column < columns; column += 16 * PANELS)
      for (int64_t row = 0; row < rows; row += ROWS) block<ROWS, PANELS>(row, column);
  }
};

template <class M>
void multiply(const Multiply<M>& product) { product.run(); }

}  // namespace

#if defined(__AMX_BF16__)
#include "attention_amx.h"
#endif

namespace {

template <class M, class T>
struct Packed {
  static constexpr int64_t TOKENS = STRETCH;

  // A block of rows leaves out what none of them sees.
  static void run(const Tile<T>& tile, Space<M>& space, const Softmax& softmax, int64_t rows, int64_t begin) {
    pack_keys<M>(tile, space.keys);
    pack_values<M>(tile, space.values);
    const int64_t key_panel = tile.width / M::PAIR * LANES, value_panel = up(tile.count, 32) / M::PAIR * LANES;
    for (int64_t first = 0; first < rows; first += BLOCK) {
      const int64_t num = first + BLOCK < rows ? BLOCK : rows - first;
      int64_t low, high, unused;
      softmax.range(first, begin, tile.count, low, unused);
      softmax.range(first + num - 1, begin, tile.count, unused, high);
      if (low >= high) continue;
      const Columns columns{low / 32 * 32, up(high, 32), tile.count};
      multiply(Multiply<M>{space.queries + first * tile.width, tile.width, space.keys + columns.from / 16 * key_panel,
                           key_panel, space.scores + columns.from, SCORES, up(num, 16), tile.width,
                           columns.to - columns.from, false});
      softmax.run(space, first, num, begin, columns, tile.width);
      multiply(Multiply<M>{space.weights + columns.from, weights_stride<M>(), space.values + columns.from / M::PAIR * LANES,
                           value_panel, space.answers + first * tile.width, tile.width, up(num, 16),
                           columns.to - columns.from, tile.width, true});
    }
  }
};

}  // namespace
