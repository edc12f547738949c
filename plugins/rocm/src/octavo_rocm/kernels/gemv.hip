// Products of few tokens, y[M, N] = x[M, K] W[N, K]^T for M <= 4, bound by reading W once; W plain or packed.
//
//   a wave owns ROWS rows of W; its lanes walk them piece by piece, side by side:
//
//              piece 0   piece 1   ...   piece WAVE - 1 | piece WAVE ...
//   row n      lane 0    lane 1          lane WAVE - 1  | lane 0              one load of 8 to 16 bytes each
//   row n + 1  lane 0    lane 1          lane WAVE - 1  | lane 0
//
// and add up at the end. x is widened once for ROWS rows; sums are float32, in a fixed order: equal inputs, equal bits.
// No shared memory and no barrier, so that a wave never waits for another.
//
// M tokens, N outputs, K inputs. A piece has RUNS runs of RUN adjacent columns.
// Chosen by the build: FORMAT (a struct below), ROWS, BFLOAT16 (else float16, for x, y and plain W).

typedef unsigned short u16;
typedef unsigned u32x2 __attribute__((vector_size(8)));
typedef unsigned u32x4 __attribute__((vector_size(16)));

constexpr int THREADS = 256;

DEVICE float from_half(unsigned bits) { return (float)__builtin_bit_cast(_Float16, (u16)bits); }

#ifdef BFLOAT16
DEVICE float widen(unsigned bits) { return __builtin_bit_cast(float, bits << 16); }
DEVICE u16 narrow(float number) {
  unsigned bits = __builtin_bit_cast(unsigned, number);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)(bits >> 16 | 64);  // NaN stays NaN
  return (u16)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);                // to nearest, ties to even
}
#else
DEVICE float widen(unsigned bits) { return from_half(bits); }
DEVICE u16 narrow(float number) { return __builtin_bit_cast(u16, (_Float16)number); }
#endif

// Eight or four adjacent numbers of x's format. The address is a multiple of their size.
DEVICE void read_run(const u16* at, float (&numbers)[8]) {
  u32x4 bits = *(const u32x4*)at;
  for (int i = 0; i < 4; i++) {
    numbers[2 * i] = widen(bits[i] & 0xffff);
    numbers[2 * i + 1] = widen(bits[i] >> 16);
  }
}
DEVICE void read_run(const u16* at, float (&numbers)[4]) {
  u32x2 bits = *(const u32x2*)at;
  for (int i = 0; i < 2; i++) {
    numbers[2 * i] = widen(bits[i] & 0xffff);
    numbers[2 * i + 1] = widen(bits[i] >> 16);
  }
}

// W as it lies in memory. groups: what a format keeps apart from its codes. row_bytes: from one row to the next.
struct Weight {
  const unsigned char* bytes;
  const unsigned* groups;
  long row_bytes;
  int N, K;
};

// bfloat16 or float16 as x is.
struct Plain {
  static constexpr int RUNS = 1, RUN = 8;
  u32x4 bits;

  DEVICE int pieces(int K) { return K / 8; }
  DEVICE int column(int piece, int) { return piece * 8; }
  DEVICE Plain load(const Weight& w, int row, int piece) {
    return {STREAM((const u32x4*)(w.bytes + row * w.row_bytes) + piece)};
  }
  DEVICE void decode(const Plain& raw, int, float (&weights)[RUN]) {
    for (int i = 0; i < 4; i++) {
      weights[2 * i] = widen(raw.bits[i] & 0xffff);
      weights[2 * i + 1] = widen(raw.bits[i] >> 16);
    }
  }
};

// `octavo.triton.int4`: tiles of 256 columns are 32 words; nibble j of word i is column 32 j + i of the tile. groups
// [tiles * 8, N]: a float16 scale in the low half, a float16 offset in the high one, for 32 columns.
struct Int4 {
  static constexpr int RUNS = 8, RUN = 4;
  u32x4 words;
  unsigned pairs[8];

