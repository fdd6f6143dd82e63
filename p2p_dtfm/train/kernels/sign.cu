/* One bit for each element, a mean magnitude for each block: codecs/sign.py. A block has half as
 * many threads as elements share a magnitude. */
#define BLOCK 512
#define LARGEST_BF16 0x7F7F0000u

KERNEL sign_encode(const float *__restrict__ values, long long count, float scale_of_last,
                   unsigned short *__restrict__ means, unsigned char *__restrict__ signs) {
    SHARED float total[BLOCK];
    SHARED unsigned char is_below[BLOCK];
    const long long blocks = (count + BLOCK - 1) / BLOCK;
    for (long long block = blockIdx.x; block < blocks; block += gridDim.x) {
        const long long start = block * BLOCK;
        EACH(thread) {
            for (int place = thread; place < BLOCK; place += BLOCK / 2) {
                const float value = start + place < count ? values[start + place] : 0.0f;
                total[place] = __uint_as_float(magnitude_bits(value)) * (1.0f / BLOCK);
                is_below[place] = value < 0.0f;
            }
        }
        for (int half = BLOCK / 2; half > 0; half /= 2) {
            EACH(thread) {
                if (thread < half)
                    total[thread] += total[thread + half];
            }
        }
        EACH(thread) {
            if (thread == 0) {
                const float largest = __uint_as_float(LARGEST_BF16);
                const float mean = block == blocks - 1 ? total[0] * scale_of_last : total[0];
                means[block] =
                    bf16_of(is_finite(mean) ? clamped(mean, 0.0f, largest) : not_a_number());
            }
            if (thread < BLOCK / 8 && start + 8 * thread < count) {
                unsigned packed = 0;
                for (int bit = 0; bit < 8; ++bit)
                    packed |= (unsigned)is_below[8 * thread + bit] << bit;
                signs[start / 8 + thread] = (unsigned char)packed;
            }
        }
    }
}

KERNEL sign_decode(const unsigned short *__restrict__ means,
                   const unsigned char *__restrict__ signs, long long count,
                   float *__restrict__ values, int *__restrict__ fault) {
    EACH_OF(index, count) {
        const float mean = of_bf16(means[index / BLOCK]);
        if (mean < 0.0f)
            *fault = 1;
        values[index] = signs[index / 8] >> (index % 8) & 1 ? -mean : mean;
    }
}
