// What the kernels share.
#include <omp.h>
#include <stdint.h>
#include <string.h>

static inline uint16_t rounded(float value) { // to the nearest bf16, a tie to the even one
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
