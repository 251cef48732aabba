// y = softmax(scale q . k) v of each row over a stretch of keys: q, k, v and y in bf16, sums in fp32, for CPUs with
// AVX2.
//
// Eight keys, later eight values, are widened into a tile in the first cache, which all heads that share them use. A
// row is computed by itself, in an order that depends on its number of keys alone, and so gets in a block what it would
// get alone.
#include "bf16.h"
#include <immintrin.h>
#include <math.h>

// From the compiler's command line: TILE keys at a time, one a lane of a vector of scores.
#define FLAT _Pragma("GCC unroll 8")

typedef struct {
    const uint16_t *at; // of the first head's first row or key
    int64_t next, head; // from a row or key to the next, from a head to the next
    int64_t width;      // numbers of a row or key of a head, a multiple of 8
} rows_of;

static inline __m256 wide(const uint16_t *x) { // bf16 is the upper half of fp32
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)), 16));
}

// The first `count` of a TILE of keys or values -> tile [width / 8, TILE, 8] in fp32, with 0 for the rest.
static void widen(const uint16_t *x, int64_t next, int64_t width, int64_t count, float *tile) {
    for (int64_t i = 0; i < width; i += 8)
        for (int64_t j = 0; j < TILE; j++)
            _mm256_storeu_ps(tile + i * TILE + 8 * j, j < count ? wide(x + j * next + i) : _mm256_setzero_ps());
}

// q . k for each of a TILE of keys.
static inline __m256 dots(const float *q, const float *tile, int64_t width) {
    __m256 sum[TILE];
    FLAT for (int j = 0; j < TILE; j++) sum[j] = _mm256_setzero_ps();
    for (int64_t i = 0; i < width; i += 8) {
        __m256 u = _mm256_loadu_ps(q + i);
        FLAT for (int j = 0; j < TILE; j++)
            sum[j] = _mm256_fmadd_ps(u, _mm256_loadu_ps(tile + i * TILE + 8 * j), sum[j]);
    }
    __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(sum[0], sum[1]), _mm256_hadd_ps(sum[2], sum[3]));
    __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(sum[4], sum[5]), _mm256_hadd_ps(sum[6], sum[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

// y += p . v over a TILE of values.
static inline void add_values(const float *p, const float *tile, int64_t width, float *y) {
    __m256 weight[TILE];
    FLAT for (int j = 0; j < TILE; j++) weight[j] = _mm256_broadcast_ss(p + j);
    for (int64_t i = 0; i < width; i += 8) {
        __m256 sum = _mm256_loadu_ps(y + i);
        FLAT for (int j = 0; j < TILE; j++)
            sum = _mm256_fmadd_ps(weight[j], _mm256_loadu_ps(tile + i * TILE + 8 * j), sum);
        _mm256_storeu_ps(y + i, sum);
    }
}

// e^x for x <= 0, by 2^n e^r with |r| <= ln 2 / 2 and seven terms of e^r; NaN for NaN, 1e-38 for less than -87.
static inline __m256 exponential(__m256 x) {
    x = _mm256_max_ps(_mm256_set1_ps(-87), x); // in this order NaN stays
    const __m256 per_ln2 = _mm256_set1_ps(1.44269504f), ln2 = _mm256_set1_ps(0.693359375f); // and the rest of ln 2:
    const __m256 rest = _mm256_set1_ps(-2.12194440e-4f);
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, per_ln2), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, rest, _mm256_fnmadd_ps(n, ln2, x));
    __m256 sum = _mm256_set1_ps(1.f / 720);
    const float terms[] = {1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1, 1};
    FLAT for (int i = 0; i < 6; i++) sum = _mm256_fmadd_ps(sum, r, _mm256_set1_ps(terms[i]));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(sum, _mm256_castsi256_ps(power));
}

// Scores -> weights that are still to be divided by their sum, which is returned. What fills up the last tile weighs
// next to nothing, and its values are 0.
static float soften(float *scores, int64_t count, int64_t padded) {
    for (int64_t i = count; i < padded; i++) scores[i] = -INFINITY;
    __m256 most = _mm256_set1_ps(-INFINITY), sum = _mm256_setzero_ps();
    float lanes[8];
    for (int64_t i = 0; i < padded; i += 8) most = _mm256_max_ps(_mm256_loadu_ps(scores + i), most);
    _mm256_storeu_ps(lanes, most);
    for (int i = 1; i < 8; i++) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
    most = _mm256_set1_ps(lanes[0]);
    for (int64_t i = 0; i < padded; i += 8) {
        __m256 weights = exponential(_mm256_sub_ps(_mm256_loadu_ps(scores + i), most));
        _mm256_storeu_ps(scores + i, weights);
        sum = _mm256_add_ps(sum, weights);
    }
    _mm256_storeu_ps(lanes, sum);
    for (int i = 1; i < 8; i++) lanes[0] += lanes[i];
    return lanes[0];
}

// A row's `group` heads that share keys: k and v from the first key that it sees, y [group, width of v].
static void attend_row(rows_of q, rows_of k, rows_of v, uint16_t *y, float *scratch, int64_t group, int64_t count,
                       float scale) {
    int64_t padded = (count + TILE - 1) / TILE * TILE;
    float *query = scratch, *output = query + group * q.width, *tile = output + group * v.width;
    float *scores = tile + TILE * (k.width > v.width ? k.width : v.width);
    for (int64_t h = 0; h < group; h++)
        for (int64_t i = 0; i < q.width; i += 8)
            _mm256_storeu_ps(query + h * q.width + i,
                             _mm256_mul_ps(_mm256_set1_ps(scale), wide(q.at + h * q.head + i)));
    for (int64_t t = 0; t < count; t += TILE) {
        widen(k.at + t * k.next, k.next, k.width, count - t < TILE ? count - t : TILE, tile);
        for (int64_t h = 0; h < group; h++)
            _mm256_storeu_ps(scores + h * padded + t, dots(query + h * q.width, tile, k.width));
    }
    memset(output, 0, group * v.width * sizeof(float));
    float sums[group];
    for (int64_t h = 0; h < group; h++) sums[h] = soften(scores + h * padded, count, padded);
    for (int64_t t = 0; t < count; t += TILE) {
        widen(v.at + t * v.next, v.next, v.width, count - t < TILE ? count - t : TILE, tile);
        for (int64_t h = 0; h < group; h++)
            add_values(scores + h * padded + t, tile, v.width, output + h * v.width);
    }
    for (int64_t h = 0; h < group; h++)
        for (int64_t i = 0; i < v.width; i++)
            y[h * v.width + i] = rounded(output[h * v.width + i] / sums[h]);
}

// q [rows, heads, width], k and v [keys, key heads, their widths], spans [rows, 2] with the first key that a row sees
// and the one behind the last, y [rows, heads, width of v]; `scratch` has `room` numbers for each thread.
void attend(rows_of *q, rows_of *k, rows_of *v, const int64_t *spans, uint16_t *y, float *scratch, int64_t room,
            int64_t rows, int64_t key_heads, int64_t group, float scale, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t task = 0; task < rows * key_heads; task++) {
        int64_t row = task / key_heads, head = task % key_heads, first = spans[2 * row];
        rows_of query = *q, key = *k, value = *v;
        query.at += row * q->next + head * group * q->head;
        key.at += first * k->next + head * k->head;
        value.at += first * v->next + head * v->head;
        attend_row(query, key, value, y + task * group * v->width, scratch + omp_get_thread_num() * room, group,
                   spans[2 * row + 1] - first, scale);
    }
}
