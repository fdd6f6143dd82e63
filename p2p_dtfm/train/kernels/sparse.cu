/* Few elements in few bits: codecs/sparse.py and codecs/selection.py. Which of the selected are the
 * largest is found by PyTorch. A block has half as many threads as elements share a scale. */
#define BLOCK 512
#define ROUNDS 2

/* Which element of a stratum has its turn: `first` is SplitMix64's output function. */
INLINE long long selected_index(long long stratum, long long count, long long one_in,
                                long long place, long long turn) {
    const long long strata = (count + one_in - 1) / one_in;
    const long long width = stratum == strata - 1 ? count - one_in * (strata - 1) : one_in;
    unsigned long long mixed =
        ((unsigned long long)stratum + (unsigned long long)place) * 0x9E3779B97F4A7C15ull;
    if (one_in == 1)
        return stratum;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
    return stratum * one_in + ((long long)((mixed >> 31) & 0x7FFFFFFFull) + turn) % width;
}

KERNEL sparse_select(const float *__restrict__ values, long long count, long long one_in,
                     long long place, long long turn, float *__restrict__ selected) {
    EACH_OF(stratum, (count + one_in - 1) / one_in) {
        selected[stratum] = values[selected_index(stratum, count, one_in, place, turn)];
    }
}

KERNEL sparse_pack_marks(const unsigned char *__restrict__ marks, long long count,
                         unsigned char *__restrict__ packed) {
    EACH_OF(byte, (count + 7) / 8) {
        unsigned bits = 0;
        for (int bit = 0; bit < 8 && 8 * byte + bit < count; ++bit)
            bits |= (unsigned)(marks[8 * byte + bit] != 0) << bit;
        packed[byte] = (unsigned char)bits;
    }
}

INLINE void add_all(float *total) {
    for (int half = BLOCK / 2; half > 0; half /= 2) {
        EACH(thread) {
            if (thread < half)
                total[thread] += total[thread + half];
        }
    }
}

/* scale: least magnitude and step of a block of which `real` elements are not filling. */
INLINE void mean_magnitude(const float *magnitudes, int real, float *total, float *scale) {
    EACH(thread) {
        for (int place = thread; place < BLOCK; place += BLOCK / 2)
            total[place] = place < real ? magnitudes[place] : 0.0f;
    }
    add_all(total);
    EACH(thread) {
        if (thread == 0) {
            scale[0] = total[0] / (float)real;
            scale[1] = scale[0] * 0.0f;
        }
    }
}

INLINE void two_levels(const float *magnitudes, float *low, float *high, float *lows,
                       float *scale) {
    SHARED float levels[2];
    SHARED float border;
    EACH(thread) {
        for (int place = thread; place < BLOCK; place += BLOCK / 2)
            low[place] = magnitudes[place];
    }
    add_all(low);
    EACH(thread) {
        if (thread == 0)
            border = low[0] / (float)BLOCK;
    }
    for (int round = 0; round < ROUNDS; ++round) {
        EACH(thread) {
            for (int place = thread; place < BLOCK; place += BLOCK / 2) {
                const int is_low = magnitudes[place] <= border;
                low[place] = is_low ? magnitudes[place] : 0.0f;
                high[place] = is_low ? 0.0f : magnitudes[place];
                lows[place] = is_low ? 1.0f : 0.0f;
            }
        }
        add_all(low);
        add_all(high);
        add_all(lows);
        EACH(thread) {
            if (thread == 0) {
                const float highs = (float)BLOCK - lows[0];
                const float lower = low[0] / (lows[0] > 1.0f ? lows[0] : 1.0f);
                const float upper = high[0] / (highs > 1.0f ? highs : 1.0f);
                levels[0] = lower;
                levels[1] = is_nan(lower) || lower > upper ? lower : upper;
                border = (levels[0] + levels[1]) / 2.0f;
            }
        }
    }
    EACH(thread) {
        if (thread == 0) {
            scale[0] = levels[0];
            scale[1] = levels[1] - levels[0];
        }
    }
}

/* Of magnitudes, whose order is that of their bits; NaN is the largest. */
INLINE void least_and_step(const float *magnitudes, float *low, float *high, float top,
                           float *scale) {
    EACH(thread) {
        for (int place = thread; place < BLOCK; place += BLOCK / 2)
            low[place] = high[place] = magnitudes[place];
    }
    for (int half = BLOCK / 2; half > 0; half /= 2) {
        EACH(thread) {
            if (thread < half) {
                if (magnitude_bits(low[thread + half]) < magnitude_bits(low[thread]))
                    low[thread] = low[thread + half];
                if (magnitude_bits(high[thread + half]) > magnitude_bits(high[thread]))
                    high[thread] = high[thread + half];
            }
        }
    }
    EACH(thread) {
        if (thread == 0) {
            scale[0] = is_nan(high[0]) ? high[0] : low[0];
            scale[1] = (high[0] - low[0]) / top;
        }
    }
}

KERNEL sparse_quantise(const float *__restrict__ kept, long long count, long long bits,
                       float *__restrict__ scales, unsigned char *__restrict__ packed) {
    SHARED float magnitudes[BLOCK];
    SHARED float low[BLOCK];
    SHARED float high[BLOCK];
    SHARED float lows[BLOCK];
    SHARED float scale[2];
    SHARED unsigned char numbers[BLOCK];
    const float top = (float)((1 << (bits - 1)) - 1);
    const int in_byte = (int)(8 / bits);
    const long long blocks = (count + BLOCK - 1) / BLOCK;
    for (long long block = blockIdx.x; block < blocks; block += gridDim.x) {
        const long long start = block * BLOCK;
        const int real = count - start < BLOCK ? (int)(count - start) : BLOCK;
        EACH(thread) {
            for (int place = thread; place < BLOCK; place += BLOCK / 2) {
                const float value = kept[start + (place < real ? place : real - 1)];
                magnitudes[place] = __uint_as_float(magnitude_bits(value));
            }
        }
        if (bits == 1)
            mean_magnitude(magnitudes, real, low, scale);
        else if (bits == 2)
            two_levels(magnitudes, low, high, lows, scale);
        else
            least_and_step(magnitudes, low, high, top, scale);
        EACH(thread) {
            const float least = is_nan(scale[0]) ? not_a_number() : scale[0];
            const float step = is_finite(scale[1]) ? scale[1] : not_a_number();
            if (thread == 0) {
                scales[2 * block] = least;
                scales[2 * block + 1] = step;
            }
            for (int place = thread; place < BLOCK; place += BLOCK / 2) {
                const float level =
                    step > 0.0f ? rintf((magnitudes[place] - least) / step) : 0.0f;
                const unsigned sign = place < real && kept[start + place] < 0.0f;
                const unsigned number = (unsigned)clamped(level, 0.0f, top);
                numbers[place] =
                    place < real ? (unsigned char)(number | sign << (bits - 1)) : 0;
            }
        }
        EACH(thread) {
            for (int byte = thread; byte * in_byte < real; byte += BLOCK / 2) {
                unsigned all = 0;
                for (int place = 0; place < in_byte; ++place)
                    all |= (unsigned)numbers[byte * in_byte + place] << (place * bits);
                packed[start / in_byte + byte] = (unsigned char)all;
            }
        }
    }
}

/* `strata`: of each kept element, in rising order; null: all are kept. */
KERNEL sparse_decode(const float *__restrict__ scales, const unsigned char *__restrict__ packed,
                     const long long *__restrict__ strata, long long kept, long long bits,
                     long long count, long long one_in, long long place, long long turn,
                     float *__restrict__ values, int *__restrict__ fault) {
    EACH_OF(number, kept) {
        const float least = scales[number / BLOCK * 2];
        const float step = scales[number / BLOCK * 2 + 1];
        const long long bit = number * bits;
        const unsigned found = packed[bit / 8] >> (bit % 8) & ((1u << bits) - 1u);
        const float level = (float)(found & ((1u << (bits - 1)) - 1u));
        const float magnitude = level * step + least;
        const long long stratum = strata ? strata[number] : number;
        if (least < 0.0f || step < 0.0f)
            *fault = 1;
        values[selected_index(stratum, count, one_in, place, turn)] =
            found >> (bits - 1) ? -magnitude : magnitude;
    }
}