  DEVICE int pieces(int K) { return (K + 255) / 256 * 8; }
  DEVICE int column(int piece, int run) { return piece / 8 * 256 + run * 32 + piece % 8 * 4; }
  DEVICE Int4 load(const Weight& w, int row, int piece) {
    Int4 raw;
    raw.words = STREAM((const u32x4*)(w.bytes + row * w.row_bytes) + piece);
    for (int run = 0; run < RUNS; run++) raw.pairs[run] = w.groups[(long)(piece / 8 * 8 + run) * w.N + row];
    return raw;
  }
  DEVICE void decode(const Int4& raw, int run, float (&weights)[RUN]) {
    float scale = from_half(raw.pairs[run]), offset = from_half(raw.pairs[run] >> 16);
    for (int i = 0; i < RUN; i++) weights[i] = (float)(raw.words[i] >> 4 * run & 15) * scale + offset;
  }
};

// GGUF's blocks of 32 columns: a float16 scale and 32 signed bytes. A piece is half of one.
struct Q8_0 {
  static constexpr int RUNS = 2, RUN = 8, BYTES = 34;
  u16 codes[8], scale;

  DEVICE int pieces(int K) { return K / 16; }
  DEVICE int column(int piece, int run) { return piece * 16 + run * 8; }
  DEVICE Q8_0 load(const Weight& w, int row, int piece) {
    const u16* block = (const u16*)(w.bytes + row * w.row_bytes + (long)(piece / 2) * BYTES);
    Q8_0 raw;
    raw.scale = block[0];
    for (int i = 0; i < 8; i++) raw.codes[i] = block[1 + piece % 2 * 8 + i];
    return raw;
  }
  DEVICE void decode(const Q8_0& raw, int run, float (&weights)[RUN]) {
    float scale = from_half(raw.scale);
    for (int i = 0; i < 4; i++) {
      int pair = raw.codes[run * 4 + i];
      weights[2 * i] = (float)(signed char)(pair & 0xff) * scale;
      weights[2 * i + 1] = (float)(signed char)(pair >> 8) * scale;
    }
  }
};

// Blocks of 32 columns: a float16 scale and 16 bytes, whose low nibbles are columns 0..15, the high ones 16..31.
struct Q4_0 {
  static constexpr int RUNS = 2, RUN = 8, BYTES = 18;
  u16 codes[4], scale;

  DEVICE int pieces(int K) { return K / 16; }
  DEVICE int column(int piece, int run) { return piece / 2 * 32 + run * 16 + piece % 2 * 8; }
  DEVICE Q4_0 load(const Weight& w, int row, int piece) {
    const u16* block = (const u16*)(w.bytes + row * w.row_bytes + (long)(piece / 2) * BYTES);
    Q4_0 raw;
    raw.scale = block[0];
    for (int i = 0; i < 4; i++) raw.codes[i] = block[1 + piece % 2 * 4 + i];
    return raw;
  }
  DEVICE void decode(const Q4_0& raw, int run, float (&weights)[RUN]) {
    float scale = from_half(raw.scale);
    for (int i = 0; i < 4; i++) {
      int pair = raw.codes[i] >> 4 * run;
      weights[2 * i] = (float)((pair & 15) - 8) * scale;
      weights[2 * i + 1] = (float)((pair >> 8 & 15) - 8) * scale;
    }
  }
};

// Blocks of 256 columns: two float16 factors, 8 scales and 8 minima of 6 bits in 12 bytes, and 4 chunks of 32 bytes,
// whose low nibbles are group 2 c and the high ones 2 c + 1. A piece is a quarter of a chunk.
struct Q4_K {
  static constexpr int RUNS = 2, RUN = 8, BYTES = 144;
  u32x2 codes;
  float scale[2], minimum[2];

  DEVICE int pieces(int K) { return K / 16; }
  DEVICE int column(int piece, int run) { return piece / 16 * 256 + piece % 16 / 4 * 64 + run * 32 + piece % 4 * 8; }
  DEVICE Q4_K load(const Weight& w, int row, int piece) {
    const unsigned char* block = w.bytes + row * w.row_bytes + (long)(piece / 16) * BYTES;
    const unsigned char* six = block + 4;
    float scales = from_half(((const u16*)block)[0]), minima = from_half(((const u16*)block)[1]);
    int chunk = piece % 16 / 4;
    Q4_K raw;
    raw.codes = STREAM((const u32x2*)(block + 16 + chunk * 32 + piece % 4 * 8));
    for (int run = 0; run < RUNS; run++) {
      int g = 2 * chunk + run;
      int s = g < 4 ? six[g] & 63 : (six[g + 4] & 15) | six[g - 4] >> 6 << 4;
      int m = g < 4 ? six[g + 4] & 63 : six[g + 4] >> 4 | six[g] >> 6 << 4;
      raw.scale[run] = scales * (float)s;
      raw.minimum[run] = minima * (float)m;
    }
    return raw;
  }
  DEVICE void decode(const Q4_K& raw, int run, float (&weights)[RUN]) {
    for (int i = 0; i < RUN; i++) {
      unsigned code = raw.codes[i / 4] >> (i % 4 * 8 + run * 4) & 15;
      weights[i] = (float)code * raw.scale[run] - raw.minimum[run];
    }
  }
};

