/* The kernels of one dtype T; NAME(x) is x with the dtype's name. Included once for each. */

/* n values as float32. */
INLINE void NAME(widen)(const T *x, float *y, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) *(lanes_at *)(y + i) = NAME(lanes)(x + i);
    for (; i < n; i++) y[i] = NAME(load)(x + i);
}

/* As `dot`, with y as it lies in memory. */
INLINE float NAME(dot)(const float *x, const T *y, int64_t n) {
    lanes sum = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) sum += lanes_float32(x + i) * NAME(lanes)(y + i);
    for (int64_t l = 0; i + l < n; l++) sum[l] += x[i + l] * NAME(load)(y + i + l);
    return sum_of_lanes(sum);
}

/* y[i] += a x[i]. */
INLINE void NAME(add_scaled)(float a, const T *x, float *y, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) *(lanes_at *)(y + i) += a * NAME(lanes)(x + i);
    for (; i < n; i++) y[i] += a * NAME(load)(x + i);
}

void NAME(rms_norm)(
    const T *x, const T *weight, T *out, int64_t rows, int64_t n, float eps, int threads
) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * n > SHARED_WORK)
    for (int64_t r = 0; r < rows; r++) {
        float row[n];
        NAME(widen)(x + r * n, row, n);
        float scale = inverse_rms(row, n, eps);
        for (int64_t i = 0; i < n; i++)
            NAME(store)(out + r * n + i, row[i] * scale * NAME(load)(weight + i));
    }
}

/* x becomes the norm of the sum, residual the sum, which the norm reads as it was rounded. */
void NAME(add_rms_norm)(
    T *x, T *residual, const T *weight, int64_t rows, int64_t n, float eps, int threads
) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * n > SHARED_WORK)
    for (int64_t r = 0; r < rows; r++) {
        T *in = x + r * n, *sum = residual + r * n;
        float row[n];
        for (int64_t i = 0; i < n; i++) NAME(store)(sum + i, NAME(load)(in + i) + NAME(load)(sum + i));
        NAME(widen)(sum, row, n);
        float scale = inverse_rms(row, n, eps);
        for (int64_t i = 0; i < n; i++)
            NAME(store)(in + i, row[i] * scale * NAME(load)(weight + i));
    }
}

/* See `swish` in ops/reference/activations.py: no factor overflows or is flushed. */
void NAME(silu_and_mul)(const T *x, T *out, int64_t rows, int64_t inter, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * inter > SHARED_WORK)
    for (int64_t r = 0; r < rows; r++) {
        const T *gates = x + 2 * r * inter, *ups = gates + inter;
        for (int64_t i = 0; i < inter; i++) {
            float gate = NAME(load)(gates + i), up = NAME(load)(ups + i);
            float half = exp_below(-0.5f * fabsf(gate));
            float share = gate > 0.0f ? 1.0f : half;
            NAME(store)(out + r * inter + i, (gate * share) * (up * share) / (1.0f + half * half));
        }
    }
}

/* A head [size] in place: normed if asked for, with a weight or without, and rounded, then its first
   2 * half entries rotated. */
INLINE void NAME(norm_rotate)(
    float *x, int normed, const T *weight, const float *cos, const float *sin, int64_t size,
    int64_t half, float eps
) {
    if (normed) {
        float scale = inverse_rms(x, size, eps);
        for (int64_t i = 0; i < size; i++) {
            T rounded;
            NAME(store)(&rounded, weight == NULL ? x[i] * scale : x[i] * scale * NAME(load)(weight + i));
            x[i] = NAME(load)(&rounded);
        }
    }
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[i] + a * sin[i];
    }
}

INLINE void NAME(narrow)(const float *x, T *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) NAME(store)(y + i, x[i]);
}

/* q [tok heads size] and the cache [slot 2*kv_heads size] from qkv [tok (heads+2*kv_heads)*size].
   A row with slot -1 writes nothing. */
