// y[r][o] = sum over i of x[r][i] * w[o][i], with w in bf16 and everything else in fp32, for a handful of rows r.
//
// Each weight is read once for up to four rows, so that checking a few tokens takes little longer than one, and the
// weights of the next outputs are asked for in time: one row is as fast as the memory. A sum has the same order
// whatever the number of rows, and so the same value.
#include <immintrin.h>
#include <stdint.h>

#define STEP 16  // inputs: as 32-bit words, eight weights have their odd inputs above their even ones
#define MOST 4   // rows that share what is read
#define PANEL 12 // outputs that a thread takes at a time: whole tiles of three and of four
#define FLAT _Pragma("GCC unroll 8")

static inline float total(__m256 v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

// The even inputs' weights of eight words, widened to fp32: bf16 is the upper half of it. Then the odd inputs'.
static inline __m256 even(const uint16_t *w) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)w), 16));
}
static inline __m256 odd(const uint16_t *w) {
    // Two shifts: a mask would take a register of the sums.
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(_mm256_loadu_si256((const __m256i *)w), 16), 16));
}

// ROWS rows by OUTS outputs. Sums, a piece of weight for each output and one of input fit into 16 registers.
#define TILE(ROWS, OUTS)                                                                        \
    static void tile##ROWS##x##OUTS(const float *x, const uint16_t *w, float *y, int64_t n, int64_t m) { \
        __m256 sum[ROWS][OUTS], v[OUTS];                                                        \
        FLAT for (int r = 0; r < ROWS; r++)                                                     \
            FLAT for (int o = 0; o < OUTS; o++) sum[r][o] = _mm256_setzero_ps();                \
        for (int64_t i = 0; i < n; i += STEP) {                                                 \
            if (!(i & STEP)) /* a cache line has two steps of weights */                        \
                FLAT for (int o = 0; o < OUTS; o++)                                             \
                    _mm_prefetch((const char *)(w + (OUTS + o) * n + i), _MM_HINT_T0);          \
            FLAT for (int o = 0; o < OUTS; o++) v[o] = even(w + o * n + i);                     \
            FLAT for (int r = 0; r < ROWS; r++) {                                               \
                __m256 u = _mm256_loadu_ps(x + r * n + i);                                      \
                FLAT for (int o = 0; o < OUTS; o++) sum[r][o] = _mm256_fmadd_ps(u, v[o], sum[r][o]); \
            }                                                                                   \
            FLAT for (int o = 0; o < OUTS; o++) v[o] = odd(w + o * n + i);                      \
            FLAT for (int r = 0; r < ROWS; r++) {                                               \
                __m256 u = _mm256_loadu_ps(x + r * n + i + STEP / 2);                           \
                FLAT for (int o = 0; o < OUTS; o++) sum[r][o] = _mm256_fmadd_ps(u, v[o], sum[r][o]); \
            }                                                                                   \
        }                                                                                       \
        FLAT for (int r = 0; r < ROWS; r++)                                                     \
            FLAT for (int o = 0; o < OUTS; o++) y[r * m + o] = total(sum[r][o]);                \
    }
TILE(1, 4) TILE(2, 4) TILE(3, 3) TILE(4, 3)
TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1)

typedef void tile(const float *, const uint16_t *, float *, int64_t, int64_t);
static tile *const wide[MOST] = {tile1x4, tile2x4, tile3x3, tile4x3};
static const int64_t width[MOST] = {4, 4, 3, 3};
static tile *const narrow[MOST] = {tile1x1, tile2x1, tile3x1, tile4x1};

// Each step's even inputs, then its odd ones.
static void part(const float *x, float *parted, int64_t count) {
    for (int64_t i = 0; i < count; i += STEP)
        for (int64_t j = 0; j < STEP / 2; j++) {
            parted[i + j] = x[i + 2 * j];
            parted[i + STEP / 2 + j] = x[i + 2 * j + 1];
        }
}

// x [rows, n], w [m, n], y [rows, m]; n is a multiple of STEP; `parted` has room for what x has.
void bf16_rows(const float *x, const uint16_t *w, float *y, float *parted, int64_t rows, int64_t n, int64_t m,
               int threads) {
    int64_t groups = (rows + MOST - 1) / MOST;
    part(x, parted, rows * n);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < m; first += PANEL) {
        int64_t last = first + PANEL < m ? first + PANEL : m;
        for (int64_t g = 0, r = 0; g < groups; g++) {
            int64_t count = (rows - r + groups - g - 1) / (groups - g), o = first; // rows are shared out evenly
            for (; o + width[count - 1] <= last; o += width[count - 1])
                wide[count - 1](parted + r * n, w + o * n, y + r * m + o, n, m);
            for (; o < last; o++)
                narrow[count - 1](parted + r * n, w + o * n, y + r * m + o, n, m);
            r += count;
        }
    }
}
