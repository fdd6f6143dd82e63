/* A scale and a byte for each element: codecs/dense.py, Int8. A block has as many threads as
 * elements share a scale. */
#define BLOCK 128
#define LEVELS 127.0f

KERNEL int8_encode(const float *__restrict__ values, long long count, float *__restrict__ steps,
                   signed char *__restrict__ numbers) {
    SHARED unsigned largest[BLOCK]; /* as integers magnitudes order alike, and NaN is the largest */
    const long long blocks = (count + BLOCK - 1) / BLOCK;
    for (long long block = blockIdx.x; block < blocks; block += gridDim.x) {
        EACH(thread) {
            const long long index = block * BLOCK + thread;
            largest[thread] = index < count ? magnitude_bits(values[index]) : 0;
        }
        for (int half = BLOCK / 2; half > 0; half /= 2) {
            EACH(thread) {
                if (thread < half && largest[thread + half] > largest[thread])
                    largest[thread] = largest[thread + half];
            }
        }
        EACH(thread) {
            const long long index = block * BLOCK + thread;
            const float step = largest[0] < INFINITE ? __uint_as_float(largest[0]) / LEVELS
                                                     : not_a_number();
            if (thread == 0)
                steps[block] = step;
            if (index < count) {
                const float level = step > 0.0f ? rintf(values[index] / step) : 0.0f;
                numbers[index] = (signed char)clamped(level, -LEVELS, LEVELS);
            }
        }
    }
}

KERNEL int8_decode(const float *__restrict__ steps, const signed char *__restrict__ numbers,
                   long long count, float *__restrict__ values, int *__restrict__ fault) {
    EACH_OF(index, count) {
        const float step = steps[index / BLOCK];
        if (step < 0.0f)
            *fault = 1;
        values[index] = (float)numbers[index] * step;
    }
}