void NAME(norm_rope_write_kv)(
    const T *qkv, T *kv, const T *q_weight, const T *k_weight, const float *cos, const float *sin,
    const int32_t *slots, T *q, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size,
    int64_t half, float eps, int v_norm, int threads
) {
    int64_t width = (heads + 2 * kv_heads) * size;
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens * width > SHARED_WORK)
    for (int64_t t = 0; t < tokens; t++) {
        const T *in = qkv + t * width;
        const float *c = cos + t * half, *s = sin + t * half;
        float x[size];
        for (int64_t h = 0; h < heads; h++, in += size) {
            NAME(widen)(in, x, size);
            NAME(norm_rotate)(x, q_weight != NULL, q_weight, c, s, size, half, eps);
            NAME(narrow)(x, q + (t * heads + h) * size, size);
        }
        if (slots[t] < 0) continue;
        T *out = kv + (int64_t)slots[t] * 2 * kv_heads * size;
        for (int64_t h = 0; h < kv_heads; h++, in += size) {
            NAME(widen)(in, x, size);
            NAME(norm_rotate)(x, k_weight != NULL, k_weight, c, s, size, half, eps);
            NAME(narrow)(x, out + 2 * h * size, size);
        }
        for (int64_t h = 0; h < kv_heads; h++, in += size) {
            NAME(widen)(in, x, size);
            NAME(norm_rotate)(x, v_norm, NULL, c, s, size, 0, eps);
            NAME(narrow)(x, out + (2 * h + 1) * size, size);
        }
    }
}

/* Products of R rows of q [R size] and `count` rows of K, at out[r * stride + j]. */
INLINE void NAME(multiply)(
    const float *q, const T *const *keys, int64_t count, float *out, int64_t stride, int64_t size,
    const int R
) {
    int64_t j = 0;
    for (; size % LANES == 0 && j + 4 <= count; j += 4) {
        lanes sum[2][4] = {0};
        for (int64_t i = 0; i < size; i += LANES)
            for (int k = 0; k < 4; k++) {
                lanes key = NAME(lanes)(keys[j + k] + i);
                for (int r = 0; r < R; r++) sum[r][k] += lanes_float32(q + r * size + i) * key;
            }
        for (int r = 0; r < R; r++)
            sums_of_lanes(sum[r][0], sum[r][1], sum[r][2], sum[r][3], out + r * stride + j);
    }
    for (; j < count; j++)
        for (int r = 0; r < R; r++) out[r * stride + j] = NAME(dot)(q + r * size, keys[j], size);
}

/* Adds the rows of V by their weights, at weights[r * stride + j], to out [R size]. */
INLINE void NAME(weigh)(
    const float *weights, const T *const *values, int64_t count, float *out, int64_t stride,
    int64_t size, const int R
) {
    if (size % LANES != 0 || size > 8 * LANES) {
        for (int r = 0; r < R; r++)
            for (int64_t j = 0; j < count; j++)
                NAME(add_scaled)(weights[r * stride + j], values[j], out + r * size, size);
        return;
    }
    lanes sum[2][8];
    for (int r = 0; r < R; r++)
        for (int64_t i = 0; i < size / LANES; i++) sum[r][i] = lanes_float32(out + r * size + i * LANES);
    for (int64_t j = 0; j < count; j++)
        for (int64_t i = 0; i < size / LANES; i++) {
            lanes value = NAME(lanes)(values[j] + i * LANES);
            for (int r = 0; r < R; r++) sum[r][i] += weights[r * stride + j] * value;
        }
    for (int r = 0; r < R; r++)
        for (int64_t i = 0; i < size / LANES; i++)
            *(lanes_at *)(out + r * size + i * LANES) = sum[r][i];
}

/* One of the two over the slots from `first` to before `last`, of those at hand. A size and a
   number of rows that the compiler knows leave the sums in registers. */
