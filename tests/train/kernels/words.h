/* The words of the kernels, for a processor: threads and blocks go one after the other. */
#include <math.h>
#include <string.h>

struct width { int x; };
struct width blockIdx, blockDim, gridDim;

#define KERNEL void
#define INLINE static inline
#define SHARED static
#ifdef BACKWARDS
#define EACH(thread) for (int thread = blockDim.x - 1; thread >= 0; --thread)
#else
#define EACH(thread) for (int thread = 0; thread < blockDim.x; ++thread)
#endif
#define EACH_OF(index, count) \
    for (long long index = blockIdx.x; index < (count); index += gridDim.x)

void place(int block, int blocks, int threads) {
    blockIdx.x = block;
    gridDim.x = blocks;
    blockDim.x = threads;
}

static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
