// The forward of a plain decoder (Llama, Mistral, Qwen) with int4 weights, for CPUs with AVX2, and faster for many rows
// on those with AVX-512 and VNNI; the results are the same.
//
// Each BLOCK inputs of a weight's row share a scale; inputs are quantised to 8 bits, BLOCK by BLOCK, while running.
// Eight outputs are the lanes of a vector and lie together in a panel, which is read as one stream: for a row or two
// that takes what the memory takes. Keys and values are kept in bf16, all else between the products is fp32.
#include "row_attention.c"

// From the compiler's command line: OUTS outputs of a panel, BLOCK inputs that share a scale, AHEAD bytes from what is
// multiplied to what is asked for.
#define BLOCK_BYTES (2 * OUTS + BLOCK * OUTS / 2) // fp16 scales, then nibbles of weight + 8
#define MOST 4                                    // rows that share a loaded block
#define LEAST 1e-30f                              // inputs that are no larger count as 0

// y = w x + bias: w as `pack_int4` leaves it, `in` a multiple of BLOCK, bias [out] or null.
typedef struct {
    const uint8_t *packed;
    const float *bias;
    int64_t in, out;
} matrix;

// The outputs of one matrix follow those of the other in qkv and gate_up. The norms of queries and keys may be null.
typedef struct {
    matrix qkv, o, gate_up, down;
    const float *input_norm, *mlp_norm, *q_norm, *k_norm;
} layer;

typedef struct {
    const layer *layers;
    int64_t num_layers, width, inner, heads, key_heads, head_width;
    matrix embedding, head;
    const float *norm;
    float epsilon;
} decoder;

// Rows as a product takes them: [rows, in] numbers, and for each BLOCK of a row a scale and 8 times the numbers' sum.
typedef struct {
    int8_t *numbers;
    float *scales;
    int32_t *sums;
} narrow;

// What a forward works in, for `rows` rows at least; `attention` has `room` numbers for each thread.
typedef struct {
    float *x, *normal, *y, *attention; // x and normal [rows, width], y [rows, outputs of the widest product]
    uint16_t *query, *attended;        // [rows, heads, head width]
    int64_t *spans, room;              // [rows, 2]
    narrow input;
} workspace;

static void quantize_row(const float *x, int64_t n, narrow to) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256 sign = _mm256_set1_ps(-0.f);
    for (int64_t b = 0; b < n / BLOCK; b++) {
        __m256 v[4], most = _mm256_setzero_ps(), none = most;
        __m256i q[4], sum = _mm256_setzero_si256();
        float lanes[8];
        uint32_t sums[8]; // unsigned, as what NaN and infinity become adds up to too much
        FLAT for (int j = 0; j < 4; j++) {
            v[j] = _mm256_loadu_ps(x + b * BLOCK + 8 * j);
            most = _mm256_max_ps(most, _mm256_andnot_ps(sign, v[j]));
            none = _mm256_or_ps(none, _mm256_cmp_ps(v[j], v[j], _CMP_UNORD_Q)); // where it is NaN
        }
        _mm256_storeu_ps(lanes, most);
        for (int i = 1; i < 8; i++) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
        FLAT for (int j = 0; j < 4; j++) {
            q[j] = _mm256_cvtps_epi32(_mm256_mul_ps(v[j], _mm256_set1_ps(lanes[0] > LEAST ? 127 / lanes[0] : 0)));
            sum = _mm256_add_epi32(sum, q[j]);
        }
        __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
        _mm256_storeu_si256((__m256i *)(to.numbers + b * BLOCK), _mm256_permutevar8x32_epi32(bytes, order));
        _mm256_storeu_si256((__m256i *)sums, sum);
        for (int i = 1; i < 8; i++) sums[0] += sums[i];
        to.scales[b] = _mm256_movemask_ps(none) ? NAN : lanes[0] / 127;
        to.sums[b] = (int32_t)(8 * sums[0]);
    }
}

static narrow row_of(narrow x, int64_t r, int64_t n) {
    return (narrow){x.numbers + r * n, x.scales + r * (n / BLOCK), x.sums + r * (n / BLOCK)};
}

// Four inputs of a row, for every output.
static inline __m256i four(const int8_t *x) {
    int32_t bytes;
    memcpy(&bytes, x, 4);
    return _mm256_set1_epi32(bytes);
}

