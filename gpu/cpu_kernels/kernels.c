/* Kernels of ops for CPUs. Compiled on the machine that runs them (build.py).

   Values are float32 between loads and stores. A sum has one order: 16 partial sums, one for each
   lane, which are then added in pairs. It depends neither on the number of threads nor on other
   rows, so each row has the same bits in any company. The vectors are those of the compiler, which
   makes of them what the processor has. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (words){__VA_ARGS__})
#endif
#define SHARED_WORK 32768 /* Values below which a second thread costs more than it takes over, */
#define SHARED_PRODUCTS (1 << 21) /* and products. */

typedef float lanes __attribute__((vector_size(64)));
typedef float lanes_at __attribute__((vector_size(64), aligned(4), may_alias));
typedef float half_lanes __attribute__((vector_size(32)));
typedef float quarter_lanes __attribute__((vector_size(16)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint16_t halves_at __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint16_t bfloat16;

INLINE float load_float32(const float *x) { return *x; }
INLINE void store_float32(float *x, float y) { *x = y; }
INLINE lanes lanes_float32(const float *x) { return *(const lanes_at *)x; }

INLINE float load_bfloat16(const bfloat16 *x) {
    uint32_t bits = (uint32_t)*x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

/* To the nearest, ties to even. */
INLINE void store_bfloat16(bfloat16 *x, float y) {
    uint32_t bits;
    memcpy(&bits, &y, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uint32_t nan = (bits >> 16) | 0x40;
    *x = (bfloat16)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

INLINE lanes lanes_bfloat16(const bfloat16 *x) {
    return (lanes)(__builtin_convertvector(*(const halves_at *)x, words) << 16);
}

/* Each lane l of x with lane l + 8, then l + 4, l + 2 and l + 1. */
INLINE float sum_of_lanes(lanes x) {
    half_lanes a, b;
    memcpy(&a, &x, 32);
    memcpy(&b, (const char *)&x + 32, 32);
    a += b;
    quarter_lanes c, d;
    memcpy(&c, &a, 16);
    memcpy(&d, (const char *)&a + 16, 16);
    c += d;
    return (c[0] + c[2]) + (c[1] + c[3]);
}

/* `sum_of_lanes` of four, to the bit, in a third of the instructions. */
INLINE void sums_of_lanes(lanes a, lanes b, lanes c, lanes d, float *out) {
    lanes ab = SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
             + SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    lanes cd = SHUFFLE(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
             + SHUFFLE(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    lanes x = SHUFFLE(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
            + SHUFFLE(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    x += SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    x += SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    for (int i = 0; i < 4; i++) out[i] = x[4 * i];
}

/* The largest of x and `least`, of what is not NaN. */
INLINE float largest(const float *x, int64_t n, float least) {
    lanes high = least - (lanes){0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        lanes y = lanes_float32(x + i);
        words greater = (words)(y > high);
        high = (lanes)(((words)y & greater) | ((words)high & ~greater));
    }
    for (int l = 0; l < LANES; l++) least = high[l] > least ? high[l] : least;
    for (; i < n; i++) least = x[i] > least ? x[i] : least;
    return least;
}

/* exp(x) for x <= 0 to two units in the last place, with results below the smallest normal number;
   NaN stays. Of Cephes (expf). */
INLINE float exp_below(float x) {
    x = x < -104.0f ? -104.0f : x;
    float shifted = x * 1.44269504088896341f + 12582912.0f;
    float n = shifted - 12582912.0f;
    float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    float y = (p * (r * r) + r) + 1.0f;
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    int32_t k = bits - 0x4b400000, first = k >> 1;
    uint32_t a = (uint32_t)(first + 127) << 23, b = (uint32_t)(k - first + 127) << 23;
    float low, high;
    memcpy(&low, &a, 4);
    memcpy(&high, &b, 4);
    return y * low * high;
}

/* The sum of x[i] y[i]: both float32. */
INLINE float dot(const float *x, const float *y, int64_t n) {
    lanes sum = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) sum += lanes_float32(x + i) * lanes_float32(y + i);
    for (int64_t l = 0; i + l < n; l++) sum[l] += x[i + l] * y[i + l];
    return sum_of_lanes(sum);
}

INLINE float inverse_rms(const float *x, int64_t n, float eps) {
    return 1.0f / sqrtf(dot(x, x, n) / (float)n + eps);
}

INLINE int all_finite(const float *x, int64_t n) {
    int32_t infinite = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        infinite |= (bits & 0x7f800000) == 0x7f800000;
    }
    return !infinite;
}

/* The first of the largest logits of each row, -1 if one is not finite. */
void greedy_sample(const float *logits, int64_t rows, int64_t vocab, int32_t *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * vocab > SHARED_WORK)
    for (int64_t r = 0; r < rows; r++) {
        const float *x = logits + r * vocab;
        int finite = all_finite(x, vocab);
        float best = largest(x, vocab, -INFINITY);
        int32_t token = -1;
        for (int64_t j = 0; finite && j < vocab; j++)
            if (x[j] == best) {
                token = (int32_t)j;
                break;
            }
        out[r] = token;
    }
}

#define MASKED (-2147483647) /* The score of a word that is not allowed. */
#define ONE (1 << 16)
#define FAR (1 << 22)              /* Distances to the best word are cut here, in log2 units. */
#define MAX_NOISE (32 << 16)       /* The noise of a word is less than that. */
#define FULL_WEIGHTS (1 << 18)     /* The weights of more words have a bit less. */
#define FINE 11                    /* Low bits of a distance. */
#define BINS ((FAR >> FINE) + 1)   /* Of distances by their high bits; no fewer than of low ones. */

/* Logits in Q16, NaN as masked. See `quantize_logits` of ops/reference/sampling.py. */
void quantize_logits(const float *logits, int64_t count, int32_t *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && count > SHARED_WORK)
    for (int64_t i = 0; i < count; i++) {
        float x = logits[i], y = x * (float)ONE, limit = 8192.0f * (float)ONE;
        y = y > limit ? limit : y;
        y = y < -limit ? -limit : y;
        out[i] = x == x ? (int32_t)rintf(y) : MASKED;
    }
}

/* What follows are the integers of `sample` there: names and constants are the same. */
INLINE int32_t horner(int32_t x, const int32_t *coefficients, int count) {
    int32_t value = coefficients[count - 1];
    for (int i = count - 2; i >= 0; i--) value = ((value * x) >> 15) + coefficients[i];
    return value;
}

INLINE int32_t log2_q16(int32_t x) {
    static const int32_t bent[] = {29010, -18136, 12115, -6448, 1722};
    int32_t exponent = 31 - __builtin_clz((uint32_t)x);
    int32_t fraction = (int32_t)(((uint32_t)x << (30 - exponent)) & ((1u << 30) - 1)) >> 15;
    int32_t bend = (fraction * ((1 << 15) - fraction)) >> 13;
    return (exponent << 16) + (fraction << 1) + ((horner(fraction, bent, 5) * bend) >> 17);
}

INLINE int32_t gumbel_log2(int32_t bits) {
    static const int32_t smooth[] = {34655, 23565, 5458, 157, 1699};
    if (bits >= 1 << 30) {
        int32_t doubled = 2 * (2147483647 - bits) + 1;
        return (32 << 16) - log2_q16(doubled) - horner(doubled >> 16, smooth, 5);
    }
    return (16 << 16) - log2_q16((32 << 16) - log2_q16(2 * bits + 1));
}

INLINE uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

INLINE int32_t exp2_negative(int32_t x) {
    static const int32_t bent[] = {12656, -3049, 449};
    int32_t whole = x >> 16, fraction = (x & (ONE - 1)) >> 1;
    int32_t bend = (fraction * ((1 << 15) - fraction)) >> 13;
    int32_t power = ONE - fraction - ((horner(fraction, bent, 3) * bend) >> 17);
    int32_t top = power << 10, most = (1 << 26) - 1;
    return (top < most ? top : most) >> (whole < 31 ? whole : 31);
}

/* The smallest distance up to which words have at least `wanted` of `mass`, counted in units of
   2^drop: FAR if no less will do. Words that are not kept have no mass. */
INLINE int32_t limit_of_mass(const int32_t *far, const int32_t *mass, int64_t vocab,
                             uint64_t *bins, int64_t wanted, int drop) {
    if (wanted <= 0) return 0;
    memset(bins, 0, BINS * sizeof *bins);
    for (int64_t i = 0; i < vocab; i++)
        if (mass[i]) bins[far[i] >> FINE] += (uint64_t)mass[i];
    uint64_t before = 0;
    int64_t bin = 0;
    while (bin < BINS && (int64_t)((before + bins[bin]) >> drop) < wanted) before += bins[bin++];
    if (bin >= BINS - 1) return FAR;
    memset(bins, 0, (1 << FINE) * sizeof *bins);
    for (int64_t i = 0; i < vocab; i++)
        if (mass[i] && far[i] >> FINE == bin)
            bins[far[i] & ((1 << FINE) - 1)] += (uint64_t)mass[i];
    int32_t fine = 0;
    while ((int64_t)((before + bins[fine]) >> drop) < wanted) before += bins[fine++];
    return (int32_t)(bin << FINE) + fine;
}

/* Leave out the words beyond a distance. */
INLINE void cut(int32_t *far, int64_t vocab, int32_t limit) {
    for (int64_t i = 0; i < vocab; i++) far[i] = far[i] <= limit ? far[i] : FAR + 1;
}

/* Of one row. `far` and `mass` [vocab] and `bins` are memory for it. */
static int32_t sample_row(const float *logits, const int32_t *scores, uint32_t position,
                          uint32_t seed_lo, uint32_t seed_hi, int32_t greedy, float scale,
                          int32_t top_k, int32_t top_p, int32_t min_p, int64_t vocab,
                          int filtered, int32_t *far, int32_t *mass, uint64_t *bins) {
    if (!all_finite(logits, vocab)) return -1;
    int32_t best = scores[0];
    for (int64_t i = 1; i < vocab; i++) best = scores[i] > best ? scores[i] : best;
    if (greedy > 0) {
        int64_t first = -1;
        for (int64_t i = 0; i < vocab; i++)
            if (scores[i] == best && (first < 0 || logits[i] > logits[first])) first = i;
        return (int32_t)first;
    }
    /* Beyond FAR: not kept. */
    int32_t least = (int32_t)((uint32_t)best - (1u << 24));
    int64_t kept = 0;
    for (int64_t i = 0; i < vocab; i++) {
        int32_t gap = (int32_t)((uint32_t)best - (uint32_t)(scores[i] > least ? scores[i] : least));
        float y = (float)gap * scale;
        int32_t distance = (int32_t)rintf(y < (float)FAR ? y : (float)FAR);
        int keep = scores[i] > MASKED && (!filtered || distance <= min_p);
        far[i] = keep ? distance : FAR + 1;
        kept += keep;
    }
    if (filtered && top_k > 0 && top_k < kept) {
        for (int64_t i = 0; i < vocab; i++) mass[i] = far[i] <= FAR;
        cut(far, vocab, limit_of_mass(far, mass, vocab, bins, top_k, 0));
    }
    if (filtered && top_p < ONE) {
        uint64_t total = 0;
        for (int64_t i = 0; i < vocab; i++) {
            mass[i] = far[i] <= FAR ? exp2_negative(far[i]) >> (vocab > FULL_WEIGHTS) : 0;
            total += (uint64_t)mass[i];
        }
        int drop = 0;
        while (total >> 13 >> (15 + drop)) drop++;
        int32_t whole = (int32_t)(total >> drop);
        int32_t wanted = (((whole >> 14) * top_p) >> 2) + (((whole & 16383) * top_p) >> 16);
        cut(far, vocab, limit_of_mass(far, mass, vocab, bins, wanted, drop));
    }
    uint32_t key = mix(seed_lo ^ mix(position * 0x3C6EF372u + 0x1B873593u));
    uint32_t other = mix(seed_hi + key * 0x2C1B3C6Du + 0x165667B1u);
    int32_t drawn = 0, most = MASKED;
    for (int64_t i = 0; i < vocab; i++) {
        if (far[i] > FAR || (most > MASKED && MAX_NOISE - far[i] <= most)) continue;
        uint32_t hash = mix(mix((uint32_t)i * 0x9E3779B1u + key) ^ other);
        int32_t value = gumbel_log2((int32_t)(hash >> 1)) - far[i];
        if (value > most) most = value, drawn = (int32_t)i;
    }
    return drawn;
}

/* 1 if there is no memory for a row. See the op for the shapes. */
int sample(const float *logits, const int32_t *scores, const int32_t *position,
           const int32_t *seed_lo, const int32_t *seed_hi, const int32_t *greedy,
           const float *scale, const int32_t *top_k, const int32_t *top_p, const int32_t *min_p,
           int64_t rows, int64_t vocab, int filtered, int32_t *out, int threads) {
    int failed = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * vocab > SHARED_WORK)
    for (int64_t r = 0; r < rows; r++) {
        int32_t *far = malloc(2 * (size_t)vocab * sizeof *far + BINS * sizeof(uint64_t));
        if (far == NULL) {
#pragma omp atomic write
            failed = 1;
            continue;
        }
        uint64_t *bins = (uint64_t *)(far + 2 * vocab);
        out[r] = sample_row(logits + r * vocab, scores + r * vocab, (uint32_t)position[r],
                            (uint32_t)seed_lo[r], (uint32_t)seed_hi[r], greedy[r], scale[r],
                            top_k[r], top_p[r], min_p[r], vocab, filtered, far, far + vocab, bins);
        free(far);
    }
    return failed;
}

#define BLOCK 64 /* Slots whose K or V is at hand at a time. */
#define PIECE 16 /* Tokens of a request that one call of `attend` serves, at most. */
#define SCORES (1 << 18) /* Scores that are kept at a time, unless one token sees more. */

/* What all pieces of one call of attention share. See the op for the shapes. */
struct attention {
    const void *q, *kv;
    const int32_t *page_table, *query_start, *kv_lens, *counts;
    const float *sinks;
    void *out;
    int64_t tokens, heads, kv_heads, size, page_size, pages, window, chunk;
    float scale, soft_cap;
};

/* Tokens `first` to before `last` of the step, of one request, and one head of K. Token t stands
   at position `past` + t. */
struct piece {
    int64_t request, head, first, last, past;
};

/* Slots from `first` to before `last`, counted from those at hand. */
struct seen {
    int64_t first, last;
};

INLINE int64_t oldest_seen(const struct attention *a, int64_t position) {
    int64_t oldest = 0;
    if (a->chunk > 0) oldest = position - position % a->chunk;
    if (a->window > 0) oldest = position - (a->window - 1);
    return oldest < 0 ? 0 : oldest;
}

/* Of `count` slots from `low` on, those that a query at `position` sees; none: last <= first. */
INLINE struct seen slots_seen(
    const struct attention *a, int64_t position, int64_t low, int64_t count
) {
    int64_t first = oldest_seen(a, position) - low, last = position + 1 - low;
    return (struct seen){first < 0 ? 0 : first, last > count ? count : last};
}

/* All pieces; `width` is the largest number of scores for a head of q that one has, `work` the
   products of all. */
static struct piece *cut_into_pieces(
    const struct attention *a, int64_t *count, int64_t *width, int64_t *work
) {
    int64_t requests = a->counts[1], group = a->heads / a->kv_heads, n = 0;
    int64_t most = (a->tokens + requests + 1) * a->kv_heads;
    struct piece *pieces = malloc((size_t)most * sizeof(struct piece));
    for (int64_t r = 0; pieces != NULL && r < requests; r++) {
        int64_t start = a->query_start[r], stop = a->query_start[r + 1], past = a->kv_lens[r] - stop;
        int64_t together = SCORES / (group * (a->kv_lens[r] + 1));
        together = together < 1 ? 1 : together > PIECE ? PIECE : together;
        for (int64_t first = start; first < stop; first += together) {
            int64_t last = first + together < stop ? first + together : stop;
            int64_t scores = (last - first) * (past + last - oldest_seen(a, past + first));
            *work += 2 * scores * a->heads * a->size;
            *width = scores > *width ? scores : *width;
            for (int64_t h = 0; h < a->kv_heads; h++)
                pieces[n++] = (struct piece){r, h, first, last, past};
        }
    }
    *count = n;
    return pieces;
}

#define T float
#define NAME(x) x##_float32
#include "typed.h"
#undef T
#undef NAME

#define T bfloat16
#define NAME(x) x##_bfloat16
#include "typed.h"

/* R rows of x by four rows of w [dim, a multiple of LANES], all float32. */
INLINE void tile(
    const float *x, const float *w, int64_t dim, float *out, int64_t vocab, const int R
) {
    lanes sum[4][4] = {0};
    for (int64_t i = 0; i < dim; i += LANES)
        for (int r = 0; r < R; r++)
            for (int v = 0; v < 4; v++)
                sum[r][v] += lanes_float32(x + r * dim + i) * lanes_float32(w + v * dim + i);
    for (int r = 0; r < R; r++)
        sums_of_lanes(sum[r][0], sum[r][1], sum[r][2], sum[r][3], out + r * vocab);
}

/* x [rows dim] by w [vocab dim] transposed, with sums in float32. Returns 0, or 1 where there is no
   memory. */
int logits_bfloat16(
    const bfloat16 *x, const bfloat16 *w, float *out, int64_t rows, int64_t dim, int64_t vocab,
    int threads
) {
    int64_t padded = (dim + LANES - 1) / LANES * LANES;
    float *wide = calloc((size_t)(rows * padded), sizeof(float));
    int missing = wide == NULL;
    for (int64_t r = 0; !missing && r < rows; r++) widen_bfloat16(x + r * dim, wide + r * padded, dim);
#pragma omp parallel num_threads(threads) if (threads > 1 && vocab * dim > SHARED_WORK) \
    reduction(| : missing)
    {
        float *four = missing ? NULL : calloc((size_t)(4 * padded), sizeof(float));
        missing |= four == NULL;
#pragma omp for
        for (int64_t v = 0; v < vocab; v += 4) {
            int64_t count = vocab - v < 4 ? vocab - v : 4, r = 0;
            if (four == NULL) continue;
            for (int64_t j = 0; j < count; j++)
                widen_bfloat16(w + (v + j) * dim, four + j * padded, dim);
            for (; count == 4 && r + 4 <= rows; r += 4)
                tile(wide + r * padded, four, padded, out + r * vocab + v, vocab, 4);
            for (; count == 4 && r < rows; r++)
                tile(wide + r * padded, four, padded, out + r * vocab + v, vocab, 1);
            for (; r < rows; r++)
                for (int64_t j = 0; j < count; j++)
                    out[r * vocab + v + j] = dot(wide + r * padded, four + j * padded, padded);
        }
        free(four);
    }
    free(wide);
    return missing;
}
