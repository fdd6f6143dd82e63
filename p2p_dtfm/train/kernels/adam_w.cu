/* AdamW in one pass. The operations, and what each rounds, are those of updates/adam_w.py: a
 * product and a sum are never fused, quotients and roots are rounded to the nearest. */

KERNEL adam_w_step(float *__restrict__ values, const float *__restrict__ slopes,
                   float *__restrict__ firsts, float *__restrict__ seconds, long long count,
                   float beta1, float rest1, float beta2, float rest2, float scale2, float epsilon,
                   float decay, float step_size) {
    EACH_OF(index, count) {
        const float slope = slopes[index];
        const float square = slope * slope;
        const float second = seconds[index] * beta2 + square * rest2;
        const float first = firsts[index] * beta1 + slope * rest1;
        const float divisor = sqrtf(second) * scale2 + epsilon;
        const float change = first / divisor * step_size;
        seconds[index] = second;
        firsts[index] = first;
        values[index] = values[index] * decay - change;
    }
}