// Grid: ceil(N / (ROWS * THREADS / WAVE)). x [M, K], rows stride_x numbers apart; bias [N] or null; y [M, N].
template <class F, int M>
DEVICE void multiply(const u16* x, long stride_x, const Weight& w, const u16* bias, u16* y) {
  int lane = thread_index() % WAVE;
  int first = (block_index() * (THREADS / WAVE) + thread_index() / WAVE) * ROWS;
  if (first >= w.N) return;  // the whole wave

  float sums[ROWS][M] = {};
  int pieces = F::pieces(w.K);
  for (int piece = lane; piece < pieces; piece += WAVE) {
    F raw[ROWS];
    for (int r = 0; r < ROWS; r++) raw[r] = F::load(w, first + r < w.N ? first + r : w.N - 1, piece);
    for (int run = 0; run < F::RUNS; run++) {
      int column = F::column(piece, run);
      if (column >= w.K) continue;  // a tile may be longer than what is left of the row
      float inputs[M][F::RUN];
      for (int m = 0; m < M; m++) read_run(x + m * stride_x + column, inputs[m]);
      for (int r = 0; r < ROWS; r++) {
        float weights[F::RUN];
        F::decode(raw[r], run, weights);
        for (int m = 0; m < M; m++)
          for (int i = 0; i < F::RUN; i++) sums[r][m] += weights[i] * inputs[m][i];
      }
    }
  }
  for (int r = 0; r < ROWS; r++) {
    for (int m = 0; m < M; m++) {
      float sum = sums[r][m];
      for (int mask = WAVE / 2; mask > 0; mask /= 2) sum += from_lane(sum, mask);
      if (lane == 0 && first + r < w.N) {
        if (bias) sum += widen(bias[first + r]);
        y[(long)m * w.N + first + r] = narrow(sum);
      }
    }
  }
}

// Grid: ceil(N * pieces / THREADS). y [N, K] becomes the plain weight.
template <class F>
DEVICE void decode_all(const Weight& w, u16* y) {
  long at = (long)block_index() * THREADS + thread_index();
  int pieces = F::pieces(w.K), row = (int)(at / pieces), piece = (int)(at % pieces);
  if (row >= w.N) return;
  F raw = F::load(w, row, piece);
  for (int run = 0; run < F::RUNS; run++) {
    int column = F::column(piece, run);
    if (column >= w.K) continue;
    float weights[F::RUN];
    F::decode(raw, run, weights);
    for (int i = 0; i < F::RUN; i++) y[(long)row * w.K + column + i] = narrow(weights[i]);
  }
}

// All kernels take the same arguments, so that there is one way to launch them.
#define ARGUMENTS                                                                                                     \
  const u16 *x, long stride_x, const unsigned char *bytes, const unsigned *groups, const u16 *bias, u16 *y,           \
      long row_bytes, int N, int K

KERNEL void gemv_1(ARGUMENTS) { multiply<FORMAT, 1>(x, stride_x, {bytes, groups, row_bytes, N, K}, bias, y); }
KERNEL void gemv_2(ARGUMENTS) { multiply<FORMAT, 2>(x, stride_x, {bytes, groups, row_bytes, N, K}, bias, y); }
KERNEL void gemv_3(ARGUMENTS) { multiply<FORMAT, 3>(x, stride_x, {bytes, groups, row_bytes, N, K}, bias, y); }
KERNEL void gemv_4(ARGUMENTS) { multiply<FORMAT, 4>(x, stride_x, {bytes, groups, row_bytes, N, K}, bias, y); }
KERNEL void unpack(ARGUMENTS) { decode_all<FORMAT>({bytes, groups, row_bytes, N, K}, y); }
