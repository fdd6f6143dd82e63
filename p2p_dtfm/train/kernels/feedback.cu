/* What a lossy codec loses is owed: stage/segment_reduction.py. */

KERNEL feedback_add(float *__restrict__ values, const float *__restrict__ owed, long long count) {
    EACH_OF(index, count) {
        values[index] = values[index] + owed[index];
    }
}

KERNEL feedback_owe(const float *__restrict__ values, const float *__restrict__ decoded,
                    long long count, float *__restrict__ owed) {
    EACH_OF(index, count) {
        owed[index] = values[index] - decoded[index];
    }
}