// A block's sums of nibbles and numbers. Without VNNI they fit into 16 bits: 16 x 15 x 127 = 30480.
#ifdef __AVX512VNNI__
typedef struct {
    __m256i low, high;
} block_sum; // two, as one would wait for itself
static inline block_sum no_sum(void) { return (block_sum){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline block_sum plus(block_sum sum, __m256i low, __m256i high, const int8_t *x) {
    return (block_sum){_mm256_dpbusd_epi32(sum.low, low, four(x)),
                       _mm256_dpbusd_epi32(sum.high, high, four(x + BLOCK / 2))};
}
static inline __m256i in_32_bits(block_sum sum) { return _mm256_add_epi32(sum.low, sum.high); }
#else
typedef __m256i block_sum;
static inline block_sum no_sum(void) { return _mm256_setzero_si256(); }
static inline block_sum plus(block_sum sum, __m256i low, __m256i high, const int8_t *x) {
    return _mm256_add_epi16(sum, _mm256_add_epi16(_mm256_maddubs_epi16(low, four(x)),
                                                  _mm256_maddubs_epi16(high, four(x + BLOCK / 2))));
}
static inline __m256i in_32_bits(block_sum sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
#endif

// y[r][o] = the products of ROWS rows x with a panel w.
#define TILE_OF(ROWS)                                                                                                \
    static void tile##ROWS(narrow x, int64_t n, const uint8_t *w, float *y) {                                        \
        const __m256i nibble = _mm256_set1_epi8(15);                                                                 \
        __m256 total[ROWS];                                                                                          \
        FLAT for (int r = 0; r < ROWS; r++) total[r] = _mm256_setzero_ps();                                          \
        for (int64_t b = 0, blocks = n / BLOCK; b < blocks; b++, w += BLOCK_BYTES) {                                 \
            FLAT for (int line = 0; line < 3; line++)                                                                \
                _mm_prefetch((const char *)w + AHEAD + 64 * line, _MM_HINT_T0);                                      \
            __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)w));                                     \
            block_sum sum[ROWS];                                                                                     \
            FLAT for (int r = 0; r < ROWS; r++) sum[r] = no_sum();                                                   \
            FLAT for (int j = 0; j < 4; j++) {                                                                       \
                __m256i both = _mm256_loadu_si256((const __m256i *)(w + 2 * OUTS) + j);                              \
                __m256i low = _mm256_and_si256(both, nibble);                                                        \
                __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);                                 \
                FLAT for (int r = 0; r < ROWS; r++)                                                                  \
                    sum[r] = plus(sum[r], low, high, x.numbers + r * n + b * BLOCK + 4 * j);                         \
            }                                                                                                        \
            FLAT for (int r = 0; r < ROWS; r++) {                                                                    \
                __m256i whole = _mm256_sub_epi32(in_32_bits(sum[r]), _mm256_set1_epi32(x.sums[r * blocks + b]));     \
                __m256 scales = _mm256_mul_ps(scale, _mm256_set1_ps(x.scales[r * blocks + b]));                      \
                total[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole), scales, total[r]);                             \
            }                                                                                                        \
        }                                                                                                            \
        FLAT for (int r = 0; r < ROWS; r++) _mm256_storeu_ps(y + r * OUTS, total[r]);                                \
    }
TILE_OF(1) TILE_OF(2) TILE_OF(3) TILE_OF(4)
static void (*const tiles[MOST])(narrow, int64_t, const uint8_t *, float *) = {tile1, tile2, tile3, tile4};

// y [rows, out] = w x + bias, or += with `more`.
static void multiply(narrow x, int64_t rows, const matrix *w, float *y, int more, int threads) {
    int64_t panels = (w->out + OUTS - 1) / OUTS, bytes = w->in / BLOCK * BLOCK_BYTES, groups = (rows + MOST - 1) / MOST;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t p = 0; p < panels; p++) {
        int64_t first = p * OUTS, outs = w->out - first < OUTS ? w->out - first : OUTS;
        for (int64_t g = 0, r = 0, some; g < groups; g++, r += some) {
            float sums[MOST * OUTS];
            some = (rows - r + groups - g - 1) / (groups - g); // rows are shared out evenly
            tiles[some - 1](row_of(x, r, w->in), w->in, w->packed + p * bytes, sums);
            for (int64_t i = 0; i < some; i++)
                for (int64_t o = 0; o < outs; o++) {
                    float *to = y + (r + i) * w->out + first + o;
                    *to = sums[i * OUTS + o] + (w->bias ? w->bias[first + o] : 0) + (more ? *to : 0);
                }
        }
    }
}

// x weight / sqrt(mean of x^2 + epsilon), in place or not.
static void normalize(const float *x, const float *weight, float epsilon, int64_t n, float *y) {
    float sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    float scale = 1 / sqrtf(sum / n + epsilon);
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
}

// y = w norm(x)
static void multiply_normalized(const float *x, const float *norm, float epsilon, int64_t rows, const matrix *w,
                                workspace s, float *y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1)
    for (int64_t r = 0; r < rows; r++) {
        normalize(x + r * w->in, norm, epsilon, w->in, s.normal + r * w->in);
        quantize_row(s.normal + r * w->in, w->in, row_of(s.input, r, w->in));
    }
    multiply(s.input, rows, w, y, 0, threads);
}

// Heads [count, width] of fp32, normalized if there is a norm and turned to their position -> bf16.
static void turn(float *x, int64_t count, int64_t width, const float *norm, float epsilon, const float *cosines,
                 const float *sines, uint16_t *y) {
    int64_t half = width / 2;
    for (int64_t h = 0; h < count; h++, x += width, y += width) {
        if (norm) normalize(x, norm, epsilon, width, x);
        for (int64_t i = 0; i < half; i++) {
            y[i] = rounded(x[i] * cosines[i] - x[i + half] * sines[i]);
            y[i + half] = rounded(x[i + half] * cosines[i] + x[i] * sines[i]);
        }
    }
}

// x += o attention(qkv norm(x)): the rows' keys and values go to cache [2, capacity, key heads, head width].
static void attention_layer(const decoder *d, const layer *l, uint16_t *cache, int64_t capacity, int64_t start,
                            int64_t rows, const float *turns, workspace s, int threads) {
    int64_t width = d->head_width, queries = d->heads * width, keys = d->key_heads * width;
    uint16_t *key = cache, *value = cache + capacity * keys;
    multiply_normalized(s.x, l->input_norm, d->epsilon, rows, &l->qkv, s, s.y, threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1)
    for (int64_t r = 0; r < rows; r++) {
        float *q = s.y + r * l->qkv.out, *k = q + queries, *v = k + keys;
        const float *cosines = turns + (start + r) * width, *sines = cosines + width / 2;
        turn(q, d->heads, width, l->q_norm, d->epsilon, cosines, sines, s.query + r * queries);
        turn(k, d->key_heads, width, l->k_norm, d->epsilon, cosines, sines, key + (start + r) * keys);
        for (int64_t i = 0; i < keys; i++) value[(start + r) * keys + i] = rounded(v[i]);
        s.spans[2 * r] = 0;
        s.spans[2 * r + 1] = start + r + 1;
    }
    rows_of q = {s.query, queries, width, width}, k = {key, keys, width, width}, v = {value, keys, width, width};
    attend(&q, &k, &v, s.spans, s.attended, s.attention, s.room, rows, d->key_heads, d->heads / d->key_heads,
           1 / sqrtf(width), threads);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = 0; i < queries; i += 8)
            _mm256_storeu_ps(s.y + r * queries + i, wide(s.attended + r * queries + i));
        quantize_row(s.y + r * queries, queries, row_of(s.input, r, queries));
    }
    multiply(s.input, rows, &l->o, s.x, 1, threads);
}

// gate <- silu(gate) up, with silu(x) = x / (1 + e^-x). n is a multiple of 8.
static void gate_with(float *gate, const float *up, int64_t n) {
    const __m256 one = _mm256_set1_ps(1), sign = _mm256_set1_ps(-0.f);
    for (int64_t i = 0; i < n; i += 8) {
        __m256 x = _mm256_loadu_ps(gate + i), small = exponential(_mm256_or_ps(x, sign)); // e^-|x|
        __m256 above = _mm256_blendv_ps(x, _mm256_mul_ps(x, small), x);                   // by the sign of x
        __m256 silu = _mm256_div_ps(above, _mm256_add_ps(one, small));
        _mm256_storeu_ps(gate + i, _mm256_mul_ps(silu, _mm256_loadu_ps(up + i)));
    }
}

