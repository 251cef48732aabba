// y[r][o] = sum over i of x[r][i] * w[o][i], with w in bf16 and everything else in fp32, for a handful of rows r.
//
// Each weight is read and widened once for up to six rows, so that checking a few tokens takes little longer than one.
// A sum has the same order whatever the number of rows, and so the same value.
#include <stdint.h>
#include <string.h>

#define LANES 8
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

static inline floats load(const float *p) {
    floats f;
    memcpy(&f, p, sizeof f);
    return f;
}

static inline floats widen(const uint16_t *p) {
    halves h;
    floats f;
    memcpy(&h, p, sizeof h);
    words w = __builtin_convertvector(h, words) << 16;
    memcpy(&f, &w, sizeof f);
    return f;
}

static inline float total(floats v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// ROWS rows by two outputs: 12 sums, 2 pieces of weight and one of input fit into 16 registers.
#define TILE(ROWS)                                                                              \
    static void tile##ROWS(const float *x, const uint16_t *w, float *y, int64_t n, int64_t m) { \
        floats a[ROWS] = {0}, b[ROWS] = {0};                                                    \
        for (int64_t i = 0; i < n; i += LANES) {                                                \
            floats wa = widen(w + i), wb = widen(w + n + i);                                    \
            for (int r = 0; r < ROWS; r++) {                                                    \
                floats v = load(x + r * n + i);                                                 \
                a[r] += v * wa;                                                                 \
                b[r] += v * wb;                                                                 \
            }                                                                                   \
        }                                                                                       \
        for (int r = 0; r < ROWS; r++) {                                                        \
            y[r * m] = total(a[r]);                                                             \
            y[r * m + 1] = total(b[r]);                                                         \
        }                                                                                       \
    }
TILE(1)
TILE(2)
TILE(3)
TILE(4)
TILE(5)
TILE(6)

typedef void tile(const float *, const uint16_t *, float *, int64_t, int64_t);
static tile *const tiles[] = {tile1, tile2, tile3, tile4, tile5, tile6};

// x [rows, n], w [m, n], y [rows, m]; n is a multiple of LANES, m of two.
void bf16_rows(const float *x, const uint16_t *w, float *y, int64_t rows, int64_t n, int64_t m, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t o = 0; o < m; o += 2)
        for (int64_t r = 0; r < rows; r += 6) {
            int64_t left = rows - r < 6 ? rows - r : 6;
            tiles[left - 1](x + r * n, w + o * n, y + r * m + o, n, m);
        }
}
