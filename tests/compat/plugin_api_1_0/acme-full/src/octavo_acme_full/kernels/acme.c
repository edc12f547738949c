/* Kernels of the acme platform, in plain C: float32, one thread, no dependency. Called through ctypes (library.py).

   Legend: T tokens, N outputs, K inputs, S sequences, H query heads, G kv heads, D head_dim, B tokens of a block. */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* W[N, K] is packed in tiles of TILE outputs, each [K, TILE]: the inner loop runs along memory, in order of k, so that
   every output is summed in the same order whatever the batch is. The last tile is padded with zeros. */
enum { TILE = 16 };

/* y = x / sqrt(mean(x^2) + eps) * weight. x, y [T, K]. */
void acme_rms_norm(const float *x, const float *weight, float *y, int64_t t, int64_t k, float eps) {
    for (int64_t row = 0; row < t; row++, x += k, y += k) {
        double square = 0;
        for (int64_t i = 0; i < k; i++) square += (double)x[i] * x[i];
        const double scale = 1.0 / sqrt(square / k + eps);
        for (int64_t i = 0; i < k; i++) y[i] = (float)(x[i] * scale) * weight[i];
    }
}

static void store(const float *sum, const float *bias, float *y, int64_t first, int64_t n) {
    for (int64_t i = 0; i < TILE && first + i < n; i++) y[first + i] = sum[i] + (bias ? bias[first + i] : 0);
}

/* One tile's product with ROWS rows of x, which share its way through the caches. WEIGHT(i, j) is W[first + j, i]. */
#define PRODUCT(ROWS, WEIGHT)                                                              \
    do {                                                                                   \
        float sum[ROWS][TILE] = {{0}};                                                     \
        for (int64_t i = 0; i < k; i++)                                                    \
            for (int r = 0; r < ROWS; r++)                                                 \
                for (int j = 0; j < TILE; j++) sum[r][j] += x[(row + r) * k + i] * WEIGHT(i, j); \
        for (int r = 0; r < ROWS; r++) store(sum[r], bias, y + (row + r) * n, first, n);   \
    } while (0)

/* Compiled for several widths of vectors; the loader takes the widest that the machine has. */
#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

/* y[T, N] = x[T, K] W^T + bias, W packed; bias may be null. */
WIDE void acme_linear(const float *x, const float *w, const float *bias, float *y, int64_t t, int64_t n, int64_t k) {
#define PLAIN(i, j) w[(i) * TILE + (j)]
    for (int64_t first = 0; first < n; first += TILE, w += k * TILE) {
        int64_t row = 0;
        for (; row + 4 <= t; row += 4) PRODUCT(4, PLAIN);
        for (; row < t; row++) PRODUCT(1, PLAIN);
    }
}

/* The same with W in 4 bits, packed alike: byte i of an output has columns 2 i and 2 i + 1 in its low and high half; a
   weight is (code - 8) * scale, scales [K / group, TILE] of each tile. */
WIDE void acme_linear_groups(const float *x, const uint8_t *w, const float *scale, const float *bias, float *y,
                             int64_t t, int64_t n, int64_t k, int64_t group) {
#define GROUPED(i, j) (((w[(i) / 2 * TILE + (j)] >> (i) % 2 * 4 & 15) - 8) * scale[(i) / group * TILE + (j)])
    for (int64_t first = 0; first < n; first += TILE, w += k / 2 * TILE, scale += k / group * TILE) {
        int64_t row = 0;
        for (; row + 4 <= t; row += 4) PRODUCT(4, GROUPED);
        for (; row < t; row++) PRODUCT(1, GROUPED);
    }
}

/* What is the same for every token of a step. The cache is [blocks, G, B, D], contiguous. */
struct attention {
    int64_t tokens, seqs, heads, kv_heads, dim, block, blocks_per_seq, window; /* window 0: all */
    float scale, softcap;                                                       /* softcap 0: none */
};

/* Write k, v [T, G, D] where `slots` [T] says: block * B + offset. */
void acme_write(const struct attention *a, const float *k, const float *v, float *kc, float *vc, const int64_t *slots) {
    const size_t row = a->dim * sizeof(float);
    for (int64_t t = 0; t < a->tokens; t++) {
        const int64_t block = slots[t] / a->block, offset = slots[t] % a->block;
        for (int64_t g = 0; g < a->kv_heads; g++) {
            const int64_t to = ((block * a->kv_heads + g) * a->block + offset) * a->dim;
            const int64_t from = (t * a->kv_heads + g) * a->dim;
            memcpy(kc + to, k + from, row);
            memcpy(vc + to, v + from, row);
        }
    }
}

/* One query row against positions first..last of a sequence, by a softmax that is rescaled as the maximum grows. */
static void attend(const struct attention *a, const float *q, const float *kc, const float *vc, const int32_t *table,
                   int64_t g, int64_t first, int64_t last, const float *sink, float *out) {
    /* A sink is a logit that takes its share and adds nothing. */
    float most = sink ? *sink : -INFINITY, total = sink ? 1 : 0;
    memset(out, 0, a->dim * sizeof(float));
    for (int64_t p = first; p <= last; p++) {
        const int64_t at = (((int64_t)table[p / a->block] * a->kv_heads + g) * a->block + p % a->block) * a->dim;
        float logit = 0;
        for (int64_t d = 0; d < a->dim; d++) logit += q[d] * kc[at + d];
        logit *= a->scale;
        if (a->softcap > 0) logit = a->softcap * tanhf(logit / a->softcap);
        if (logit > most) {
            const float shrink = expf(most - logit);
            for (int64_t d = 0; d < a->dim; d++) out[d] *= shrink;
            total *= shrink;
            most = logit;
        }
        const float weight = expf(logit - most);
        total += weight;
        for (int64_t d = 0; d < a->dim; d++) out[d] += weight * vc[at + d];
    }
    for (int64_t d = 0; d < a->dim; d++) out[d] /= total;
}

/* Causal attention of q [T, H, D] over the paged cache. starts [S + 1], lens [S], tables [S, blocks_per_seq]; sinks [H]
   or null. Tokens behind the last sequence are padding, and get zeros. */
void acme_attention(const struct attention *a, const float *q, const float *kc, const float *vc, const int32_t *starts,
                    const int32_t *lens, const int32_t *tables, const float *sinks, float *out) {
    const int64_t width = a->heads * a->dim, group = a->heads / a->kv_heads;
    for (int64_t s = 0; s < a->seqs; s++) {
        for (int64_t t = starts[s]; t < starts[s + 1]; t++) {
            const int64_t last = lens[s] - starts[s + 1] + t;
            const int64_t first = a->window > 0 && last >= a->window ? last - a->window + 1 : 0;
            for (int64_t h = 0; h < a->heads; h++)
                attend(a, q + t * width + h * a->dim, kc, vc, tables + s * a->blocks_per_seq, h / group, first, last,
                       sinks ? sinks + h : 0, out + t * width + h * a->dim);
        }
    }
    const int64_t end = starts[a->seqs];
    memset(out + end * width, 0, (a->tokens - end) * width * sizeof(float));
}

/* total[n] = the sum of `ranks` pieces of n numbers, in rank order: the same bits on every rank. */
void acme_sum(const float *pieces, float *total, int64_t ranks, int64_t n) {
    memcpy(total, pieces, n * sizeof(float));
    for (int64_t r = 1; r < ranks; r++)
        for (int64_t i = 0; i < n; i++) total[i] += pieces[r * n + i];
}