static void NAME(part)(
    int weighs, float *rows, const T *const *slots, int64_t first, int64_t last, float *scores,
    int64_t stride, int64_t size, int R
) {
    int64_t count = last - first;
    if (count <= 0) return;
    slots += first;
    scores += first;
#define OF(SIZE, ROWS) \
    if (weighs) NAME(weigh)(scores, slots, count, rows, stride, SIZE, ROWS); \
    else NAME(multiply)(rows, slots, count, scores, stride, SIZE, ROWS)
    if (size == 64 && R == 1) { OF(64, 1); }
    else if (size == 64) { OF(64, 2); }
    else if (size == 128 && R == 1) { OF(128, 1); }
    else if (size == 128) { OF(128, 2); }
    else for (int r = 0; r < R; r++, rows += size, scores += stride) { OF(size, 1); }
#undef OF
}

/* The same for all rows of a piece, two at a time over what both see. */
static void NAME(pass)(
    const struct attention *a, const struct piece *p, int weighs, float *rows,
    const T *const *slots, int64_t low, int64_t count, float *scores, int64_t stride, int64_t size
) {
    int64_t group = a->heads / a->kv_heads, number = (p->last - p->first) * group, r = 0;
    for (; r + 2 <= number; r += 2, rows += 2 * size, scores += 2 * stride) {
        struct seen x = slots_seen(a, p->past + p->first + r / group, low, count);
        struct seen y = slots_seen(a, p->past + p->first + (r + 1) / group, low, count);
        /* The second row is at the same position or the next one. */
        int64_t before = y.first < x.last ? y.first : x.last;
        int64_t after = x.last > y.first ? x.last : y.first;
        NAME(part)(weighs, rows, slots, x.first, before, scores, stride, size, 1);
        NAME(part)(weighs, rows, slots, y.first, x.last, scores, stride, size, 2);
        NAME(part)(weighs, rows + size, slots, after, y.last, scores + stride, stride, size, 1);
    }
    if (r < number) {
        struct seen x = slots_seen(a, p->past + p->first + r / group, low, count);
        NAME(part)(weighs, rows, slots, x.first, x.last, scores, stride, size, 1);
    }
}

/* Softmax weights of one row in place of its products, not normalised and rounded to T; their sum
   before that rounding, with the sink's share. */
static float NAME(soften)(
    const struct attention *a, float *scores, int64_t count, const float *sink
) {
    for (int64_t j = 0; j < count; j++) scores[j] *= a->scale;
    for (int64_t j = 0; a->soft_cap > 0.0f && j < count; j++)
        scores[j] = a->soft_cap * tanhf(scores[j] / a->soft_cap);
    float top = largest(scores, count, sink == NULL ? -INFINITY : *sink);
    for (int64_t j = 0; j < count; j++) scores[j] = exp_below(scores[j] - top);
    lanes sum = {0};
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES) sum += lanes_float32(scores + j);
    for (int64_t l = 0; j + l < count; l++) sum[l] += scores[j + l];
    for (j = 0; j < count; j++) {
        T rounded;
        NAME(store)(&rounded, scores[j]);
        scores[j] = NAME(load)(&rounded);
    }
    return sum_of_lanes(sum) + (sink == NULL ? 0.0f : exp_below(*sink - top));
}

/* Where K of a head lies in the slots from `first` on, or what is `behind` it; V is `size`. */
static void NAME(find)(
    const struct attention *a, const struct piece *p, int64_t first, int64_t count, int64_t behind,
    const T **found, int64_t size
) {
    const int32_t *table = a->page_table + p->request * a->pages;
    for (int64_t j = 0; j < count; j++) {
        int64_t slot = first + j;
        int64_t place = (int64_t)table[slot / a->page_size] * a->page_size + slot % a->page_size;
        found[j] = (const T *)a->kv + (2 * a->kv_heads * place + 2 * p->head) * size + behind;
    }
}

