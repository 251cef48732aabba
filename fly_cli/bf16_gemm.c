// y[r][o] = bias[o] + sum over i of x[r][i] * w[o][i]: x, w and y in bf16, the sum in fp32, for CPUs with AVX2, and for
// those with AVX-512 and bf16 products.
//
// Weights are kept in panels of PANEL outputs, in which all outputs' weights of two inputs lie together. Some outputs
// are the lanes of a vector, and an input is broadcast, so that nothing is added up across lanes. A panel is read as one
// stream, once for AT_ONCE rows: a few rows are as fast as the memory, many as the arithmetic. A sum has the same order
// whatever the number of rows, and so the same value.
#include "bf16.h"
#include <immintrin.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

// From the compiler's command line: PANEL outputs, MOST rows that share a loaded weight, STEP inputs a turn of the inner
// loop (their weights fill whole cache lines), CHUNK inputs whose weights stay in the first cache while all rows use
// them, AT_ONCE rows at a time.
#define AHEAD 2048 // words from what is multiplied to what is asked for; a prefetch behind the end does no harm
#define HUGE_PAGE (2 << 20)
#define FLAT _Pragma("GCC unroll 24")

// LANES outputs of a vector; a pair of inputs is multiplied in PARTS. A row of `terms` is what is broadcast, one by one.
#ifdef __AVX512BF16__
#define LANES 16
#define PARTS 1
typedef __m512 vector;
typedef uint32_t term; // a pair of inputs

static inline vector weights(const uint32_t *w, int part) { return _mm512_load_ps((void *)w); }
static inline vector broadcast(const term *x) { return (__m512)_mm512_set1_epi32(*(const int *)x); }
static inline vector plus(vector sum, vector x, vector w) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
}
static inline vector load(const float *x) { return _mm512_load_ps(x); }
static inline void store(float *x, vector v) { _mm512_store_ps(x, v); }

static void terms_of(const uint16_t *x, term *to, int64_t count) { memcpy(to, x, 2 * count); }
#else
#define LANES 8
#define PARTS 2
typedef __m256 vector;
typedef float term; // an input, widened: bf16 is the upper half of fp32

static const uint32_t upper[8] __attribute__((aligned(32))) = {
    0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};

// Eight outputs' weights of the even input of a pair, widened, then of the odd one.
static inline vector weights(const uint32_t *w, int part) {
    if (!part) return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_load_si256((const __m256i *)w), 16));
    __m256 v; // By hand: a compiler keeps the mask in a register of the sums, or shifts twice, on the ports of products
    __asm__("vmovaps %1, %0\n\tvandps %2, %0, %0" : "=x"(v) : "m"(*(const __m256 *)w), "m"(*(const __m256 *)upper));
    return v;
}
static inline vector broadcast(const term *x) { return _mm256_broadcast_ss(x); }
static inline vector plus(vector sum, vector x, vector w) { return _mm256_fmadd_ps(x, w, sum); }
static inline vector load(const float *x) { return _mm256_load_ps(x); }
static inline void store(float *x, vector v) { _mm256_store_ps(x, v); }

static void terms_of(const uint16_t *x, term *to, int64_t count) {
    for (int64_t i = 0; i < count; i++) ((uint32_t *)to)[i] = (uint32_t)x[i] << 16;
}
#endif
#define VECS (PANEL / LANES) // vectors of outputs
#define TERMS (STEP / 2 * PARTS)

// sums[r][o] += the products of `count` terms, for ROWS rows x[r][n] and PANELS panels, `stride` words apart.
#define TILE(ROWS, PANELS)                                                                                           \
    static void tile##ROWS##x##PANELS(const term *x, int64_t n, const uint32_t *w, int64_t stride, float *sums,      \
                                      int64_t count) {                                                               \
        vector sum[ROWS][PANELS * VECS], v[VECS];                                                                    \
        FLAT for (int r = 0; r < ROWS; r++)                                                                          \
            FLAT for (int o = 0; o < PANELS * VECS; o++) sum[r][o] = load(sums + r * PANELS * PANEL + LANES * o);    \
        for (int64_t i = 0; i < count; i += TERMS, w += STEP / 2 * PANEL) {                                          \
            FLAT for (int p = 0; p < PANELS; p++)                                                                    \
                FLAT for (int line = 0; line < STEP / 2 * PANEL; line += 16)                                         \
                    _mm_prefetch((const char *)(w + p * stride + AHEAD + line), _MM_HINT_T0);                        \
            FLAT for (int j = 0; j < TERMS; j++)                                                                     \
                FLAT for (int p = 0; p < PANELS; p++) {                                                              \
                    const uint32_t *pair = w + p * stride + j / PARTS * PANEL;                                       \
                    FLAT for (int o = 0; o < VECS; o++) v[o] = weights(pair + LANES * o, j % PARTS);                 \
                    FLAT for (int r = 0; r < ROWS; r++) {                                                            \
                        vector u = broadcast(x + r * n + i + j);                                                     \
                        FLAT for (int o = 0; o < VECS; o++)                                                          \
                            sum[r][p * VECS + o] = plus(sum[r][p * VECS + o], u, v[o]);                              \
                    }                                                                                                \
                }                                                                                                    \
        }                                                                                                            \
        FLAT for (int r = 0; r < ROWS; r++)                                                                          \
            FLAT for (int o = 0; o < PANELS * VECS; o++) store(sums + r * PANELS * PANEL + LANES * o, sum[r][o]);    \
    }
TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1)
TILE(1, 4) TILE(2, 2) // for a few vectors of 8, which would wait for each other; those of 16 wait for the memory
typedef void tile(const term *, int64_t, const uint32_t *, int64_t, float *, int64_t);
#if MOST == 4
static tile *const one_panel[MOST] = {tile1x1, tile2x1, tile3x1, tile4x1};
#else
TILE(5, 1) TILE(6, 1) TILE(7, 1) TILE(8, 1)
static tile *const one_panel[MOST] = {tile1x1, tile2x1, tile3x1, tile4x1, tile5x1, tile6x1, tile7x1, tile8x1};
#endif

// w [m, n] -> packed [panels, n / 2, PANEL], each word with the weights of inputs 2i (lower half) and 2i + 1; outputs
// that fill up the last panel are 0. n is a multiple of STEP.
void pack(const uint16_t *w, uint32_t *packed, int64_t n, int64_t m, int threads) {
    int64_t panels = (m + PANEL - 1) / PANEL, pairs = n / 2;
#ifdef MADV_HUGEPAGE
    uintptr_t first = ((uintptr_t)packed + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    uintptr_t last = (uintptr_t)(packed + panels * PANEL * pairs) / HUGE_PAGE * HUGE_PAGE;
    if (first < last) madvise((void *)first, last - first, MADV_HUGEPAGE); // no more than a hint: it may fail
#endif
    const __m256i outs = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32((int)pairs));
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t p = 0; p < panels * (PANEL / 8); p++)
        for (int64_t i = 0; i < pairs; i++) {
            const int *from = (const int *)(w + 8 * p * n) + i;
            int word[8] = {0}, *to = (int *)packed + p / (PANEL / 8) * PANEL * pairs + i * PANEL + p % (PANEL / 8) * 8;
            for (int64_t o = 0; o < 8 && 8 * p + 8 > m && 8 * p + o < m; o++) word[o] = from[o * pairs];
            _mm256_store_si256((__m256i *)to, 8 * p + 8 > m ? _mm256_loadu_si256((__m256i *)word)
                                                           : _mm256_i32gather_epi32(from, outs, 4));
        }
}

// A thread's panels [from, to), for up to AT_ONCE rows of `n` terms.
static void multiply(const term *x, const uint32_t *w, const float *bias, uint16_t *y, int64_t rows, int64_t n,
                     int64_t m, int64_t from, int64_t to) {
    int64_t stride = PANEL * (n / PARTS), groups = (rows + MOST - 1) / MOST;
    int64_t chunk = rows <= MOST ? n : CHUNK / 2 * PARTS;
    float sums[AT_ONCE * PANEL] __attribute__((aligned(64)));
    for (int64_t p = from, panels; p < to; p += panels) {
        tile *several = MOST > 4 ? 0 : rows == 1 && p + 4 <= to ? tile1x4 : rows == 2 && p + 2 <= to ? tile2x2 : 0;
        panels = several ? 4 / rows : 1;
        memset(sums, 0, rows * panels * PANEL * sizeof(float));
        for (int64_t i = 0; i < n; i += chunk) {
            int64_t count = i + chunk < n ? chunk : n - i;
            for (int64_t g = 0, r = 0, some; g < groups; g++, r += some) {
                some = (rows - r + groups - g - 1) / (groups - g); // rows are shared out evenly
                (several ? several : one_panel[some - 1])(x + r * n + i, n, w + p * stride + i / PARTS * PANEL, stride,
                                                    sums + r * PANEL, count);
            }
        }
        int64_t first = p * PANEL, outs = panels * PANEL < m - first ? panels * PANEL : m - first;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t o = 0; o < outs; o++)
                y[r * m + first + o] = rounded(sums[r * panels * PANEL + o] + (bias ? bias[first + o] : 0));
    }
}

// x [rows, n], packed w, bias [m] or null, y [rows, m]; `scratch` has room for the terms of AT_ONCE rows for each
// thread, or of all rows where they are fewer: each makes them for itself, which on two cores takes less than to wait.
void bf16_gemm(const uint16_t *x, const uint32_t *w, const float *bias, uint16_t *y, term *scratch, int64_t rows,
               int64_t n, int64_t m, int threads) {
    int64_t panels = (m + PANEL - 1) / PANEL, most = rows < AT_ONCE ? rows : AT_ONCE;
#pragma omp parallel num_threads(threads)
    {
        int64_t mine = omp_get_thread_num(), all = omp_get_num_threads();
        term *own = scratch + mine * most * n;
        for (int64_t r = 0; r < rows; r += most) {
            int64_t count = rows - r < most ? rows - r : most;
            terms_of(x + r * n, own, count * n);
            multiply(own, w, bias, y + r * m, count, n / 2 * PARTS, m, panels * mine / all,
                     panels * (mine + 1) / all);
        }
    }
}
