/* The sum of squares in one order: updates/exact_sums.py. */
#define LANES 65536

KERNEL norm_lanes(const float *__restrict__ values, long long count, double *__restrict__ lanes) {
    EACH_OF(lane, LANES) {
        double sum = 0.0;
        for (long long index = lane; index < count; index += LANES) {
            const double value = values[index];
            sum += value * value;
        }
        lanes[lane] = sum;
    }
}

/* By halving, in one block; the sum is in the first lane. */
KERNEL norm_halve(double *lanes) {
    for (int half = LANES / 2; half > 0; half /= 2) {
        EACH(thread) {
            for (int lane = thread; lane < half; lane += blockDim.x)
                lanes[lane] += lanes[lane + half];
        }
    }
}