// x += down(silu(gate norm(x)) up norm(x))
static void mlp(const decoder *d, const layer *l, int64_t rows, workspace s, int threads) {
    multiply_normalized(s.x, l->mlp_norm, d->epsilon, rows, &l->gate_up, s, s.y, threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1)
    for (int64_t r = 0; r < rows; r++) {
        float *gate = s.y + r * 2 * d->inner;
        gate_with(gate, gate + d->inner, d->inner);
        quantize_row(gate, d->inner, row_of(s.input, r, d->inner));
    }
    multiply(s.input, rows, &l->down, s.x, 1, threads);
}

static void embed(const matrix *w, int64_t id, float *x) {
    const uint8_t *block = w->packed + id / OUTS * (w->in / BLOCK * BLOCK_BYTES);
    int64_t lane = id % OUTS;
    for (int64_t b = 0; b < w->in; b += BLOCK, block += BLOCK_BYTES) {
        uint16_t scale;
        memcpy(&scale, block + 2 * lane, 2);
        for (int64_t i = 0; i < BLOCK / 2; i++) {
            uint8_t both = block[2 * OUTS + i / 4 * 4 * OUTS + 4 * lane + i % 4];
            x[b + i] = _cvtsh_ss(scale) * ((both & 15) - 8);
            x[b + BLOCK / 2 + i] = _cvtsh_ss(scale) * ((both >> 4) - 8);
        }
    }
}

// Logits [last, vocabulary] that follow the last rows of ids [rows], which stand behind `start` cached tokens; cache
// [layers, 2, capacity, key heads, head width] in bf16, turns [capacity, 2, head width / 2] with cosines and sines.
void forward(const decoder *d, const int64_t *ids, int64_t rows, int64_t start, int64_t last, uint16_t *cache,
             int64_t capacity, const float *turns, const workspace *s, float *logits, int threads) {
    int64_t layer_of_cache = 2 * capacity * d->key_heads * d->head_width;
    for (int64_t r = 0; r < rows; r++) embed(&d->embedding, ids[r], s->x + r * d->width);
    for (int64_t l = 0; l < d->num_layers; l++) {
        attention_layer(d, d->layers + l, cache + l * layer_of_cache, capacity, start, rows, turns, *s, threads);
        mlp(d, d->layers + l, rows, *s, threads);
    }
    if (last)
        multiply_normalized(s->x + (rows - last) * d->width, d->norm, d->epsilon, last, &d->head, *s, logits, threads);
}

// w [out, in] in bf16 -> packed [panels, in / BLOCK, BLOCK_BYTES]; outputs that fill up the last panel are 0. The
// largest weight of a block becomes -8.
void pack_int4(const uint16_t *w, uint8_t *packed, int64_t in, int64_t out, int threads) {
    int64_t panels = (out + OUTS - 1) / OUTS, blocks = in / BLOCK;
    memset(packed, 0, panels * blocks * BLOCK_BYTES);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t task = 0; task < panels * blocks; task++)
        for (int64_t lane = 0; lane < OUTS && task / blocks * OUTS + lane < out; lane++) {
            const uint16_t *from = w + (task / blocks * OUTS + lane) * in + task % blocks * BLOCK;
            uint8_t *block = packed + task * BLOCK_BYTES;
            float values[BLOCK], most = 0;
            for (int64_t i = 0; i < BLOCK; i++) {
                uint32_t bits = (uint32_t)from[i] << 16;
                memcpy(values + i, &bits, 4);
                if (fabsf(values[i]) > fabsf(most)) most = values[i];
            }
            uint16_t scale = _cvtss_sh(most / -8, _MM_FROUND_TO_NEAREST_INT);
            float inverse = _cvtsh_ss(scale) != 0 ? 1 / _cvtsh_ss(scale) : 0;
            memcpy(block + 2 * lane, &scale, 2);
            for (int64_t i = 0; i < BLOCK; i++) {
                float steps = rintf(values[i] * inverse) + 8;
                uint8_t number = steps < 0 ? 0 : steps > 15 ? 15 : (uint8_t)steps;
                block[2 * OUTS + i % (BLOCK / 2) / 4 * 4 * OUTS + 4 * lane + i % 4] |= number << (i < BLOCK / 2 ? 0 : 4);
            }
        }
}

// y [rows, out] = w x, for a test of the parts.
void product(const float *x, const matrix *w, narrow *input, float *y, int64_t rows, int threads) {
    for (int64_t r = 0; r < rows; r++) quantize_row(x + r * w->in, w->in, row_of(*input, r, w->in));
    multiply(*input, rows, w, y, 0, threads);
}