/* The tokens of a piece over the slots that they see, for the heads of q that share one of K. */
static void NAME(attend)(
    const struct attention *a, const struct piece *p, float *room, int64_t size
) {
    int64_t group = a->heads / a->kv_heads, rows = (p->last - p->first) * group;
    int64_t begin = oldest_seen(a, p->past + p->first), end = p->past + p->last;
    int64_t stride = end - begin;
    float *queries = room, *out = queries + rows * size, *totals = out + rows * size;
    float *block = totals + rows, *scores = block + BLOCK * size;
    int wide = rows > 2; /* Copied and converted once for all rows; in the cache slots lie apart. */
    const T *slots[BLOCK];
    const float *wide_slots[BLOCK];
    for (int64_t j = 0; j < BLOCK; j++) wide_slots[j] = block + j * size;
    for (int64_t r = 0; r < rows; r++) {
        int64_t row = (p->first + r / group) * a->heads + p->head * group + r % group;
        NAME(widen)((const T *)a->q + row * size, queries + r * size, size);
    }
    memset(out, 0, (size_t)(rows * size) * sizeof(float));
    for (int weighs = 0; weighs < 2; weighs++) {
        for (int64_t low = begin; low < end; low += BLOCK) {
            int64_t count = end - low < BLOCK ? end - low : BLOCK;
            float *theirs = scores + low - begin, *held = weighs ? out : queries;
            NAME(find)(a, p, low, count, weighs * size, slots, size);
            if (wide) {
                for (int64_t j = 0; j < count; j++)
                    NAME(widen)(slots[j], block + j * size, size);
                pass_float32(a, p, weighs, held, wide_slots, low, count, theirs, stride, size);
            } else
                NAME(pass)(a, p, weighs, held, slots, low, count, theirs, stride, size);
        }
        for (int64_t r = 0; !weighs && r < rows; r++) {
            int64_t position = p->past + p->first + r / group, oldest = oldest_seen(a, position);
            const float *sink = a->sinks == NULL ? NULL : a->sinks + p->head * group + r % group;
            float *first = scores + r * stride + oldest - begin;
            totals[r] = NAME(soften)(a, first, position + 1 - oldest, sink);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t row = (p->first + r / group) * a->heads + p->head * group + r % group;
        for (int64_t i = 0; i < size; i++)
            NAME(store)((T *)a->out + row * size + i, out[r * size + i] / totals[r]);
    }
}

/* Returns 0, or 1 where there is no memory. */
int NAME(paged_attention)(
    const T *q, const T *kv, const int32_t *page_table, const int32_t *query_start,
    const int32_t *kv_lens, const int32_t *counts, const float *sinks, T *out, int64_t tokens,
    int64_t heads, int64_t kv_heads, int64_t size, int64_t page_size, int64_t pages, int64_t window,
    int64_t chunk, float scale, float soft_cap, int threads
) {
    const struct attention all = {
        q, kv, page_table, query_start, kv_lens, counts, sinks, out, tokens, heads, kv_heads, size,
        page_size, pages, window, chunk, scale, soft_cap,
    };
    const struct attention *a = &all;
    int64_t group = heads / kv_heads, count = 0, width = 0, work = 0;
    struct piece *pieces = cut_into_pieces(a, &count, &width, &work);
    int missing = pieces == NULL;
    if (work < SHARED_PRODUCTS) threads = 1;
    int64_t real = a->query_start[a->counts[1]];
    memset(
        (T *)a->out + real * a->heads * size, 0,
        (size_t)((a->tokens - real) * a->heads * size) * sizeof(T)
    );
    int64_t room = PIECE * group * (2 * size + 1) + BLOCK * size + width * group;
#pragma omp parallel num_threads(threads) if (threads > 1 && count > 1) reduction(| : missing)
    {
        float *mine = missing ? NULL : malloc((size_t)room * sizeof(float));
        missing |= mine == NULL;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; i++) {
            if (mine == NULL) continue;
            NAME(attend)(a, pieces + i, mine, size);
        }
        free(mine);
    }
    free(pieces);
    return missing;
}
