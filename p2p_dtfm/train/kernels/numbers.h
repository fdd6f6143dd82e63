/* Bits of fp32 and bf16. */
#define INFINITE 0x7F800000u
#define NOT_A_NUMBER 0x7FC00000u

INLINE unsigned magnitude_bits(float value) { return __float_as_uint(value) & 0x7FFFFFFFu; }

INLINE float not_a_number(void) { return __uint_as_float(NOT_A_NUMBER); }

INLINE int is_finite(float value) { return magnitude_bits(value) < INFINITE; }

INLINE int is_nan(float value) { return magnitude_bits(value) > INFINITE; }

INLINE float clamped(float value, float least, float most) {
    return value < least ? least : value > most ? most : value;
}

/* To the nearest, of two alike the even one; of a number that is finite in bf16, or NaN. */
INLINE unsigned short bf16_of(float value) {
    const unsigned bits = __float_as_uint(value);
    return is_nan(value) ? 0x7FC0 : (unsigned short)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

INLINE float of_bf16(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }
